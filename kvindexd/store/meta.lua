-- Read what all processes agree on, or write it if this is a fresh store.
-- KEYS: meta. ARGV: schema, shards, birth
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'shards', ARGV[2], 'birth', ARGV[3])
end
return redis.call('HMGET', KEYS[1], 'schema', 'shards', 'birth')
