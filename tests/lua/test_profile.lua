-- test_profile.lua -- ddp.profile counts what ran, and nothing else.
local t = require "harness"
local ddp = require "ddp"
local F = ddp.nn.functional

local function row(rows, op, shape)
  for _, r in ipairs(rows) do if r.op == op and (not shape or r.shape == shape) then return r end end
end

t.test("a profile has a row a kernel and shape, with calls, operations and bytes", function()
  local a, b = ddp.randn(64, 32), ddp.randn(32, 16)
  local rows = ddp.profile(function()
    for _ = 1, 3 do a:matmul(b) end
    a:relu()
    a:relu_()
    b:relu()
  end)
  local mm, relu = row(rows, "matmul"), row(rows, "relu", "64x32")
  t.eq(mm.shape, "64x32 b 32x16 -> 64x16")
  t.eq(mm.calls, 3)
  t.ok(mm.kernel:find "^matmul%.", mm.kernel)
  t.near(mm.gflops_per_s * mm.seconds * 1e9, 3 * 2 * 64 * 32 * 16, 1)
  t.near(mm.gb_per_s * mm.seconds * 1e9, 3 * 4 * (64 * 32 + 32 * 16 + 64 * 16), 1)
  t.eq(relu.calls, 2)
  t.near(relu.gb_per_s * relu.seconds * 1e9, 2 * 2 * 4 * 64 * 32, 1, "in place reads and writes too")
  t.eq(row(rows, "relu", "32x16").calls, 1)
  for i = 2, #rows do t.ok(rows[i - 1].seconds >= rows[i].seconds, "the longest first") end
  t.ok(rows.inside > 0 and rows.inside <= rows.wall)
end)
t.test("a convolution's row names its weight and its result, and backward's kernels have rows of their own", function()
  local x, w = ddp.randn(2, 3, 8, 8), ddp.randn(4, 3, 3, 3, { requires_grad = true })
  local rows = ddp.profile(function() F.conv2d(x, w, nil, 1, 1):sum():backward() end)
  t.eq(row(rows, "conv2d").shape, "2x3x8x8 w 4x3x3x3 -> 2x4x8x8")
  t.ok(row(rows, "conv2d_grad_weight"))
  t.ok(not row(rows, "conv2d_grad_input"), "x needs no gradient")
end)
t.test("what is repeated by expand counts once, and so does a tensor given twice", function()
  local x, v = ddp.randn(50, 40), ddp.randn(1, 40)
  local e = v:expand(50, 40)
  local rows = ddp.profile(function() x:add(e) end)
  t.near(rows[1].gb_per_s * rows[1].seconds * 1e9, 4 * (2 * 50 * 40 + 40), 1)
  rows = ddp.profile(function() x:mul(x) end)
  t.near(rows[1].gb_per_s * rows[1].seconds * 1e9, 4 * 2 * 50 * 40, 1)
end)
t.test("an optimizer's step is one row, read and written", function()
  local p = ddp.nn.Parameter(ddp.randn(1000))
  local opt = ddp.optim.SGD({ p }, { lr = .1 })
  p.grad = ddp.randn(1000)
  local r = row(ddp.profile(function() opt:step() end), "sgd_step")
  t.eq(r.shape, "1 tensors, 1000 elements")
  t.near(r.gb_per_s * r.seconds * 1e9, 3 * 4000, 1, "parameters both ways, gradients one")
end)
t.test("many shapes make many rows", function()
  local x = ddp.randn(1, 2000)
  local rows = ddp.profile(function() for n = 1, 1500 do x:narrow(2, 1, n):relu() end end)
  local n = 0
  for _, r in ipairs(rows) do if r.op == "relu" then n = n + 1 end end
  t.eq(n, 1500)
end)
t.test("results come back, errors pass on, and nothing is counted outside", function()
  local rows, y, n = ddp.profile(function(a, b) return a + 1, b end, ddp.ones(3), 5)
  t.eq(y:tolist(), { 2, 2, 2 })
  t.eq(n, 5)
  t.eq(row(rows, "add").calls, 1)
  t.fails(function() ddp.profile(function() error "inside" end) end, "inside")
  t.fails(function() ddp.profile(function() ddp.profile(print) end) end, "another one is running")
  local _ = ddp.ones(3) * 2
  t.ok(not row(ddp.profile(function() end), "mul"))
end)

t.done()
