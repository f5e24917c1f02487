-- check.lua -- ddp.check: do all ranks hold the same parameters?
local ffi = require "ffi"
local bit = require "bit"
local base = require "ddp.ffi"
local parallel = require "ddp.parallel"
local C, fail = base.C, base.error

-- 32 bits of a parameter's bits. Each step is one-to-one in the hash and in the word, so one changed bit always shows.
local function hash(p)
  local t = p:detach():to "cpu":contiguous()
  local bytes = t:numel() * tonumber(C.ddp_dtype_size(C.ddp_dtype_of(t)))
  local data = C.ddp_data(t)
  local words, tail = ffi.cast("const int32_t *", data), ffi.cast("const uint8_t *", data)
  local h = bytes
  for i = 0, math.floor(bytes / 4) - 1 do h = bit.bxor(bit.rol(h, 5) + words[i], i) end
  for i = bytes - bytes % 4, bytes - 1 do h = bit.bxor(bit.rol(h, 5) + tail[i], i) end
  return bit.tohex(h)
end

-- "rank 1", "ranks 1, 3"
local function ranks_text(list) return (#list > 1 and "ranks " or "rank ") .. table.concat(list, ", ") end

-- Each rank's entry at i beside rank 0's: the ranks that differ, and the first of these entries.
local function differing(all, i)
  local others, first = {}, nil
  for r = 2, #all do
    local a, b = all[1][i] or {}, all[r][i] or {}
    if a[1] ~= b[1] or a[2] ~= b[2] then
      others[#others + 1] = r - 1
      first = first or b
    end
  end
  return others, first
end

-- ddp.check(model): compares a hash of every parameter over the ranks; where one differs all ranks raise, naming it and the
-- ranks. Returns true. Collective.
return { check = function(model)
  if type(model) ~= "table" or not model.named_parameters then fail("check: expected a module, got a " .. type(model)) end
  local mine, most = {}, 0
  for name, p in model:named_parameters() do mine[#mine + 1] = { name, hash(p) } end
  local all = parallel.all_gather_object(mine)
  for _, theirs in ipairs(all) do most = math.max(most, #theirs) end
  for i = 1, most do
    local others, first = differing(all, i)
    if #others > 0 then
      local name = (all[1][i] or first)[1]
      if first[1] == (all[1][i] or {})[1] then fail(("check: parameter %s differs between rank 0 and %s"):format(name, ranks_text(others))) end
      fail(("check: parameter %d is %s on rank 0, %s on rank %d"):format(i, (all[1][i] or { "missing" })[1], first[1] or "missing", others[1]))
    end
  end
  return true
end }
