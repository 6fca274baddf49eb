-- Forget what a worker rank holds, by somebody who does not own it: next epoch, lease revoked.
-- The stream goes on where it was: read from the beginning, the engine's replay would bring back
-- the very claims that were to go.
-- ARGV: id, maxlen
local w = redis.call('HMGET', KEYS[1], 'reg', 'ep')
if not w[1] then return {'NOTREG'} end
allow_when_full()
local at = redis.call('HMGET', KEYS[1], 'sq', 'ts', 'dg')
forget(ARGV[1], tonumber(w[2]) + 1, ARGV[2], server_ms(), at)
close_feed()
return {'OK', int(tonumber(w[2]) + 1)}
