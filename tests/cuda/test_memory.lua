-- test_memory.lua -- memory of GPUs on the double: accounting, reuse, out of memory.
package.path = "tests/cuda/?.lua;" .. package.path
local t, child = require "harness", require "child"
local ddp = require "ddp"
local base = require "ddp.ffi"
local C = base.C

local MB = 2 ^ 20
local function stats() return ddp.memory_stats "cuda" end
local function gone() for _ = 1, 3 do collectgarbage() end end
local function on_gpu(...) return ddp.empty(..., { device = "cuda" }) end
local function line_here() return debug.getinfo(2, "l").currentline end

t.test("what is in use, its peak and what is taken from the GPU are counted, the host's apart", function()
  gone()
  local before, host = stats(), ddp.memory_stats "cpu"
  local a, b = on_gpu { 3, 1024, 1024 }, on_gpu { 1024 }
  local s = stats()
  t.eq(s.allocated - before.allocated, 12 * MB + 4096)
  t.ok(s.reserved >= s.allocated and s.peak >= s.allocated)
  t.ok(ddp.memory_stats "cpu".allocated - host.allocated < MB, "the host keeps headers alone")
  t.eq(s.live_tensors - before.live_tensors, 2)
  base.free(a)
  base.free(b)
  t.eq(stats().allocated, before.allocated)
  t.ok(stats().peak >= before.allocated + 12 * MB)
  ddp.reset_peak_memory_stats "cuda"
  t.eq(stats().peak, stats().allocated)
end)
t.test("empty_cache gives back what no tensor holds", function()
  gone()
  base.free(on_gpu { 50, 1024, 1024 })
  t.ok(stats().reserved >= 200 * MB)
  ddp.empty_cache()
  t.ok(stats().reserved - stats().allocated < 24 * MB, ("%d MB are kept"):format((stats().reserved - stats().allocated) / MB))
end)
t.test("blocks are cut from a segment and grow together again", function()
  gone()
  ddp.empty_cache()
  local kept = {}
  for i = 1, 64 do kept[i] = on_gpu { i % 7 + 1, 16384 } end
  local top = stats().reserved
  for first = 1, 2 do
    for i = first, 64, 2 do base.free(kept[i]) end
  end
  for _ = 1, 3 do
    for i = 1, 64 do base.free(on_gpu { i % 5 + 3, 16384 }) end
  end
  t.eq(stats().reserved, top, "freed pieces serve other sizes")
end)
t.test("M3 1,000 steps of varying batch keep reserved memory within 1.3 times the peak in use, the GPU's", function()
  local out, ended = child.run("DDP_DOUBLE_MODE=dry", [[
    local ddp, base = require "ddp", require "ddp.ffi"
    local function on(...) return ddp.empty(..., { device = "cuda" }) end
    local weights = {}
    for i = 1, 20 do weights[i] = on { i * 40, 1024 } end
    for step = 1, 1000 do
      local n, acts = step * 37 % 64 + 1, {}
      for layer = 1, 20 do acts[layer] = on { n, 16384 * (1 + layer % 4) / 2 } end
      for layer = 20, 1, -1 do
        local g = on { n, 16384 * (1 + layer % 4) / 2 }
        base.free(acts[layer])
        if step % 3 == 0 then base.free(on { layer * 40, 1024 }) end
        base.free(g)
      end
    end
    local s = ddp.memory_stats "cuda"
    print(("within %d peak %d MB reserved %d"):format(s.reserved <= 1.3 * s.peak and 1 or 0, s.peak / 2^20, s.reserved / 2^20))
  ]])
  t.ok(ended and out:find "within 1", out)
end)
t.test("M3 with temporaries that only the collector frees, too", function()
  local out, ended = child.run("DDP_DOUBLE_MODE=dry", [[
    local ddp = require "ddp"
    for step = 1, 1000 do
      local n = step * 37 % 64 + 1
      for layer = 1, 10 do local x = ddp.empty(n, 65536 * (1 + layer % 3), { device = "cuda" }) end
    end
    local s = ddp.memory_stats "cuda"
    print(("within %d peak %d MB reserved %d"):format(s.reserved <= 1.3 * s.peak + 32 * 2^20 and 1 or 0, s.peak / 2^20, s.reserved / 2^20))
    print(s.peak < 1000 * 2^20 and "collected" or "piled up")
  ]])
  t.ok(ended and out:find "within 1" and out:find "collected", out)
end)
t.test("a steady step takes nothing from the driver", function()
  local log = child.file()
  local out, ended = child.run("DDP_DOUBLE_MODE=dry DDP_DOUBLE_LOG=" .. log, [[
    local ddp = require "ddp"
    local w = ddp.ones(512, 1024):to "cuda"
    w:requires_grad_(true)
    local x = ddp.ones(512, 1024):to "cuda"
    for step = 1, 100 do
      if step == 50 then
        local f = io.open("]] .. log .. [[", "a")
        f:write "steady from here\n"
        f:close()
      end
      local loss = ((x * w):relu() + w):sum()
      loss:backward()
      w.grad = nil
    end
    ddp.zeros(1, { device = "cuda" }):item()
  ]])
  t.ok(ended, out)
  local steady, taken, launches = false, 0, 0
  for line in io.lines(log) do
    steady = steady or line:find "steady from here" ~= nil
    if steady and line:find "cudaMalloc" then taken = taken + 1 end
    if steady and line:find "^launch" then launches = launches + 1 end
  end
  t.ok(launches > 100, launches .. " launches")
  t.eq(taken, 0, "calls of cudaMalloc")
end)

-- More than the double's GPU has: 16 GB of 4.
local function too_much() return on_gpu { 2 ^ 16, 2 ^ 16 } end
t.test("M2 out of memory on a GPU says what was asked for, what is in use, free and held by others", function()
  local kept = on_gpu { 1024, 1024 }
  local err = t.fails(too_much, "out of memory: 17179869184 bytes (16384.0 MB) asked for on cuda:0, ")
  local in_use, total, free = tonumber(err:match "([%d.]+) MB in use"), tonumber(err:match "of its ([%d.]+) MB"), tonumber(err:match "MB ([%d.]+) are free")
  t.ok(in_use and in_use >= 4 and math.abs(in_use - stats().allocated / MB) < 64, err)
  t.eq(total, 4096)
  t.ok(free and free > 1000 and free < 4096, err)
  for _, remedy in ipairs { "gradient accumulation", "ddp.autocast", "ddp.checkpoint", "a smaller batch" } do t.ok(err:find(remedy, 1, true), err) end
  t.eq(kept:numel(), MB)
end)
t.test("M2 it names the largest tensors of that GPU with the line that made them, and none of the host", function()
  gone()
  local host = ddp.ones(9, 1024, 1024)
  local a, line_a = ddp.zeros(3, 1024, 1024, { device = "cuda" }), line_here()
  local b, line_b = ddp.ones(2, 1024, 1024):to "cuda", line_here()
  local err = t.fails(too_much, "the largest live tensors:")
  t.ok(err:find(("12.0 MB  f32 [3,1024,1024] by full at tests/cuda/test_memory.lua:%d\n"):format(line_a), 1, true), err)
  t.ok(err:find(("8.0 MB  f32 [2,1024,1024] by to_device at tests/cuda/test_memory.lua:%d\n"):format(line_b), 1, true), err)
  t.ok(not err:find("[9,1024,1024]", 1, true), err)
  t.eq(a:numel() + b:numel() + host:numel(), 14 * MB)
end)
t.test("garbage of the script is collected before memory runs out", function()
  local out, ended = child.run("DDP_DOUBLE_MODE=dry DDP_DOUBLE_MB=300", [[
    local ddp = require "ddp"
    for i = 1, 200 do local x = ddp.empty(16, 1024, 1024, { device = "cuda" }) end
    print "through"
  ]])
  t.ok(ended and out:find "through", out)
end)
t.test("cached pieces of other sizes are given back before memory runs out", function()
  local out, ended = child.run("DDP_DOUBLE_MODE=dry DDP_DOUBLE_MB=300", [[
    local ddp, base = require "ddp", require "ddp.ffi"
    for i = 1, 7 do base.free(ddp.empty(i * 10, 1024, 1024, { device = "cuda" })) end
    print "through"
  ]])
  t.ok(ended and out:find "through", out)
end)
t.test("a cudaMalloc that fails once is tried again", function()
  local out, ended = child.run("DDP_DOUBLE_FAIL=cudaMalloc:1", [[print(require "ddp".ones(5, { device = "cuda" }):sum():item())]])
  t.ok(ended and out:find "^5\n", out)
end)

t.test("a step on the GPU survives a failure at each of its allocations, and nothing leaks", function()
  local x, w = ddp.randn(40, 30):to "cuda", ddp.randn(40, 30):to "cuda"
  w:requires_grad_(true)
  local function step()
    w.grad = nil
    local loss = ((x * w):relu() + w):sum()
    loss:backward()
    return loss:item()
  end
  local want = step()
  gone()
  local before, failures = stats(), 0
  for k = 1, 60 do
    C.ddp_memory_fail_at(k)
    local ok, err = pcall(step)
    C.ddp_memory_fail_at(0)
    if not ok then
      failures = failures + 1
      t.ok(tostring(err):find "out of memory", tostring(err))
    end
    t.near(step(), want, 1e-3, "the step after failure " .. k)
  end
  t.ok(failures > 5, failures .. " failures")
  gone()
  t.eq(stats().allocated, before.allocated)
end)

t.test("pinned memory is given out again only when the copy out of it has run", function()
  local kept, want = {}, {}
  for i = 1, 20 do
    local p = ddp.full({ 64, 1024 }, i):pin_memory()
    t.ok(p:is_pinned())
    kept[i] = p:to("cuda", { non_blocking = true })
    base.free(p)
  end
  for i = 1, 20 do
    want[i] = i * 65536
    kept[i] = kept[i]:sum():item()
  end
  t.eq(kept, want)
  t.eq(ddp.ones(3):is_pinned(), false)
end)
t.test("a blocking copy out of pinned memory has read it when it returns", function()
  local p = ddp.ones(1000):pin_memory()
  local x = p:to "cuda"
  p:fill_(7)
  t.eq(x:sum():item(), 1000)
end)
t.test("a copy that does not wait has read pinned memory after ddp.synchronize", function()
  local p = ddp.ones(1000):pin_memory()
  local x = p:to("cuda", { non_blocking = true })
  ddp.synchronize()
  p:fill_(7)
  t.eq(x:sum():item(), 1000)
end)
t.test("pin_memory refuses what it can't do", function()
  t.fails(function() return ddp.ones(2, { device = "cuda" }):pin_memory() end, "pinned memory is the host's")
  t.fails(function() return ddp.ones(2, { requires_grad = true }):pin_memory() end, "x:detach() first")
end)
t.test("where the system pins no more, pageable memory stands in, said once", function()
  local out, ended = child.run("DDP_DOUBLE_FAIL=cudaHostAlloc:1,cudaHostAlloc:2", [[
    local ddp = require "ddp"
    for i = 1, 4 do
      local x = ddp.full({ 100, 100 * i }, i):pin_memory():to("cuda", { non_blocking = true })
      assert(x:sum():item() == 10000 * i * i)
    end
  ]])
  local _, told = out:gsub("no more pinned memory", "")
  t.ok(ended and told == 1, out)
end)

child.clean()
t.done()
