-- Write one or several batches of one worker rank: all of it or nothing.
-- ARGV: id, fence, ttl_ms, call, base epoch, base revision, maxlen, stores (1/0), count, then per
-- delta: seq, ts, digest, clear, #set blocks, #del blocks, #set parked, #del parked, #counters,
-- tiers, mutations, profile, state, then these lists (set lists and counters as pairs).
local HEADER = 13
local id, fence, ttl, call = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local maxlen, stores = ARGV[7], ARGV[8] == '1'

local w = redis.call('HMGET', KEYS[1], 'reg', 'fn', 'ow', 'ep', 'rv', 'sq', 'cl', 'nb', 'np', 'ca')
if not w[1] then return {'NOTREG'} end
if w[2] ~= fence then return {'FENCED', w[3] or ''} end
local epoch, revision, last = tonumber(w[4]), tonumber(w[5]), tonumber(w[6])
local now = server_ms()
if w[7] == call then
  return {'OK', int(epoch), int(revision), tonumber(w[10]) or 0, int(now + ttl)}
end
if epoch ~= tonumber(ARGV[5]) or revision ~= tonumber(ARGV[6]) then
  return {'DIVERGED', int(epoch), int(revision), w[7] or ''}
end
local held = redis.call('HLEN', KEYS[2]) + redis.call('HLEN', KEYS[3])
local expected = (tonumber(w[8]) or 0) + (tonumber(w[9]) or 0)
if held ~= expected and ARGV[13] ~= '1' then -- a clear mends it
  return {'DAMAGED', expected, held}
end

-- The first write decides whether a full server refuses: before anything has changed.
if stores then redis.call('HSET', KEYS[1], 'cl', call) else allow_when_full() end

local function hset(key, first, last_arg)
  -- Lua can unpack about 8,000 values.
  for i = first, last_arg, 1000 do
    redis.call('HSET', key, unpack(ARGV, i, math.min(i + 999, last_arg)))
  end
end

local function hdel(key, first, last_arg)
  for i = first, last_arg, 1000 do
    redis.call('HDEL', key, unpack(ARGV, i, math.min(i + 999, last_arg)))
  end
end

local applied, at, final, tiers, profile, state = 0, 10, nil, nil, '', ''
local counters = {}
for _ = 1, tonumber(ARGV[9]) do
  local seq, clear = tonumber(ARGV[at]), ARGV[at + 3] == '1'
  local set_b, del_b = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local set_p, del_p = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  local n_counters = tonumber(ARGV[at + 8])
  local b1 = at + HEADER
  local b2 = b1 + set_b
  local p1 = b2 + del_b
  local p2 = p1 + set_p
  local c1 = p2 + del_p
  local next_at = c1 + n_counters
  -- seq -1 without clear: a change of ours that no engine batch carries; never a repeat.
  if clear or seq < 0 or seq > last then
    if clear then
      redis.call('UNLINK', KEYS[2], KEYS[3])
      epoch, revision, last = epoch + 1, 0, -1
      profile, state = '', ''
      redis.call('HDEL', KEYS[1], 'pf', 'st')
    end
    if set_b > 0 then hset(KEYS[2], b1, b2 - 1) end
    if del_b > 0 then hdel(KEYS[2], b2, p1 - 1) end
    if set_p > 0 then hset(KEYS[3], p1, p2 - 1) end
    if del_p > 0 then hdel(KEYS[3], p2, c1 - 1) end
    for i = c1, next_at - 1, 2 do
      counters[ARGV[i]] = (counters[ARGV[i]] or 0) + tonumber(ARGV[i + 1])
    end
    revision, applied = revision + 1, applied + 1
    if seq >= 0 then last = seq end
    if seq >= 0 or clear then final = at end
    local entry = {'w', id, 'e', int(epoch), 'r', int(revision), 'q', ARGV[at],
      't', ARGV[at + 1], 'm', ARGV[at + 10]}
    if clear then entry[13], entry[14] = 'c', '1' end
    if ARGV[at + 11] ~= '' then
      profile = ARGV[at + 11]
      entry[#entry + 1] = 'f'
      entry[#entry + 1] = profile
    end
    if ARGV[at + 12] ~= '' then state = ARGV[at + 12] end
    tiers = ARGV[at + 9]
    emit(maxlen, now, unpack(entry))
  end
  at = next_at
end

local record = {'ep', int(epoch), 'rv', int(revision), 'cl', call, 'ca', applied, 'ha', int(now),
  'nb', redis.call('HLEN', KEYS[2]), 'np', redis.call('HLEN', KEYS[3])}
local function put(name, value)
  record[#record + 1] = name
  record[#record + 1] = value
end
if final then
  put('sq', int(last))
  put('ts', ARGV[final + 1])
  put('dg', ARGV[final + 2])
end
if tiers then put('tb', tiers) end
if profile ~= '' then put('pf', profile) end
if state ~= '' then put('st', state) end
redis.call('HSET', KEYS[1], unpack(record))
for name, by in pairs(counters) do redis.call('HINCRBY', KEYS[1], 'c:' .. name, int(by)) end
redis.call('ZADD', KEYS[4], int(now + ttl), id)
close_feed()
return {'OK', int(epoch), int(revision), applied, int(now + ttl)}
