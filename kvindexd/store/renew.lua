-- Heartbeat of the owner. A lapsed lease that nobody took is ours again.
-- ARGV: id, fence, ttl_ms, evidence (msgpack, '' = unchanged), maxlen
local id, ttl = ARGV[1], tonumber(ARGV[3])
local w = redis.call('HMGET', KEYS[1], 'reg', 'fn', 'ow', 'ep', 'rv', 'hb', 'ak')
if not w[1] then return {'NOTREG'} end
if w[2] ~= ARGV[2] then return {'FENCED', w[3] or ''} end
local now = server_ms()
allow_when_full()
redis.call('ZADD', KEYS[4], int(now + ttl), id)
redis.call('HSET', KEYS[1], 'ha', int(now))
if ARGV[4] ~= '' and ARGV[4] ~= w[6] then
  redis.call('HSET', KEYS[1], 'hb', ARGV[4])
  emit(ARGV[5], now, 'k', 'beat', 'w', id, 'e', w[4], 'r', w[5], 'v', ARGV[4])
  close_feed()
end
return {'OK', w[4], w[5], int(now + ttl), w[7] or ''}
