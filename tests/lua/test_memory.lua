-- test_memory.lua -- ownership, the collector, out of memory.
local t = require "harness"
local ddp = require "ddp"
local base = require "ddp.ffi"

local function resident()
  for line in io.lines "/proc/self/status" do
    local kb = line:match "^VmRSS:%s+(%d+)"
    if kb then return tonumber(kb) / 1024 end
  end
end
local sanitized = (os.getenv "LD_PRELOAD" or ""):find "asan" ~= nil

t.test("M1 10,000 temporaries of 1 MB stay under 100 MB of resident memory and 20 s", function()
  if sanitized then t.skip "the sanitizer keeps freed memory back" end
  local begin, top = os.time(), 0
  for i = 1, 5000 do -- two temporaries each
    local x = ddp.zeros(262144)
    x = x + 1
    if i % 100 == 0 then top = math.max(top, resident()) end
  end
  t.ok(top < 100, "resident " .. top .. " MB")
  t.ok(os.time() - begin < 20)
end)
t.test("M1 the same beside 50 MB of live Lua data", function()
  if sanitized then t.skip "the sanitizer keeps freed memory back" end
  collectgarbage()
  local data = {}
  local before = collectgarbage "count"
  for i = 1, 1e6 do
    data[i] = { i }
    if collectgarbage "count" - before > 50 * 1024 then break end
  end
  local begin, base_mb, top = os.time(), resident(), 0
  for i = 1, 5000 do -- two temporaries each
    local x = ddp.zeros(262144)
    x = x + 1
    if i % 100 == 0 then top = math.max(top, resident()) end
  end
  t.ok(#data > 1000)
  t.ok(top - base_mb < 100, ("resident %.0f MB, %.0f before"):format(top, base_mb))
  t.ok(os.time() - begin < 20, "took " .. os.time() - begin .. " s")
end)
t.test("M4 handles are released in any order, with a collection after every call", function()
  local kept = {}
  for i = 1, 50 do
    local x = ddp.randn(4, 4, { requires_grad = true })
    local y = (x * x):view(16):sum()
    collectgarbage()
    if i % 3 == 0 then kept[#kept + 1] = y end
    if i % 3 == 1 then y:backward() end
    x, y = nil, nil
    collectgarbage()
  end
  for i = 1, #kept, 2 do kept[i] = nil end
  collectgarbage()
end)
t.test("all tensors are gone when nothing holds them", function()
  collectgarbage()
  collectgarbage()
  local before = ddp.memory_stats().live_tensors
  local function train()
    local m = ddp.nn.Sequential(ddp.nn.Linear(4, 8), ddp.nn.ReLU(), ddp.nn.Linear(8, 2))
    local opt = ddp.optim.Adam(m:parameters())
    for _ = 1, 3 do
      local loss = m(ddp.randn(5, 4)):mean()
      opt:zero_grad()
      loss:backward()
      opt:step()
    end
  end
  train()
  for _ = 1, 3 do collectgarbage() end
  t.eq(ddp.memory_stats().live_tensors - before, 0)
end)
t.test("a failed allocation is retried once after a collection, then named", function()
  base.C.ddp_memory_fail_at(1)
  t.eq(ddp.ones(3):sum():item(), 3)
  base.C.ddp_memory_fail_at(0)
  t.fails(function() return ddp.zeros(2 ^ 30, 2 ^ 20) end, "out of memory")
end)
t.test("a step survives a failure at each of its allocations", function()
  ddp.manual_seed(1)
  local m = ddp.nn.Sequential(ddp.nn.Linear(4, 8), ddp.nn.ReLU(), ddp.nn.Linear(8, 2))
  local x, y = ddp.randn(5, 4), ddp.randint(0, 2, { 5 })
  local function step()
    local loss = ddp.nn.functional.cross_entropy(m(x), y)
    m:zero_grad()
    loss:backward()
    return loss:item()
  end
  local want = step()
  for k = 1, 60 do
    base.C.ddp_memory_fail_at(k)
    local ok, err = pcall(step)
    base.C.ddp_memory_fail_at(0)
    if not ok then t.ok(tostring(err):find "out of memory", tostring(err)) end
    t.near(step(), want, 1e-6, "the step after failure " .. k)
  end
end)
t.test("M3 varying sizes keep reserved memory near the peak in use", function()
  ddp.empty_cache()
  ddp.reset_peak_memory_stats()
  collectgarbage()
  for i = 1, 1000 do
    local n = i * 37 % 64 + 1
    local x = ddp.zeros(n, 16384)
    base.free(x * 2)
    base.free(x)
  end
  local s = ddp.memory_stats()
  t.ok(s.reserved <= 1.3 * s.peak + 16 * 2 ^ 20, ("reserved %d, peak %d"):format(s.reserved, s.peak))
end)

t.done()
