-- test_pool.lua -- pooling of channels-last images by the vectorised kernels: channels around a vector's width, windows at
-- borders and over them, values that tie, NaN, and gradients with and without the windows that their places are of.
local t = require "harness"
local ddp = require "ddp"
local checks = require "op_checks"
local ops = require "ddp.ops"
local nan = 0 / 0

local WINDOWS = { { 2, 2, 0 }, { 3, 2, 1 }, { 3, 1, 1 }, { 2, 1, 1 }, { 5, 3, 2 }, { { 2, 3 }, { 1, 2 }, { 1, 1 } }, { { 3, 2 }, 4, 0 }, { { 9, 11 }, 1, 0 } }
local CHANNELS = { 1, 3, 15, 16, 17, 33, 64, 81 }

-- [2, C, 9, 11], channels-last, few different values, some NaN and -infinity among them.
local function image(C, dtype)
  local x = ddp.randint(-3, 4, { 2, 9, 11, C }):float()
  x = ops.where(ddp.rand(2, 9, 11, C):lt(.02), ddp.tensor(nan), x)
  x = ops.where(ddp.rand(2, 9, 11, C):lt(.1), ddp.tensor(-math.huge), x)
  return x:to(dtype):permute(1, 4, 2, 3)
end
local function draw(size, dtype) return ddp.randn(size[1], size[3], size[4], size[2]):to(dtype):permute(1, 4, 2, 3) end

-- op by the vectorised kernels and by the reference: two lists of results.
local function both(op, x, args)
  local inputs = { n = #x, unpack(x) }
  local got = checks.run(op, { args = args }, inputs, "cpu")
  return got, checks.run(op, { args = args }, inputs, "ref")
end

for _, dtype in ipairs { "f32", "f16", "bf16" } do
  t.test("the largest and its place are the reference's in " .. dtype, function()
    for _, C in ipairs(CHANNELS) do
      for i, w in ipairs(WINDOWS) do
        local got, want = both(ops.max_pool2d, { image(C, dtype) }, w)
        checks.compare(got, want, 0, ("%d channels, window %d"):format(C, i))
      end
    end
  end)
  t.test("its gradient is the reference's, the windows given or not, in " .. dtype, function()
    for _, C in ipairs(CHANNELS) do
      for i, w in ipairs(WINDOWS) do
        local x = image(C, dtype)
        local y, places = ops.max_pool2d(x, unpack(w))
        local g = draw(y:size(), dtype)
        for _, args in ipairs { { x:size() }, { x:size(), unpack(w) } } do
          local got, want = both(ops.max_pool2d_grad, { g, places }, args)
          checks.compare_rounded(got, want, 1e-6, ("%d channels, window %d"):format(C, i), true)
        end
      end
    end
  end)
  t.test("means and their gradients are the reference's in " .. dtype, function()
    for _, C in ipairs(CHANNELS) do
      local x = draw({ 2, C, 9, 11 }, dtype)
      for i, w in ipairs(WINDOWS) do
        for _, pad in ipairs { true, false } do
          local what, args = ("%d channels, window %d"):format(C, i), { w[1], w[2], w[3], pad }
          local got, want = both(ops.avg_pool2d, { x }, args)
          checks.compare_rounded(got, want, 1e-6, what, true)
          local dx, wanted = both(ops.avg_pool2d_grad, { draw(want[1]:size(), dtype) }, { x:size(), unpack(args) })
          checks.compare_rounded(dx, wanted, 1e-6, what, true)
        end
      end
    end
  end)
  t.test("adaptive means and their gradients are the reference's in " .. dtype, function()
    for _, C in ipairs(CHANNELS) do
      local x = draw({ 2, C, 9, 11 }, dtype)
      for _, size in ipairs { 1, { 2, 3 }, 3, { 9, 11 }, { 13, 4 } } do
        local got, want = both(ops.adaptive_avg_pool2d, { x }, { size })
        checks.compare_rounded(got, want, 1e-6, C .. " channels", true)
        local dx, wanted = both(ops.adaptive_avg_pool2d_grad, { draw(want[1]:size(), dtype) }, { x:size() })
        checks.compare_rounded(dx, wanted, 1e-6, C .. " channels", true)
      end
    end
  end)
end

t.test("a NaN gradient stays in the cells that it came from", function()
  local x = draw({ 1, 16, 8, 8 }, "f32")
  local y, places = ops.max_pool2d(x, 3, 2, 1)
  local g = ddp.full(y:size(), nan)
  g:slice(3, 2, -1, 1):fill_(1)
  g = g:permute(1, 3, 4, 2):contiguous():permute(1, 4, 2, 3)
  local got, want = both(ops.max_pool2d_grad, { g, places }, { x:size(), 3, 2, 1 })
  checks.compare(got, want, 0, "dx")
  t.ok(got[1]:sum():item() ~= got[1]:sum():item() and got[1]:narrow(3, 4, 5):sum():item() == got[1]:narrow(3, 4, 5):sum():item())
end)
t.test("windows that do not fit the gradient are refused", function()
  local g, places = draw({ 1, 16, 4, 4 }, "f32"), ddp.randint(0, 64, { 1, 16, 4, 4 })
  t.fails(function() ops.max_pool2d_grad(g, places, { 1, 16, 8, 8 }, 3, 2, 0) end, "g is [1,16,4,4], expected [1,16,3,3]")
end)
t.done()
