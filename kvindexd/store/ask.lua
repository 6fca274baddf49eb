-- Leave the owner a request; it reads it with its next heartbeat.
-- ARGV: id, what, nonce, maxlen
local w = redis.call('HMGET', KEYS[1], 'reg', 'ep', 'rv', 'ak')
if not w[1] then return {'NOTREG'} end
local n, nonce = string.match(w[4] or '', '^(%d+) (%x+) ')
if nonce ~= ARGV[3] then
  allow_when_full()
  n = int((tonumber(n) or 0) + 1)
  redis.call('HSET', KEYS[1], 'ak', n .. ' ' .. ARGV[3] .. ' ' .. ARGV[2])
  emit(ARGV[4], server_ms(), 'k', 'ask', 'w', ARGV[1], 'e', w[2], 'r', w[3], 'v', ARGV[2])
  close_feed()
end
return {'OK', n}
