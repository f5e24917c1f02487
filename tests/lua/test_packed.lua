-- test_packed.lua -- weights kept as kernels want them: used again, never stale, gone with their storage, within the limit.
local ffi = require "ffi"
local t = require "harness"
local ddp = require "ddp"
local ops = require "ddp.ops"
local base = require "ddp.ffi"
local nn = ddp.nn

ffi.cdef "int64_t ddp__packed_bytes(void);"
local function kept() return tonumber(base.C.ddp__packed_bytes()) end

-- One image of 16 x 16 by a parameter: 3x3 of stride 1 or 2 (Winograd; bf16 of stride 2 gathered rows).
local function image(channels, dtype) return ddp.randn(1, 16, 16, channels):permute(1, 4, 2, 3):to(dtype or "f32") end
local function run(x, w, stride) return ddp.no_grad(ops.conv2d, x, w, nil, stride, 1) end
-- What run gives without anything kept.
local function fresh(x, w, stride) return run(x, ddp.no_grad(function() return w:clone() end), stride) end
local kernels = ddp.profile(function() run(image(16), ddp.randn(16, 16, 3, 3), 1) end)
local function needs_own_kernels()
  if not kernels[1].kernel:find "wino" then t.skip("this instruction set's kernel is " .. kernels[1].kernel) end
end

t.test("a parameter's weights are kept from their second use on, and give the same bits", function()
  needs_own_kernels()
  for _, dtype in ipairs { "f32", "bf16", "f16" } do
    for stride = 1, 2 do
      local x, w = image(32, dtype), ddp.randn(48, 32, 3, 3):to(dtype):requires_grad_(true)
      local before, want = kept(), fresh(x, w, stride)
      local first = run(x, w, stride)
      t.eq(kept(), before, "kept at once")
      local second = run(x, w, stride)
      local held = kept()
      t.ok(held > before, "nothing was kept")
      t.ok(ddp.memory_stats().allocated >= held, "not counted")
      local third = run(x, w, stride)
      t.eq(kept(), held, "kept twice")
      for _, y in ipairs { first, second, third } do t.ok(y:equal(want)) end
      base.free(w)
      t.eq(kept(), 0, "a freed weight left something")
    end
  end
end)
t.test("every way of writing a weight is seen", function()
  needs_own_kernels()
  local m = nn.Sequential(nn.Conv2d(16, 16, 3, { padding = 1, bias = false }))
  local w, x, other = m[1].weight, image(16), ddp.randn(16, 16, 3, 3)
  local opt = ddp.optim.SGD({ w }, { lr = 0.1 })
  w.grad = other
  local ways = {
    { "in place", function() w:mul_(2) end },
    { "through a view", function() w:view(16, 144):narrow(1, 3, 2):fill_(0.5) end },
    { "through data()", function()
      w:data()[5] = 7
      w:mark_written()
    end },
    { "by an optimizer's step", function() opt:step() end },
    { "by load_state_dict", function() m:load_state_dict { ["0.weight"] = other } end },
    { "by copy_", function() w:copy_(other * 3) end },
  }
  for stride = 1, 2 do
    for _, way in ipairs(ways) do
      local before
      for _ = 1, 3 do before = run(x, w, stride) end
      t.ok(kept() > 0, "nothing was kept before a write " .. way[1])
      ddp.no_grad(way[2])
      t.eq(kept(), 0, "not dropped when written " .. way[1])
      for _ = 1, 3 do
        local after = run(x, w, stride)
        t.ok(after:equal(fresh(x, w, stride)) and not after:equal(before), "stale after a write " .. way[1])
      end
    end
  end
end)
t.test("with batch norm and relu in one op weights are kept too; a changed weight, bias or statistic is seen at the next call", function()
  needs_own_kernels()
  for stride = 1, 2 do
    local x, w = image(32), ddp.randn(48, 32, 3, 3, { requires_grad = true })
    local weight, bias = ddp.randn(48, { requires_grad = true }), ddp.randn(48, { requires_grad = true })
    local mean, var = ddp.randn(48), ddp.rand(48) + 0.5
    local function fused(used) return ddp.no_grad(ops.conv_bn_act, x, used, nil, weight, bias, mean, var, nil, stride, 1, 1, 1, 1e-5, true) end
    local function unkept() return fused(ddp.no_grad(function() return w:clone() end)) end
    local before
    for _ = 1, 3 do before = fused(w) end
    t.ok(kept() > 0, "nothing was kept")
    t.ok(before:equal(unkept()))
    for name, changed in pairs { w = w, weight = weight, bias = bias, mean = mean, var = var } do
      ddp.no_grad(function() changed:mul_(2) end)
      local after = fused(w)
      t.ok(after:equal(unkept()) and not after:equal(before), "stale after a write to " .. name)
      before = after
    end
  end
end)
t.test("training, weights that are no parameters, blobs and large results keep nothing", function()
  needs_own_kernels()
  ddp.empty_cache()
  t.eq(kept(), 0)
  local x, w = image(16), ddp.randn(16, 16, 3, 3, { requires_grad = true })
  for _ = 1, 3 do
    ops.conv2d(x, w, nil, 1, 1):sum():backward()
    t.eq(kept(), 0, "a training step")
  end
  local plain = ddp.randn(16, 16, 3, 3)
  local memory = ffi.new("float[?]", 16 * 16 * 9)
  local blob = ddp.from_blob(memory, { 16, 16, 3, 3 }, { owner = memory }):requires_grad_(true)
  local large = ddp.randn(8, 8, 8, 16):permute(1, 4, 2, 3)
  for _ = 1, 3 do
    run(x, plain, 1)
    run(x, blob, 1)
    run(large, w, 1)
    t.eq(kept(), 0)
  end
end)
t.test("empty_cache drops what is kept", function()
  needs_own_kernels()
  local x, w = image(16), ddp.randn(16, 16, 3, 3, { requires_grad = true })
  for _ = 1, 3 do run(x, w, 1) end
  t.ok(kept() > 0)
  ddp.empty_cache()
  t.eq(kept(), 0)
  t.ok(run(x, w, 1):equal(fresh(x, w, 1)))
end)
t.test("DDP_PACK_CACHE_MB bounds what is kept; 0 keeps nothing", function()
  needs_own_kernels()
  if (os.getenv "LD_PRELOAD" or ""):find "asan" then t.skip "a process of its own would not be sanitized" end
  local script = [[
    local ffi, ddp, ops, base = require "ffi", require "ddp", require "ddp.ops", require "ddp.ffi"
    ffi.cdef "int64_t ddp__packed_bytes(void);"
    local x, list, most = ddp.randn(1, 8, 8, 32):permute(1, 4, 2, 3), {}, 0
    for i = 1, 20 do list[i] = ddp.randn(32, 32, 3, 3, { requires_grad = true }) end
    for _ = 1, 3 do
      for i = 1, 20 do
        ddp.no_grad(ops.conv2d, x, list[i], nil, 1, 1)
        most = math.max(most, tonumber(base.C.ddp__packed_bytes()))
      end
    end
    print(most)]]
  local name = os.tmpname()
  local f = assert(io.open(name, "w"))
  f:write(script)
  f:close()
  local function most(limit)
    local p = io.popen(("DDP_PACK_CACHE_MB=%s luajit %s"):format(limit, name))
    local n = tonumber((p:read "*a"))
    p:close()
    return n
  end
  local one = 36 * 33 * 32 * 4 -- of one weight
  t.eq({ most "0", most "1", most "100" }, { 0, math.floor(2 ^ 20 / one) * one, 20 * one })
  os.remove(name)
end)

t.done()
