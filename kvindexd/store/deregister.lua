-- Remove a worker rank and all it held. Answers 1 if it was there.
-- ARGV: id, maxlen, and the registration that it must have, "" = any
local epoch = redis.call('HGET', KEYS[1], 'ep')
if ARGV[3] ~= '' and redis.call('HGET', KEYS[1], 'reg') ~= ARGV[3] then return 0 end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
if not epoch then return 0 end
local floor = tonumber(redis.call('HGET', KEYS[6], 'floor')) or 0
redis.call('HSET', KEYS[6], 'floor', int(math.max(floor, tonumber(epoch))))
emit(ARGV[2], server_ms(), 'k', 'gone', 'w', ARGV[1], 'e', epoch, 'r', '0')
close_feed()
return 1
