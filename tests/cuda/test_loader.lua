-- test_loader.lua -- loaders that give out batches on a GPU, on the double: the same values as on the cpu, whatever runs when.
package.path = "tests/cuda/?.lua;" .. package.path
local t, child = require "harness", require "child"
local ddp = require "ddp"
local base = require "ddp.ffi"
local data = ddp.data

local function gone() for _ = 1, 4 do collectgarbage() end end
local X, Y = ddp.randn(53, 3, 6, 6), ddp.arange(53)

local function set() return data.tensors(X, Y) end
local TRANSFORM = { random_crop = { 6, padding = 1 }, flip = true, normalize = { mean = .1, std = .5 } }
local function loader(device, workers, more)
  local opts = { batch_size = 8, shuffle = true, seed = 3, workers = workers, transform = TRANSFORM, device = device }
  for k, v in pairs(more or {}) do opts[k] = v end
  return data.DataLoader(set(), opts)
end

-- All of `epochs` passes as lists; each batch goes through a little work on its device.
local function read(l, epochs)
  local out = {}
  for _ = 1, epochs do
    for x, y in l:iter() do
      local z = x * 2 + 1
      out[#out + 1] = { x:size(), z:to "cpu":tolist(), y:to "cpu":tolist(), x:stride() }
    end
  end
  return out
end

for workers = 0, 4 do
  t.test(("batches on the GPU are those of the cpu, the short last one too, with %d workers"):format(workers), function()
    local want, l = read(loader("cpu", 0), 2), loader("cuda", workers)
    local got = read(l, 2)
    t.eq(#got, 14)
    t.eq(got, want)
    for x, y in l:iter() do t.eq({ x:device(), y:device() }, { "cuda:0", "cuda:0" }) end
    l:close()
  end)
end
t.test("a loop that is left leaves nothing behind, and the next one begins anew", function()
  gone()
  local before, host = ddp.memory_stats "cuda", ddp.memory_stats "cpu".live_tensors
  for workers = 0, 3 do
    local l, want = loader("cuda", workers), read(loader("cpu", 0), 3)
    for stop = 1, 2 do
      local n = 0
      for x in l:iter() do
        n = n + 1
        if n == stop + 1 then break end
        base.free(x * 2)
      end
    end
    local third = {}
    for i = 15, 21 do third[#third + 1] = want[i] end
    t.eq(read(l, 1), third)
    l:close()
  end
  gone()
  t.eq(ddp.memory_stats "cuda".allocated, before.allocated)
  t.eq(ddp.memory_stats "cpu".live_tensors, host)
end)
t.test("the position counts what was given out, not what is on its way", function()
  local l, want = loader("cuda", 2), read(loader("cpu", 0), 1)
  local n, state = 0, nil
  for _ in l:iter() do
    n = n + 1
    t.eq(l:state_dict().batch, n)
    if n == 3 then
      state = l:state_dict()
      break
    end
  end
  local again = loader("cuda", 3)
  again:load_state_dict(state)
  local rest = {}
  for i = 4, 7 do rest[#rest + 1] = want[i] end
  t.eq(read(again, 1), rest)
  l:close()
  again:close()
end)
t.test("an error of a sample comes in its turn, and the batches around it are right", function()
  for workers = 0, 2 do
    local l = data.DataLoader(data.from(12, function(i)
      if i == 6 then error "bad sample" end
      return i, i * 2
    end, { types = { "f32", "i64" } }), { batch_size = 2, workers = workers, device = "cuda" })
    local step, got, errors = l:iter(), {}, 0
    while true do
      local ok, x, y = pcall(step)
      if not ok then
        errors = errors + 1
        t.ok(tostring(x):find "bad sample", tostring(x))
        got[#got + 1] = "error"
      elseif x == nil then break
      else got[#got + 1] = x:sum():item() + y:sum():item() end
    end
    t.eq(errors, 1)
    t.eq(got, { 9, 21, "error", 45, 57, 69 })
    l:close()
  end
end)
t.test("samples that are skipped shorten the batch", function()
  local l = data.DataLoader(data.from(7, function(i)
    if i == 2 then error "bad sample" end
    return i
  end, { types = { "f32" } }), { batch_size = 3, workers = 2, device = "cuda", on_error = "skip" })
  local got = {}
  for x in l:iter() do got[#got + 1] = x:to "cpu":tolist() end
  t.eq(got, { { 1, 3 }, { 4, 5, 6 }, { 7 } })
  l:close()
end)
t.test("with collate its result goes to the GPU", function()
  local l = data.DataLoader(set(), { batch_size = 20, device = "cuda", collate = function(batch)
    local xs = {}
    for i, b in ipairs(batch) do xs[i] = b[1] end
    return ddp.stack(xs, 1)
  end })
  local sizes = {}
  for x in l:iter() do
    t.eq(x:device(), "cuda:0")
    sizes[#sizes + 1] = x:size(1)
  end
  t.eq(sizes, { 20, 20, 13 })
end)
t.test("a failure at each allocation is told or made good, and no batch is wrong", function()
  local want = read(loader("cpu", 0), 1)
  for k = 1, 40 do
    local l = loader("cuda", 0)
    base.C.ddp_memory_fail_at(k)
    local ok, got = pcall(read, l, 1)
    base.C.ddp_memory_fail_at(0)
    if ok then t.eq(got, want) else t.ok(tostring(got):find "out of memory", tostring(got)) end
    l:close()
  end
end)
t.test("tensors of a GPU are refused as samples, with what to do", function()
  t.fails(function() return data.tensors(X:to "cuda") end, "keep it on the cpu")
end)
t.test("a GPU that is not there is refused", function()
  t.fails(function() return loader("cuda:9", 0) end, "no \"cuda:9\"")
end)
if not os.getenv "DDP_LOADER_AGAIN" then
  for seed = 1, 3 do
    t.test("the same when the double runs its streams at random, seed " .. seed, function()
      local out, ended = child.run("DDP_LOADER_AGAIN=1 DDP_DOUBLE_MODE=random DDP_DOUBLE_SEED=" .. seed, [[dofile "tests/cuda/test_loader.lua"]])
      t.ok(ended and not out:find "not ok", out)
    end)
  end
end

t.done()
