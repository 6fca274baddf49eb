-- What one scorer has in flight on a worker rank, for the others to see.
-- ARGV: id, source, payload ('' = none)
if redis.call('HEXISTS', KEYS[1], 'reg') == 0 then return {'NOTREG'} end
local field = 'l:' .. ARGV[2]
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], field)
else
  redis.call('HSET', KEYS[1], field, int(server_ms()) .. ':' .. ARGV[3])
end
return {'OK'}
