-- test_autocast.lua -- what is computed in which dtype under ddp.autocast, its cache of weights, and training with it.
local t = require "harness"
local ddp = require "ddp"
local C = require("ddp.ffi").C
local nn, F = ddp.nn, ddp.nn.functional

local function on(fn, ...) return ddp.autocast("bf16", fn, ...) end
local function dtype_of(fn, ...) return on(fn, ...):dtype() end
local x, h = ddp.ones(4, 3), ddp.ones(4, 3):to "bf16"

for _, dtype in ipairs { "bf16", "f16" } do
  t.test("products and convolutions run in " .. dtype, function()
    ddp.autocast(dtype, function()
      t.eq(x:matmul(x:t()):dtype(), dtype)
      t.eq(nn.Linear(3, 2)(x):dtype(), dtype)
      t.eq(nn.Conv2d(3, 2, 1)(ddp.ones(1, 3, 2, 2)):dtype(), dtype)
      t.eq(x:to("f16"):matmul(h:t()):dtype(), dtype, "16-bit inputs of either kind are cast too")
    end)
    t.eq(x:matmul(x:t()):dtype(), "f32", "after the region")
  end)
end
t.test("P5 softmax, losses, norms and reductions give f32", function()
  local y = ddp.zeros({ 4 }, { dtype = "i64" })
  for name, fn in pairs { exp = function() return h:exp() end, log = function() return h:log() end, pow = function() return h ^ 2 end,
    softmax = function() return F.softmax(h, -1) end, log_softmax = function() return F.log_softmax(h, -1) end, sum = function() return h:sum(1) end,
    mean = function() return h:mean() end, cross_entropy = function() return F.cross_entropy(h, y) end, mse_loss = function() return F.mse_loss(h, h) end,
    norm = function() return h:norm() end, layer_norm = function() return nn.LayerNorm(3)(h) end } do
    t.eq(dtype_of(fn), "f32", name)
  end
  t.ok(ddp.autocast("f16", function() return ddp.full({ 1 }, 20, { dtype = "f16" }):exp():item() end) > 4e8, "exp in f32 does not overflow")
  t.eq(ddp.autocast("f16", function() return ddp.ones(300, 300):to("f16"):sum():item() end), 90000)
end)
t.test("P5 batch norm takes 16-bit x and keeps its statistics in f32", function()
  local net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
  local y = on(net, ddp.rand(8, 3, 5, 5) + 100)
  t.eq(y:dtype(), "bf16")
  t.eq({ net[2].running_mean:dtype(), net[2].running_var:dtype() }, { "f32", "f32" })
  y:sum():backward()
  t.eq(net[2].weight.grad:dtype(), "f32")
end)
t.test("other ops promote what comes", function()
  t.eq(dtype_of(function() return h + x end), "f32")
  t.eq(dtype_of(function() return h * 2 end), "bf16")
  t.eq(dtype_of(function() return h:relu() end), "bf16")
  t.eq(dtype_of(function() return ddp.cat({ h, x }, 1) end), "f32")
  t.eq(dtype_of(function() return ddp.stack { h, h } end), "bf16")
end)
t.test("f64 and integers are not cast", function()
  local d, i = ddp.ones({ 2, 2 }, { dtype = "f64" }), ddp.ones({ 2, 2 }, { dtype = "i64" })
  t.eq(dtype_of(function() return d:matmul(d) end), "f64")
  t.eq(dtype_of(function() return d:sum() end), "f64")
  t.eq(dtype_of(function() return i:matmul(i) end), "i64")
  t.eq(dtype_of(function() return i:sum() end), "i64")
end)

-- ---- gradients and weights ----------------------------------------------------------------------------------------------

t.test("gradients of f32 weights are f32 and near those of f32", function()
  local function grads(wrap)
    ddp.manual_seed(3)
    local m = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    local input = ddp.randn(8, 10)
    wrap(function() return F.cross_entropy(m(input), ddp.zeros({ 8 }, { dtype = "i64" })) end):backward()
    return m[1].weight.grad
  end
  local low, full = grads(on), grads(function(fn) return fn() end)
  t.eq(low:dtype(), "f32")
  local d = ((low - full):abs():max() / full:abs():max()):item()
  t.ok(d < 0.05 and d > 0, "the largest difference is " .. d)
end)
t.test("a weight is cast once for each of its versions, and its bytes go with the outermost region", function()
  local m, input = nn.Linear(1000, 1000), ddp.ones(1, 1000)
  local function extra(before) return (ddp.memory_stats().allocated - before) / 2 ^ 20 end
  ddp.no_grad(on, m, input) -- the products' workspace has its size
  ddp.no_grad(on, m, input)
  collectgarbage() collectgarbage()
  local before = ddp.memory_stats().allocated
  on(function()
    for _ = 1, 3 do ddp.no_grad(m, input) end
    on(m, input)
    collectgarbage() collectgarbage()
    t.ok(extra(before) > 1.9 and extra(before) < 2.1, "three uses hold " .. extra(before) .. " MB")
    t.ok(not m(input):equal(ddp.full({ 1, 1000 }, 3)))
    ddp.no_grad(function() m.weight:mul_(0) m.bias:fill_(3) end)
    t.ok(m(input):equal(ddp.full({ 1, 1000 }, 3)), "the new version is used")
    collectgarbage() collectgarbage()
    t.ok(extra(before) < 2.1, "the old version is gone: " .. extra(before) .. " MB")
  end)
  collectgarbage() collectgarbage()
  t.ok(extra(before) < 0.1, "after the region " .. extra(before) .. " MB are left")
end)
t.test("each use of a cached weight has a history of its own", function()
  local m, input = nn.Linear(3, 2), ddp.ones(2, 3)
  on(function()
    local a, b = m(input):sum(), m(input):sum()
    a:backward()
    b:backward()
    m(input):sum():backward()
  end)
  t.eq(m.weight.grad:tolist(), { { 6, 6, 6 }, { 6, 6, 6 } })
end)
t.test("backward runs with autocast off, hooks too", function()
  local w, seen = ddp.ones(2, 2, { requires_grad = true }), nil
  w:register_hook(function() seen = x:matmul(x:t()):dtype() end)
  on(function()
    w:matmul(w):sum():backward()
    t.eq(x:matmul(x:t()):dtype(), "bf16", "and on again after it")
  end)
  t.eq(seen, "f32")
end)

-- ---- regions ----------------------------------------------------------------------------------------------------------------

t.test("regions nest, pass arguments on and results back, and end on an error", function()
  local a, b = on(function(...)
    t.eq(ddp.autocast("f16", function() return x:matmul(x:t()):dtype() end), "f16")
    t.eq(ddp.autocast(false, function() return x:matmul(x:t()):dtype() end), "f32")
    t.eq(x:matmul(x:t()):dtype(), "bf16")
    return ...
  end, 1, "two")
  t.eq({ a, b }, { 1, "two" })
  t.fails(function() on(function() error "stop" end) end, "stop")
  t.fails(function() on(function() x:matmul(h) end) end, "matmul")
  t.eq(C.ddp_autocast_dtype(), C.DDP_AUTOCAST_OFF)
  t.eq(dtype_of(nn.Linear(3, 2), x), "bf16", "a module is a callable")
end)
t.test("an unknown dtype is named, with a suggestion", function()
  t.fails(function() ddp.autocast("fp16", print) end, "no dtype \"fp16\", did you mean \"f16\"?")
  t.fails(function() ddp.autocast("i64", print) end, "no dtype \"i64\"")
  t.fails(function() ddp.autocast("bf16") end, "the function to call is missing")
end)

-- ---- training ---------------------------------------------------------------------------------------------------------------

-- Final loss of the toy net on 64 samples; makes a step of each loss.
local function train(dtype, make_step)
  ddp.manual_seed(5)
  local input, teacher = ddp.randn(64, 10), nn.Linear(10, 10)
  local y = teacher(input):argmax(-1)
  local m = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10))
  local opt = ddp.optim.Adam(m:parameters(), { lr = 0.01 })
  local step, value = make_step(m, opt), nil
  for _ = 1, 120 do
    local loss = ddp.autocast(dtype, function() return F.cross_entropy(m(input), y) end)
    t.eq(loss:dtype(), "f32")
    value = loss:item()
    step(loss)
  end
  for _, p in ipairs(m:parameters()) do t.eq(p:dtype(), "f32") end
  return value
end
local function plain(m, opt) return ddp.stepper { model = m, optimizer = opt } end
t.test("P5 the toy trains in bf16 without a scaler, as far as in f32", function()
  local low, full = train("bf16", plain), train(false, plain)
  t.ok(low < 0.1 and full < 0.1, ("the loss is %g in bf16, %g in f32"):format(low, full))
end)
t.test("P1 it trains in f16 with a scaler that begins too high", function()
  local scaler, skipped = ddp.amp.GradScaler { init_scale = 2 ^ 30 }, 0
  local value = train("f16", function(m, opt)
    local step = ddp.stepper { model = m, optimizer = opt, scaler = scaler, clip = 10 }
    return function(loss) if not step(loss) then skipped = skipped + 1 end end
  end)
  t.ok(skipped > 5 and scaler:get_scale() < 2 ^ 25, "the scale fell: " .. scaler:get_scale())
  t.ok(value < 0.1, "the loss is " .. value)
end)

t.done()
