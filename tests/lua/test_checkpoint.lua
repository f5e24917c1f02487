-- test_checkpoint.lua -- ddp.checkpoint: the same gradients with less memory; ddp.func: gradients of the user's own.
local t = require "harness"
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional

-- The bits of all gradients, parameters' and x's.
local function bits(model, x)
  local list = { x.grad and x.grad:tolist() or "none" }
  for name, p in model:named_parameters() do list[#list + 1] = { name, p.grad and p.grad:tolist() or "none" } end
  return list
end
local function same(a, b)
  if type(a) ~= "table" then return a == b end
  if #a ~= #b then return false end
  for i = 1, #a do if not same(a[i], b[i]) then return false end end
  return true
end

-- Runs forward(model, x, wrap) twice from the same state, wrap being a plain call and then checkpoint; gradients must have
-- the same bits.
local function expect_same(make, forward)
  local got = {}
  for i, wrap in ipairs { function(fn, ...) return fn(...) end, ddp.checkpoint } do
    ddp.manual_seed(3)
    local model = make()
    local x = ddp.randn(6, 8, { requires_grad = true })
    forward(model, x, wrap):backward()
    got[i] = bits(model, x)
    got[i][#got[i] + 1] = ddp.randn(3):tolist() -- the generator stands where it would
  end
  t.ok(same(got[1], got[2]), "gradients or draws differ")
  t.ok(got[1][2][2] ~= "none" and same(got[1][2], got[1][2]), "no gradient, or NaN")
end
local function mlp() return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)) end

t.test("checkpoint gives the same bits", function()
  expect_same(mlp, function(m, x, wrap) return wrap(function(v) return m(v) end, x):sum() end)
end)
t.test("so it does with a parameter used inside, outside and in two checkpoints", function()
  expect_same(mlp, function(m, x, wrap)
    local y = wrap(function(v) return (m[1](v) * 2):tanh() end, x)
    local z = wrap(function(v) return (m[1](v) + y):relu() end, x * 3)
    return m[5](m[3](z) + m[3](y)):mean() + m[1](x):sum()
  end)
end)
t.test("so it does with dropout, whose draws come again", function()
  expect_same(mlp, function(m, x, wrap)
    local y = F.dropout(x, .3)
    y = wrap(function(v) return F.dropout(m[1](v), .5):tanh() end, y)
    return (F.dropout(m[3](y), .5) * ddp.randn(16)):sum()
  end)
end)
t.test("so it does nested, three deep", function()
  expect_same(mlp, function(m, x, wrap)
    local function inner(v) return wrap(function(u) return F.dropout(m[3](u):tanh(), .2) end, v) end
    local function middle(v) return wrap(function(u) return inner(m[1](u):tanh()) * inner(m[1](u) * .5) end, v) end
    return wrap(function(v) return m[5](middle(v) + 1) end, x):sum()
  end)
end)
t.test("so it does with in-place ops and views inside", function()
  expect_same(mlp, function(m, x, wrap)
    return wrap(function(v)
      local y = m[1](v)
      y:add_(m[1].bias * 2)
      return y:view(2, 3, 16):permute(2, 1, 3) * 2
    end, x):sum()
  end)
end)
t.test("so it does under autocast, in whose dtype the second run is too", function()
  local dtypes = {}
  expect_same(mlp, function(m, x, wrap)
    return ddp.autocast("bf16", function()
      local y = wrap(function(v)
        local h = m[1](v)
        dtypes[#dtypes + 1] = h:dtype()
        return m[3](h:tanh()) + m[3](m[1](v))
      end, x)
      return m[5](y):sum()
    end)
  end)
  t.eq(dtypes, { "bf16", "bf16", "bf16" })
end)
t.test("several results and arguments that are no tensors pass through", function()
  local x = ddp.randn(4, { requires_grad = true })
  local a, word, b = ddp.checkpoint(function(v, n, opts) return v * n, opts.word, v:exp() end, x, 3, { word = "yes" })
  t.eq(word, "yes");
  (a + b):sum():backward()
  local want = (x:exp() + 3):tolist()
  for i, g in ipairs(x.grad:tolist()) do t.near(g, want[i], 1e-6) end
end)
t.test("inputs that need no gradient, and none at all, are fine", function()
  local p = ddp.tensor({ 2 }, { requires_grad = true })
  ddp.checkpoint(function(v) return v * p * p end, ddp.tensor { 3 }):sum():backward()
  t.eq(p.grad:tolist(), { 12 })
  t.ok(not ddp.checkpoint(function(v) return v * 2 end, ddp.ones(2)).requires_grad)
  local y = ddp.no_grad(ddp.checkpoint, function(v) return v * p end, ddp.ones(1))
  t.ok(not y.requires_grad)
end)
t.test("modes of the library are in force again on the second run, and put back after it", function()
  local grad = require "ddp.grad"
  local mode, seen = "a", {}
  grad.modes[#grad.modes + 1] = { get = function() return mode end, enter = function(v)
    local before = mode
    mode = v
    return before
  end, leave = function(v) mode = v end }
  local x = ddp.ones(1, { requires_grad = true })
  local y = ddp.checkpoint(function(v)
    seen[#seen + 1] = mode
    return v * v
  end, x)
  mode = "b"
  y:backward()
  grad.modes[#grad.modes] = nil
  t.eq(seen, { "a", "a" })
  t.eq(mode, "b")
end)
t.test("running statistics are counted once", function()
  local function run(wrap)
    ddp.manual_seed(1)
    local bn = nn.BatchNorm2d(3)
    wrap(function(v) return bn(v) end, ddp.randn(4, 3, 5, 5)):sum():backward()
    return { bn.running_mean:tolist(), bn.running_var:tolist(), { bn.num_batches_tracked:item() }, bn.weight.grad:tolist() }
  end
  local plain, recomputed = run(function(fn, ...) return fn(...) end), run(ddp.checkpoint)
  t.eq(plain[3], { 1 })
  t.eq(recomputed, plain)
end)
t.test("so are those of a batch norm that a relu was put into", function()
  local function run(wrap)
    ddp.manual_seed(1)
    local net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    wrap(function(v) return net(v) end, ddp.randn(4, 3, 5, 5)):sum():backward()
    return { net[1].running_mean:tolist(), { net[1].num_batches_tracked:item() }, net[1].weight.grad:tolist() }
  end
  local plain = run(function(fn, ...) return fn(...) end)
  t.eq(plain[2], { 1 })
  t.eq(run(ddp.checkpoint), plain)
end)
t.test("a graph that was retained is not run again, one that was not is used up", function()
  local runs, x = 0, ddp.ones(2, { requires_grad = true })
  local y = ddp.checkpoint(function(v)
    runs = runs + 1
    return (v * v):exp()
  end, x):sum()
  y:backward { retain_graph = true }
  t.eq(runs, 2)
  y:backward()
  t.eq(runs, 2)
  t.near(x.grad[1]:item(), 4 * math.exp(1), 1e-5)
  t.fails(function() y:backward() end, "used up by an earlier backward")
end)
t.test("ddp.grad goes through, also twice", function()
  local x = ddp.tensor({ 2 }, { requires_grad = true })
  local y = ddp.checkpoint(function(v) return v ^ 3 end, x)
  local g = ddp.grad({ y:sum() }, { x }, { create_graph = true })[1]
  t.eq(g:tolist(), { 12 })
  t.eq(ddp.grad({ g:sum() }, { x })[1]:tolist(), { 12 })
  t.ok(x.grad == nil)
  local s = ddp.rand(3, { dtype = "f64", requires_grad = true })
  t.ok(ddp.gradcheck(function(v) return ddp.checkpoint(function(u) return u:tanh() * u end, v) end, { s }))
end)
t.test("an error in the function passes on, in forward and in backward, and leaves no state", function()
  local x, runs = ddp.ones(2, { requires_grad = true }), 0
  t.fails(function() ddp.checkpoint(function(v) return v:matmul(ddp.ones(3, 3)) end, x * 1) end, "test_checkpoint.lua:")
  local y = ddp.checkpoint(function(v)
    runs = runs + 1
    if runs == 2 then error("in the second run", 0) end
    return v * v
  end, x)
  t.fails(function() y:sum():backward() end, "in the second run")
  t.eq(require("ddp.ffi").C.ddp_segment_open(), 0)
  x.grad = nil;
  (x * x):sum():backward()
  t.eq(x.grad:tolist(), { 2, 2 })
end)
t.test("a step with checkpoints survives a failure at each of its allocations", function()
  local C = require("ddp.ffi").C
  ddp.manual_seed(2)
  local m, x = mlp(), ddp.randn(6, 8)
  local function step()
    ddp.manual_seed(7)
    m:zero_grad()
    local h = ddp.checkpoint(function(v) return ddp.checkpoint(function(u) return F.dropout(m[1](u):tanh(), .5) end, v) * 2 end, x)
    m[5](ddp.checkpoint(function(v) return m[3](v):tanh() end, h)):sum():backward()
    return bits(m, x)
  end
  local want, failures = step(), 0
  for k = 1, 90 do
    C.ddp_memory_fail_at(k)
    local ok, err = pcall(step)
    C.ddp_memory_fail_at(0)
    if not ok then
      failures = failures + 1
      t.ok(tostring(err):find "out of memory", tostring(err))
    end
    t.eq(C.ddp_segment_open(), 0, "segments left open by failure " .. k)
    t.ok(same(step(), want), "the step after failure " .. k)
  end
  t.ok(failures > 5, failures .. " failures reached the caller")
end)
t.test("a function that does something else the second time is told so", function()
  local runs, x = 0, ddp.ones(2, { requires_grad = true })
  local y = ddp.checkpoint(function(v)
    runs = runs + 1
    if runs == 2 then return v + v end
    return v * v
  end, x)
  t.fails(function() y:sum():backward() end, "call 1 was mul, then add")
end)
t.test("an argument that was changed in place is told, whoever did it", function()
  local x, c = ddp.ones(2, { requires_grad = true }), ddp.ones(2)
  local y = ddp.checkpoint(function(v, k) return v * k end, x, c)
  c:add_(1)
  t.fails(function() y:sum():backward() end, "argument 2 was changed in place before its backward")
  t.fails(function() ddp.checkpoint(function(v, k) return v * k:mul_(2) end, x, c) end, "argument 2 was changed in place by its function")
end)
t.test("a deep MLP needs less than half of the memory", function()
  local depth, width, batch = 24, 256, 4096 -- 4 MB an activation
  ddp.manual_seed(1)
  local layers = {}
  for i = 1, depth do layers[i] = nn.Linear(width, width) end
  local model = nn.Sequential(unpack(layers))
  local function block(x, first)
    for i = first, first + 3 do x = (layers[i](x):tanh() * 1.1):sigmoid() end
    return x
  end
  local function peak(wrap)
    local x = ddp.randn(batch, width)
    model:zero_grad()
    collectgarbage()
    collectgarbage()
    ddp.reset_peak_memory_stats()
    local before = ddp.memory_stats().allocated
    for i = 1, depth, 4 do x = wrap(block, x, i) end
    x:sum():backward()
    return ddp.memory_stats().peak - before
  end
  local plain, recomputed = peak(function(fn, ...) return fn(...) end), peak(ddp.checkpoint)
  t.ok(plain > 2 * depth * 4 * 2 ^ 20, "the plain run keeps " .. plain)
  t.ok(recomputed * 2 < plain, ("%.1f MB with, %.1f without"):format(recomputed / 2 ^ 20, plain / 2 ^ 20))
end)
t.test("what a checkpoint held is let go, whether its backward ran or not", function()
  local w = ddp.ones(2, { requires_grad = true })
  local function steps()
    for i = 1, 20 do
      local y = ddp.checkpoint(function(v) return ddp.checkpoint(function(u) return u:exp() end, v * w) end, ddp.ones(2))
      if i % 2 == 0 then y:sum():backward() end
    end
  end
  steps()
  for _ = 1, 3 do collectgarbage() end
  ddp.checkpoint(function(v) return v * w end, ddp.ones(2)) -- sweeps
  for _ = 1, 3 do collectgarbage() end
  local before = ddp.memory_stats().live_tensors
  steps()
  for _ = 1, 3 do collectgarbage() end
  ddp.checkpoint(function(v) return v * w end, ddp.ones(2))
  for _ = 1, 3 do collectgarbage() end
  t.ok(ddp.memory_stats().live_tensors <= before, ("%d live, %d before"):format(ddp.memory_stats().live_tensors, before))
end)

-- ---- ddp.func ----

local square = ddp.func {
  forward = function(ctx, x, n)
    ctx:save_for_backward(x)
    ctx.n = n
    return x ^ n
  end,
  backward = function(ctx, g)
    local x = ctx.saved_tensors[1]
    return g * x ^ (ctx.n - 1) * ctx.n
  end,
}

t.test("func's gradient is the user's, checked by differences, also the second one", function()
  local x = ddp.rand(4, { dtype = "f64", requires_grad = true })
  t.ok(ddp.gradcheck(function(v) return square(v, 3) end, { x }))
  local y = ddp.tensor({ 2 }, { requires_grad = true })
  local g = ddp.grad({ square(y, 3):sum() }, { y }, { create_graph = true })[1]
  t.eq(g:tolist(), { 12 })
  t.eq(ddp.grad({ g:sum() }, { y })[1]:tolist(), { 12 })
end)
t.test("func: several arguments and results, needs_input_grad, zeros for results that were not used", function()
  local seen
  local f = ddp.func {
    forward = function(ctx, word, a, b)
      t.eq(ctx.needs_input_grad, { false, true, false })
      return a * 2, word, b * 3
    end,
    backward = function(_, g1, g2)
      seen = g2:tolist()
      return nil, g1 * 2
    end,
  }
  local a, b = ddp.ones(2, { requires_grad = true }), ddp.ones(3)
  local y, word, z = f("w", a, b)
  t.eq({ word, z:tolist() }, { "w", { 3, 3, 3 } })
  y:sum():backward()
  t.eq(a.grad:tolist(), { 2, 2 })
  t.eq(seen, { 0, 0, 0 })
end)
t.test("func: a result that is the argument itself, as a straight-through estimator has it", function()
  local f = ddp.func { forward = function(_, x) return x end, backward = function(_, g) return g * 10 end }
  local x = ddp.ones(2, { requires_grad = true });
  (f(x) * 2):sum():backward()
  t.eq(x.grad:tolist(), { 20, 20 })
  t.ok(not f(ddp.ones(1)).requires_grad)
end)
t.test("func: wrong gradients, saved tensors that changed and a second backward are told", function()
  local x = ddp.ones(2, { requires_grad = true })
  local function with(backward, forward) return ddp.func { forward = forward or function(_, v) return v * 1 end, backward = backward }(x):sum() end
  t.fails(function() with(function() return ddp.ones(3) end):backward() end, "func: gradient 1 is [3], its input [2]")
  t.fails(function() with(function() return 5 end):backward() end, "func: gradient 1 is a number")
  t.fails(function() with(function(_, g) return g, g end):backward() end, "returned 2 gradients, forward has 1")
  t.fails(function() ddp.func { forward = print } end, "func: backward is a nil")
  t.fails(function() ddp.func { forward = print, backwards = print } end, "did you mean \"backward\"?")
  local c = ddp.ones(2)
  local y = with(function(ctx, g) return g * ctx.saved_tensors[1] end, function(ctx, v)
    ctx:save_for_backward(c)
    return v * c
  end)
  c:add_(1)
  t.fails(function() y:backward() end, "func: saved tensor 1 was changed in place")
  local z = square(ddp.ones(1, { requires_grad = true }), 2)
  z:backward()
  t.fails(function() z:backward() end, "a host function was used up")
end)
t.test("func inside a checkpoint gives the same bits and keeps nothing in between", function()
  local double = ddp.func {
    forward = function(ctx, v)
      local e = v:exp()
      ctx:save_for_backward(e)
      return e
    end,
    backward = function(ctx, g) return g * ctx.saved_tensors[1] end,
  }
  expect_same(mlp, function(m, x, wrap) return wrap(function(v) return double(m[1](v)) * double(v:sum()) end, x):mean() end)
end)
t.test("func holds no graph of its own alive", function()
  local function steps()
    for _ = 1, 10 do
      local x = ddp.ones(2, { requires_grad = true })
      local f = ddp.func {
        forward = function(ctx, v)
          local y = v:exp()
          ctx:save_for_backward(v, y)
          return y
        end,
        backward = function(ctx, g) return g * ctx.saved_tensors[2] end,
      }
      f(x)
    end
  end
  steps()
  for _ = 1, 3 do collectgarbage() end
  square(ddp.ones(1, { requires_grad = true }), 2)
  for _ = 1, 3 do collectgarbage() end
  local before = ddp.memory_stats().live_tensors
  steps()
  for _ = 1, 3 do collectgarbage() end
  square(ddp.ones(1, { requires_grad = true }), 2)
  for _ = 1, 3 do collectgarbage() end
  t.ok(ddp.memory_stats().live_tensors <= before, ("%d live, %d before"):format(ddp.memory_stats().live_tensors, before))
end)

t.done()
