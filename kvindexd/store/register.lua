-- Add or update a worker rank; `changed`: another incarnation, what it held is void.
-- ARGV: id, registration, changed (1/0), now (seconds), nonce, maxlen, and "if" with the
-- registration that it must have before ("" = none; otherwise nothing is done)
local id, reg, changed, maxlen = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[6]
local w = redis.call('HMGET', KEYS[1], 'reg', 'ep', 'rv', 'rn')
local now = server_ms()
if w[1] and w[4] == ARGV[5] then return {'OK', w[2], w[3], 0} end
if ARGV[7] == 'if' and (w[1] or '') ~= ARGV[8] then return {'OTHER'} end
if w[1] then allow_when_full() end
redis.call('HSET', KEYS[1], 'reg', reg, 'rn', ARGV[5], 'at', ARGV[4])
local created = 0
if not w[1] then
  -- Never an epoch again that a replica may remember from an earlier worker of this name.
  local epoch = (tonumber(redis.call('HGET', KEYS[6], 'floor')) or 0) + 1
  created = 1
  redis.call('HSET', KEYS[1], 'ep', int(epoch), 'rv', '0', 'sq', '-1', 'ts', '0.0', 'dg', '0',
    'ow', '', 'dr', '0', 'tb', '0,0,0,0')
  redis.call('UNLINK', KEYS[2], KEYS[3])
  redis.call('ZADD', KEYS[4], 0, id)
elseif changed then
  forget(id, tonumber(w[2]) + 1, maxlen, now)
end
local r = redis.call('HMGET', KEYS[1], 'ep', 'rv')
if w[1] ~= reg or changed then
  emit(maxlen, now, 'k', 'reg', 'w', id, 'e', r[1], 'r', r[2], 'v', reg)
end
close_feed()
return {'OK', r[1], r[2], created}
