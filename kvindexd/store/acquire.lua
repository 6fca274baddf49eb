-- Take the lease of a worker rank: free, lapsed, or already the same owner's.
-- ARGV: id, owner, nonce, ttl_ms, maxlen
local id, owner, nonce, ttl, maxlen = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local w = redis.call('HMGET', KEYS[1], 'reg', 'ow', 'fn', 'fc', 'nb', 'np')
if not w[1] then return {'NOTREG'} end
local now = server_ms()
local expiry = tonumber(redis.call('ZSCORE', KEYS[4], id) or 0)
local held_by = w[2] or ''
if held_by ~= '' and held_by ~= owner and expiry > now then
  return {'HELD', held_by, int(expiry - now)}
end
local fence = w[3]
-- The same nonce again is a repeat after a lost reply, not another acquisition.
if not (fence and string.sub(fence, -#nonce) == nonce) then
  allow_when_full()
  local count = (tonumber(w[4]) or 0) + 1
  fence = int(count) .. '-' .. nonce
  redis.call('HSET', KEYS[1], 'ow', owner, 'fn', fence, 'fc', int(count), 'ha', int(now))
  redis.call('HDEL', KEYS[1], 'cl')
  local at = redis.call('HMGET', KEYS[1], 'ep', 'rv')
  emit(maxlen, now, 'k', 'lease', 'w', id, 'e', at[1], 'r', at[2], 'o', owner)
  close_feed()
else
  allow_when_full()
end
redis.call('ZADD', KEYS[4], int(now + ttl), id)
local held = redis.call('HLEN', KEYS[2]) + redis.call('HLEN', KEYS[3])
local intact = held == (tonumber(w[5]) or 0) + (tonumber(w[6]) or 0)
local r = redis.call('HMGET', KEYS[1], 'ep', 'rv', 'sq', 'ts', 'dg', 'ak')
return {'OK', fence, r[1], r[2], r[3], r[4], r[5], r[6] or '', intact and 1 or 0, int(now + ttl)}
