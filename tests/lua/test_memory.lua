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
  jit.flush() -- a compiled trace holds the objects that it was specialised on
  for _ = 1, 3 do collectgarbage() end
  t.eq(ddp.memory_stats().live_tensors - before, 0)
end)
t.test("a failed allocation is retried once after a collection, then named", function()
  base.C.ddp_memory_fail_at(1)
  t.eq(ddp.ones(3):sum():item(), 3)
  base.C.ddp_memory_fail_at(0)
  t.fails(function() return ddp.zeros(2 ^ 30, 2 ^ 20) end, "out of memory")
end)
t.test("a kernel's workspaces, one within the other, are kept: the third call takes its result alone", function()
  if sanitized then t.skip "the sanitizer's build keeps none" end
  local x, w = ddp.randn(1, 8, 8, 17):permute(1, 4, 2, 3):to "bf16", ddp.randn(16, 17, 3, 3):to "bf16"
  local function taken(f)
    local before = tonumber(base.C.ddp_live_bytes_since_gc())
    local y = f()
    return tonumber(base.C.ddp_live_bytes_since_gc()) - before, y:size()
  end
  local function conv() return ddp.no_grad(ddp.nn.functional.conv2d, x, w, nil, { stride = 2 }) end
  conv()
  conv()
  local bytes, size = taken(conv)
  t.eq(bytes, (taken(function() return ddp.zeros(size, { dtype = "bf16" }) end)))
end)
-- More than any machine has: 16 TB.
local function too_much() return ddp.zeros(2 ^ 21, 2 ^ 21) end
local function line_here() return debug.getinfo(2, "l").currentline end

t.test("M2 an out-of-memory error says what was asked for, what is in use, and what to try in order", function()
  local kept = ddp.ones(1024, 1024)
  local err = t.fails(too_much, "out of memory: 17592186044416 bytes (16777216.0 MB) asked for")
  local in_use = tonumber(err:match "([%d.]+) MB in use")
  t.ok(in_use and in_use >= 4 and math.abs(in_use - ddp.memory_stats().allocated / 2 ^ 20) < 64, err)
  local at = 0
  for _, remedy in ipairs { "to try", "gradient accumulation", "bf16", "ddp.autocast", "ddp.checkpoint", "a smaller batch" } do
    local found = err:find(remedy, at + 1, true)
    t.ok(found, remedy .. " is missing, or out of order, in " .. err)
    at = found
  end
  t.eq(kept:numel(), 2 ^ 20)
end)
t.test("M2 it names the largest live tensors by shape, dtype, op and the line that made them", function()
  collectgarbage()
  collectgarbage()
  local a, line_a = ddp.randn(3, 1024, 1024), line_here()
  local b, line_b = a:to "bf16", line_here()
  local dropped = ddp.full({ 5, 1024, 1024 }, 1)
  local small = ddp.ones(1024)
  base.free(dropped)
  local err = t.fails(too_much, "the largest live tensors:")
  t.ok(err:find(("12.0 MB  f32 [3,1024,1024] by randn at tests/lua/test_memory.lua:%d\n"):format(line_a), 1, true), err)
  t.ok(err:find(("6.0 MB  bf16 [3,1024,1024] by cast at tests/lua/test_memory.lua:%d\n"):format(line_b), 1, true), err)
  t.ok(not err:find("[5,1024,1024]", 1, true), "what was dropped is not live: " .. err)
  t.ok(not err:find("[1024]", 1, true), "small ones are left out: " .. err)
  t.eq(a:numel() + b:numel() + small:numel(), 6 * 2 ^ 20 + 1024)
end)
t.test("M2 there are ten at most, the largest first, and a loop's compiled code notes its line too", function()
  collectgarbage()
  collectgarbage()
  local kept, line = {}, nil
  for i = 1, 100 do -- (i + 8) / 8 MB
    kept[i % 14 + 1], line = ddp.ones(i + 8, 256, 128), line_here()
  end
  local err = t.fails(too_much, "the largest live tensors:")
  local got, want = {}, {}
  for mb, size in err:gmatch "([%d.]+) MB  f32 %[(%d+),256,128%]" do got[#got + 1] = mb .. " " .. size end
  for i = 1, 10 do want[i] = ("%.1f %d"):format((109 - i) / 8, 109 - i) end
  t.eq(got, want)
  t.eq(#kept, 14)
  for _, size in ipairs { 108, 99 } do
    t.ok(err:find(("[%d,256,128] by full at tests/lua/test_memory.lua:%d\n"):format(size, line), 1, true), err)
  end
end)
t.test("M2 a backward that runs out says so in the same way", function()
  collectgarbage()
  collectgarbage()
  local x = ddp.ones(600, 1024, { requires_grad = true })
  local y = (x * x):sum()
  base.C.ddp_memory_fail_at(2)
  local err = t.fails(function() y:backward() end, "out of memory: ")
  base.C.ddp_memory_fail_at(0)
  t.ok(err:find("[600,1024]", 1, true) and err:find("to try", 1, true), err)
end)
t.test("the peak is reset to what is in use, and follows it up again", function()
  collectgarbage()
  collectgarbage()
  local a = ddp.ones(2048, 1024)
  base.free(a)
  ddp.reset_peak_memory_stats()
  local s = ddp.memory_stats()
  t.eq(s.peak, s.allocated)
  a = ddp.ones(2048, 1024)
  base.free(a)
  local after = ddp.memory_stats()
  t.ok(after.peak - s.allocated >= 8 * 2 ^ 20 and after.peak - s.allocated < 10 * 2 ^ 20, after.peak - s.allocated)
  t.eq(after.allocated, s.allocated)
end)
t.test("empty_cache gives back all that no tensor holds", function()
  if sanitized then t.skip "the sanitizer's build caches nothing" end
  local a, b = ddp.ones(2048, 1024), ddp.ones(100, 1024)
  base.free(a)
  local before = ddp.memory_stats()
  t.ok(before.reserved - before.allocated >= 8 * 2 ^ 20, "8 MB are cached")
  ddp.empty_cache()
  local after = ddp.memory_stats()
  t.eq(after.allocated, before.allocated)
  t.eq(after.reserved, after.allocated)
  t.eq(b:sum():item(), 102400)
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
