-- test_known_bad.lua -- the harness must catch ops that are wrong in known ways; a check that lets one pass is no check.
local t = require "harness"
local checks = require "op_checks"
local ddp = require "ddp"
local ops = require "ddp.ops"
local base = require "ddp.ffi"
local ffi = require "ffi"

local sample = { inputs = { { 3, 4 }, { 3, 4 } } }
local long = { inputs = { { 300 } } }
local one = { inputs = { { 3, 4, kind = "away" } } }

-- An op with a gradient of the test's own: forward(x...) and backward(g, x...) -> gradients.
local function custom(forward, backward)
  return function(...)
    local args = { ... }
    local y = ddp.no_grad(forward, ...):detach()
    require("ddp.grad").record_host(function(g) return backward(g, unpack(args)) end, args, { y })
    return y
  end
end

local function caught(name, fn)
  t.test("a known-bad op is caught: " .. name, function()
    local ok = pcall(fn)
    t.ok(not ok, "the harness let it pass")
  end)
end

t.test("a correct op passes every check", function()
  checks.against_reference(ops.mul, ops.mul, sample)
  checks.against_value(ops.mul, { inputs = { { 4 }, { 4 } } }, function(a, b)
    local x, y, out = a:tolist(), b:tolist(), {}
    for i = 1, 4 do out[i] = x[i] * y[i] end
    return out
  end)
  checks.layouts_agree(ops.mul, sample)
  checks.twice_the_same(ops.mul, sample)
  checks.in_place_agrees(ops.mul, ops.mul_, sample)
  checks.gradients(ops.mul, sample)
  checks.second_gradients(ops.mul, sample)
  checks.gradients(custom(function(a) return a * 3 end, function(g) return g * 3 end), { inputs = { { 3 } } })
end)

caught("NaN in one element", function()
  checks.against_reference(function(a, b)
    local y = ops.mul(a, b)
    ddp.no_grad(function() y[2] = 0 / 0 end)
    return y
  end, ops.mul, sample)
end)
caught("zero gradient", function() checks.gradients(custom(function(a, b) return a * b end, function(g) return g * 0, g * 0 end), sample) end)
caught("flipped sign of a gradient", function() checks.gradients(custom(function(a) return a * 3 end, function(g) return g * -3 end), one) end)
caught("swapped inputs", function() checks.against_reference(function(a, b) return ops.sub(b, a) end, ops.sub, sample) end)
caught("swapped gradients", function() checks.gradients(custom(function(a, b) return a * b end, function(g, a, b) return g * a, g * b end), sample) end)
caught("off by two", function() checks.against_reference(function(a, b) return ops.add(ops.add(a, b), 2) end, ops.add, sample) end)
caught("a gradient off by two", function() checks.gradients(custom(function(a) return a * 3 end, function(g) return g * 3 + 2 end), one) end)
caught("a write outside its bounds", function()
  checks.in_place_agrees(ops.relu, function(x)
    ops.relu_(x)
    local p = ffi.cast("float *", base.C.ddp_data(x))
    p[x:numel()] = 1
    return x
  end, one)
end)
caught("an output that is not filled", function()
  checks.against_reference(function(a, b)
    local y = ops.mul(a, b)
    local junk = ddp.empty(y:size())
    ddp.no_grad(function() junk:fill_(3e38) end)
    return junk
  end, ops.mul, sample)
end)
caught("not deterministic", function()
  local calls = 0
  checks.twice_the_same(function(a, b)
    calls = calls + 1
    return ops.add(ops.mul(a, b), calls * 1e-6)
  end, sample)
end)
caught("a wrong layout", function()
  checks.layouts_agree(function(a) return ddp.from_blob(base.C.ddp_data(a), a:size(), { owner = a }):clone() end, { inputs = { { 3, 4 } } })
end)
caught("no results at all", function() checks.compare({}, {}, 1e-5, "nothing") end)
caught("accepts bad input", function() checks.must_fail(function(a) return a end, { inputs = { { 3 } }, text = "bad" }) end)
caught("a wrong second gradient", function()
  checks.second_gradients(custom(function(a) return a * a end, function(g, a) return g * a:detach() * 2 end), one)
end)

t.test("a correct op of 16 bits passes", function()
  for _, dtype in ipairs { "f16", "bf16" } do
    checks.half_against_reference(ops.mul, ops.mul, sample, dtype)
    checks.half_against_reference(ops.mul, ops.mul, sample, dtype, nil, "nan")
    checks.half_gradients(ops.mul, sample, dtype)
    checks.half_against_reference(ops.sum, ops.sum, long, dtype)
  end
end)
caught("bf16 cut off instead of rounded", function()
  checks.half_against_reference(function(a, b)
    local wide = ops.mul(a:float(), b:float())
    local bits = ffi.cast("uint32_t *", base.C.ddp_data(wide))
    for i = 0, wide:numel() - 1 do bits[i] = bit.band(bits[i], 0xffff0000) end
    return wide:to "bf16"
  end, ops.mul, sample, "bf16")
end)
caught("a sum added up in bf16", function()
  checks.half_against_reference(function(x)
    local s = x[1]:clone()
    for i = 2, x:numel() do s = s + x[i] end
    return s
  end, ops.sum, long, "bf16")
end)
caught("a gradient added up in bf16", function()
  checks.half_gradients(custom(function(x) return x * 3 end, function(g)
    local s = g * 0
    for _ = 1, 300 do s = s + g * 0.01 end
    return s
  end), one, "bf16")
end)
caught("NaN that a comparison loses", function()
  checks.half_against_reference(function(x) return ops.where(ops.gt(x, 0), x, 0) end, ops.relu, one, "bf16", nil, "nan")
end)

t.done()
