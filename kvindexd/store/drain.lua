-- Set or lift the draining mark.
-- ARGV: id, draining (1/0), maxlen, by ("" = an operator, whose mark nobody else lifts)
local w = redis.call('HMGET', KEYS[1], 'reg', 'ep', 'rv', 'dr', 'db')
if not w[1] then return {'NOTREG'} end
if (w[4] or '0') ~= ARGV[2] then
  if ARGV[2] == '0' and ARGV[4] ~= '' and ARGV[4] ~= w[5] then return {'OK'} end
  allow_when_full()
  redis.call('HSET', KEYS[1], 'dr', ARGV[2], 'db', ARGV[4])
  emit(ARGV[3], server_ms(), 'k', 'drain', 'w', ARGV[1], 'e', w[2], 'r', w[3], 'd', ARGV[2])
  close_feed()
elseif ARGV[4] == '' then
  allow_when_full()
  redis.call('HSET', KEYS[1], 'db', '')
end
return {'OK'}
