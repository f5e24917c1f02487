-- test_softmax.lua -- softmax, cross-entropy and their gradients over rows whose values meet: NaN, infinities, nothing but -inf, and
-- rows side by side, of which none may see another.
local t = require "harness"
local ddp = require "ddp"
local checks = require "op_checks"
local ops = require "ddp.ops"
local inf, nan = math.huge, 0 / 0
local TOL = { f32 = 2e-6, f16 = 2 ^ -10, bf16 = 2 ^ -7 } -- a rounding, of the largest
local LENGTHS = { 1, 3, 15, 17, 33, 1000, 4097 }

-- [6, n]: random, all -inf, NaN at the end, inf in front, the first half masked by -inf, large.
local function rows(n, dtype)
  local x = ddp.randn(6, n)
  x[2]:fill_(-inf)
  x[3][n]:fill_(nan)
  x[4][1]:fill_(inf)
  x[5]:slice(1, 1, math.ceil(n / 2)):fill_(-inf)
  x[6]:mul_(ddp.tensor(1e4))
  return x:to(dtype)
end

local labels = function(n) return ddp.randint(0, n, { 6 }) end
local cases = {
  { "softmax", function(x) return ops.softmax(x, 2) end },
  { "log_softmax", function(x) return ops.log_softmax(x, 2) end },
  { "cross_entropy", function(x, label) return ops.cross_entropy(x, label, 0, -100, 0) end },
  { "cross_entropy, smoothed", function(x, label) return ops.cross_entropy(x, label, 0, -100, .1) end },
  { "cross_entropy_grad", function(x, label, g) return ops.cross_entropy_grad(g, x, label, 0, -100, 0) end },
  { "cross_entropy_grad, smoothed", function(x, label, g) return ops.cross_entropy_grad(g, x, label, 0, -100, .1) end },
  { "softmax_grad", function(x, _, _, g) return ops.softmax_grad(g, x, 2) end },
}

for _, case in ipairs(cases) do
  local name, op = unpack(case)
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    t.test(name .. " of rows with NaN and infinities is the reference's in " .. dtype, function()
      for _, n in ipairs(LENGTHS) do
        local inputs = { n = 4, rows(n, dtype), labels(n), ddp.randn(6):to(dtype), ddp.randn(6, n):to(dtype) }
        local got = checks.run(op, {}, inputs)
        t.ok(checks.last_kernel():find "cpu", "by " .. checks.last_kernel())
        checks.compare(got, checks.run(op, {}, inputs, "ref"), TOL[dtype], name .. " of " .. n)
      end
    end)
    t.test(name .. " of a row does not depend on its neighbours in " .. dtype, function()
      for _, n in ipairs(LENGTHS) do
        local x, label, g, wide = ddp.randn(7, n):to(dtype), ddp.randint(0, n, { 7 }), ddp.randn(7):to(dtype), ddp.randn(7, n):to(dtype)
        local all = op(x, label, g, wide)
        for r = 1, 7 do
          local one = op(x:narrow(1, r, 1):contiguous(), label:narrow(1, r, 1):contiguous(), g:narrow(1, r, 1):contiguous(), wide:narrow(1, r, 1):contiguous())
          checks.compare({ all:narrow(1, r, 1) }, { one }, 0, name .. ", row " .. r .. " of " .. n)
        end
      end
    end)
  end
end

t.test("rows that are left out get no gradient and change no other", function()
  for _, dtype in ipairs { "f32", "bf16" } do
    local x, g = ddp.randn(40, 33):to(dtype), ddp.randn(40):to(dtype)
    local label = ddp.randint(0, 3, { 40 })
    local some, every = ops.cross_entropy_grad(g, x, label, 0, 1, 0), ops.cross_entropy_grad(g, x, label, 0, -100, 0)
    for r = 1, 40 do
      local want = label[r]:item() == 1 and every[r] * 0 or every[r]
      checks.compare({ some[r] }, { want }, 0, dtype .. ", row " .. r)
    end
  end
end)
t.done()
