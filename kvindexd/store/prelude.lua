-- Shared by every script: prepended to it. Server time, refusals, feed entries.
-- KEYS of a worker script: worker, blocks, parked, workers, feed, shard (store/keys.py).

-- Redis 6.2 replicates a script verbatim unless told so, and then forbids writes after TIME.
if redis.replicate_commands then redis.replicate_commands() end

local function int(n) return string.format('%.0f', n) end

local function server_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A script may write beyond maxmemory once its first write was one that cannot add memory.
-- So what must work on a full server starts with this, and what may be refused, does not.
local function allow_when_full() redis.call('HDEL', KEYS[1], '') end

-- Feed ids are <ms>-<n>, n counting 1, 2, 3... per shard, so that a reader sees any hole.
local feed_n, feed_ms

local function emit(maxlen, now, ...)
  if not feed_n then
    local last = redis.call('HMGET', KEYS[6], 'n', 'ms')
    if not last[1] then
      -- No counter beside a feed (somebody deleted it): go on after the feed's last entry, since
      -- an id that the stream refuses would leave this script half done.
      local tail = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)[1]
      if tail then last[2], last[1] = string.match(tail[1], '^(%d+)%-(%d+)$') end
    end
    feed_n = tonumber(last[1]) or 0
    feed_ms = math.max(now, tonumber(last[2]) or 0)
  end
  feed_n = feed_n + 1
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', maxlen, int(feed_ms) .. '-' .. int(feed_n), ...)
end

local function close_feed()
  if feed_n then redis.call('HSET', KEYS[6], 'n', int(feed_n), 'ms', int(feed_ms)) end
end

-- Forget all blocks of a worker, start the next epoch and revoke the lease. `at`: seq, ts and digest
-- of the batch behind which its stream goes on; without it, from the beginning.
local function forget(id, epoch, maxlen, now, at)
  local seq, ts, digest = '-1', '0.0', '0'
  if at and at[1] then seq, ts, digest = at[1], at[2], at[3] end
  redis.call('UNLINK', KEYS[2], KEYS[3])
  redis.call('HDEL', KEYS[1], 'fn', 'pf', 'st', 'hb', 'nb', 'np', 'cl')
  redis.call('HSET', KEYS[1], 'ep', int(epoch), 'rv', '0', 'sq', seq, 'ts', ts, 'dg', digest,
    'ow', '', 'tb', '0,0,0,0')
  redis.call('ZADD', KEYS[4], 0, id)
  emit(maxlen, now, 'k', 'clear', 'w', id, 'e', int(epoch), 'r', '0', 'q', seq, 't', ts)
end
