-- Forget what a worker rank holds, by somebody who does not own it: next epoch, lease revoked.
-- ARGV: id, maxlen
local w = redis.call('HMGET', KEYS[1], 'reg', 'ep')
if not w[1] then return {'NOTREG'} end
allow_when_full()
forget(ARGV[1], tonumber(w[2]) + 1, ARGV[2], server_ms())
close_feed()
return {'OK', int(tonumber(w[2]) + 1)}
