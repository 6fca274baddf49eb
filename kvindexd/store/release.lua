-- Give the lease back. Answers 1 if it was ours, 0 if it was gone already.
-- ARGV: id, fence, maxlen
local w = redis.call('HMGET', KEYS[1], 'fn', 'ep', 'rv')
if w[1] ~= ARGV[2] then return 0 end
allow_when_full()
redis.call('HSET', KEYS[1], 'ow', '')
redis.call('HDEL', KEYS[1], 'fn')
redis.call('ZADD', KEYS[4], 0, ARGV[1])
emit(ARGV[3], server_ms(), 'k', 'lease', 'w', ARGV[1], 'e', w[2], 'r', w[3], 'o', '')
close_feed()
return 1
