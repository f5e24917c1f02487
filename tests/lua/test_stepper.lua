-- test_stepper.lua -- the loss scaler, clipping, schedules, optimizer state, and the stepper that drives them.
local t = require "harness"
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
local schedule = ddp.optim.schedule

local function leaf(value) return ddp.full({ 2 }, value, { requires_grad = true }) end

-- ---- GradScaler ---------------------------------------------------------------------------------------------------------

t.test("P1 GradScaler: misuse is an error that says so", function()
  local p = leaf(1)
  local opt, scaler = ddp.optim.SGD({ p }, { lr = 0.1 }), ddp.amp.GradScaler()
  t.fails(function() scaler:step(opt) end, "step: no loss went through scaler:scale")
  t.fails(function() scaler:unscale_(opt) end, "unscale_: no loss went through scaler:scale")
  t.fails(function() scaler:update() end, "update: no optimizer was stepped")
  local loss = scaler:scale(p:sum())
  t.fails(function() scaler:step(opt) end, "have no gradients; was backward called?")
  loss:backward()
  scaler:unscale_(opt)
  t.fails(function() scaler:unscale_(opt) end, "unscale_: called twice")
  t.ok(scaler:step(opt))
  t.fails(function() scaler:step(opt) end, "step: called twice")
  t.fails(function() scaler:unscale_(opt) end, "unscale_: called after step")
  scaler:update()
  t.fails(function() scaler:step(opt) end, "no loss went through scaler:scale since the last update")
  t.fails(function() scaler:scale(3) end, "scale: expected a tensor")
  t.fails(function() ddp.amp.GradScaler { init_scal = 2 } end, "did you mean \"init_scale\"")
  t.fails(function() ddp.amp.GradScaler { growth_factor = 1 } end, "growth_factor is 1, expected more than 1")
end)
t.test("GradScaler: gradients are scaled, then those of the loss again", function()
  local p = leaf(3)
  local opt, scaler = ddp.optim.SGD({ p }, { lr = 0.1 }), ddp.amp.GradScaler { init_scale = 1024 }
  scaler:scale((p * p):sum()):backward()
  t.eq(p.grad:tolist(), { 6144, 6144 })
  scaler:unscale_(opt)
  t.eq(p.grad:tolist(), { 6, 6 })
end)
t.test("P1 GradScaler: a step with an infinity is skipped and the state stays as it was", function()
  local p = leaf(1)
  local opt, scaler = ddp.optim.Adam({ p }, { lr = 0.1 }), ddp.amp.GradScaler { init_scale = 8 }
  scaler:scale((p * math.huge):sum()):backward()
  t.eq(scaler:step(opt), false)
  scaler:update()
  t.eq(p:tolist(), { 1, 1 })
  t.eq(scaler:get_scale(), 4)
  t.eq(opt:state_dict().state[1], nil, "no step was counted")
end)
t.test("GradScaler: a half loss is scaled in f32", function()
  t.eq(ddp.amp.GradScaler():scale(ddp.ones({}):to "f16"):item(), 65536)
end)
t.test("GradScaler: not enabled it passes everything through", function()
  local p = leaf(1)
  local opt, scaler = ddp.optim.SGD({ p }, { lr = 0.1 }), ddp.amp.GradScaler { enabled = false }
  local loss = p:sum()
  t.ok(scaler:scale(loss) == loss and scaler:get_scale() == 1)
  loss:backward()
  scaler:unscale_(opt)
  t.eq(scaler:step(opt), true)
  scaler:update()
  t.near(p[1]:item(), 0.9, 1e-6)
  t.eq(next(scaler:state_dict()), nil)
end)
t.test("GradScaler: a state of another kind is refused", function()
  local a, b = ddp.amp.GradScaler { init_scale = 32, growth_interval = 7 }, ddp.amp.GradScaler()
  b:load_state_dict(a:state_dict())
  t.eq(b:get_scale(), 32)
  t.eq(b:state_dict(), a:state_dict())
  t.fails(function() b:load_state_dict {} end, "the state is empty")
  t.fails(function() b:load_state_dict { scale = 1 } end, "is missing: not a scaler's state")
  local s = a:state_dict()
  s.momentum = 1
  t.fails(function() b:load_state_dict(s) end, "unknown \"momentum\"")
end)

-- ---- clipping -------------------------------------------------------------------------------------------------------------

t.test("clip_grad_norm_ takes the norm over all gradients, and leaves small ones alone", function()
  local a, b, c = leaf(1), leaf(1), leaf(1);
  (a * 3):sum():backward();
  (b * 4):sum():backward()
  t.near(ddp.clip_grad_norm_({ a, b, c }, 100):item(), math.sqrt(50), 1e-5)
  t.eq(a.grad:tolist(), { 3, 3 })
  t.near(ddp.clip_grad_norm_({ a, b, c }, 1):item(), math.sqrt(50), 1e-5)
  t.near(b.grad[1]:item(), 4 / math.sqrt(50), 1e-5)
  t.near(ddp.clip_grad_norm_({ a, b, c }, 1):item(), 1, 1e-5)
  t.eq(ddp.clip_grad_norm_({ c }, 1):item(), 0)
end)
t.test("clip_grad_norm_ scales by norms that are not finite as PyTorch does, or refuses", function()
  local function after(bad, opts)
    local a = leaf(1)
    a.grad = ddp.tensor { bad, 2 }
    local norm = ddp.clip_grad_norm_({ a }, 1, opts):item()
    return norm, a.grad[1]:item(), a.grad[2]:item()
  end
  local norm, first, second = after(math.huge)
  t.ok(norm == math.huge and first ~= first and second == 0)
  norm, first, second = after(0 / 0)
  t.ok(norm ~= norm and first ~= first and second ~= second)
  t.fails(function() after(math.huge, { error_if_nonfinite = true }) end, "the total norm is inf")
end)
t.test("clip_grad_norm_ holds large f32 gradients", function()
  local a = leaf(1)
  a.grad = ddp.full({ 2 }, 3e19)
  t.near(ddp.clip_grad_norm_({ a }, 1):item() / (3e19 * math.sqrt(2)), 1, 1e-6)
  t.near(a.grad:norm():item(), 1, 1e-5)
end)

-- ---- optimizer state -----------------------------------------------------------------------------------------------------------

for _, name in ipairs { "SGD", "Adam", "AdamW" } do
  t.test(name .. ": state_dict and load_state_dict carry a run on to the same bits", function()
    local function net()
      ddp.manual_seed(4)
      return nn.Linear(5, 3)
    end
    local function make(m) return ddp.optim[name](m:parameters(), { lr = 0.1, [name == "SGD" and "momentum" or "eps"] = name == "SGD" and 0.9 or 1e-8 }) end
    local x = ddp.randn(7, 5)
    local function train(m, opt, n)
      for _ = 1, n do
        opt:zero_grad();
        (m(x) ^ 2):mean():backward()
        opt:step()
      end
    end
    local a, b = net(), net()
    local oa, ob = make(a), make(b)
    train(a, oa, 6)
    train(b, ob, 3)
    local c = net()
    local oc = ddp.optim[name](c:parameters(), { lr = 7 })
    c:load_state_dict(b:state_dict())
    oc:load_state_dict(ob:state_dict())
    t.eq(oc.param_groups[1].lr, 0.1)
    train(c, oc, 3)
    t.ok(c.weight:equal(a.weight) and c.bias:equal(a.bias), "the resumed run differs")
  end)
end
t.test("an optimizer refuses a state of another kind or model", function()
  local a, b = leaf(1), leaf(1)
  local sgd, adam = ddp.optim.SGD({ a }, { lr = 1, momentum = 0.9 }), ddp.optim.Adam { a }
  t.fails(function() adam:load_state_dict(sgd:state_dict()) end, "not a state of Adam")
  t.fails(function() sgd:load_state_dict { scale = 1 } end, "expected {state =, param_groups =}")
  t.fails(function() sgd:load_state_dict(ddp.optim.SGD({ a, b }, { lr = 1 }):state_dict()) end, "2 parameters in the state, 1 here")
  local wide = ddp.ones(3, { requires_grad = true })
  local other = ddp.optim.SGD({ wide }, { lr = 1, momentum = 0.9 })
  wide:sum():backward()
  other:step()
  t.fails(function() sgd:load_state_dict(other:state_dict()) end, "momentum_buffer of parameter 1 is [3], the parameter [2]")
end)

-- ---- schedules -----------------------------------------------------------------------------------------------------------------

local function rates(kind, opts, n)
  local opt = ddp.optim.SGD({ { params = { leaf(1) }, lr = 1 }, { params = { leaf(1) }, lr = 10 } }, { lr = 1 })
  opts.optimizer = opt
  local s, out = schedule[kind](opts), {}
  for i = 1, n do
    out[i] = opt.param_groups[1].lr
    t.near(opt.param_groups[2].lr, 10 * out[i], 1e-9, "groups keep their own base rate")
    t.eq(s:get_last_lr(), { opt.param_groups[1].lr, opt.param_groups[2].lr })
    s:step()
  end
  return out
end
local function near_all(got, want) for i, v in ipairs(want) do t.near(got[i], v, 1e-9, "the rate of step " .. i) end end
t.test("cosine warms up, falls along half a cosine and stays down", function()
  near_all(rates("cosine", { steps = 6, warmup = 2 }, 8), { 0.5, 1, 1, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.5 - 0.5 * math.cos(math.pi / 4), 0, 0 })
end)
t.test("linear falls evenly", function() near_all(rates("linear", { steps = 4 }, 6), { 1, 0.75, 0.5, 0.25, 0, 0 }) end)
t.test("step multiplies every so often; lambda takes its factor from a function", function()
  near_all(rates("step", { every = 2, gamma = 0.5 }, 5), { 1, 1, 0.5, 0.5, 0.25 })
  near_all(rates("lambda", { fn = function(i) return 1 / (1 + i) end }, 3), { 1, 1 / 2, 1 / 3 })
end)
t.test("min_lr is where cosine and linear end", function()
  local opt = ddp.optim.SGD({ leaf(1) }, { lr = 1 })
  local s = schedule.cosine { optimizer = opt, steps = 2, min_lr = 0.2 }
  s:step()
  t.near(opt.param_groups[1].lr, 0.6, 1e-9)
  s:step()
  t.near(opt.param_groups[1].lr, 0.2, 1e-9)
end)
t.test("a schedule's state carries on; one of another kind is refused", function()
  local a, b = ddp.optim.SGD({ leaf(1) }, { lr = 1 }), ddp.optim.SGD({ leaf(1) }, { lr = 5 })
  local s, r = schedule.linear { optimizer = a, steps = 4 }, schedule.linear { optimizer = b, steps = 4 }
  s:step()
  r:load_state_dict(s:state_dict())
  t.eq(b.param_groups[1].lr, 0.75)
  t.fails(function() schedule.cosine { optimizer = a, steps = 4 }:load_state_dict(s:state_dict()) end, "the state is of \"linear\"")
end)
t.test("schedules refuse bad arguments by name", function()
  local opt = ddp.optim.SGD({ leaf(1) }, { lr = 1 })
  t.fails(function() schedule.cosine { optimizer = opt } end, "cosine: steps is missing")
  t.fails(function() schedule.cosine { steps = 3 } end, "cosine: optimizer is missing")
  t.fails(function() schedule.linear { optimizer = opt, steps = 3, warmup = 4 } end, "warmup is 4, more than the 3 steps")
  t.fails(function() schedule.step { optimizer = opt, evry = 3 } end, "did you mean \"every\"")
  t.fails(function() schedule.one_cycle { optimizer = opt, steps = 3, anneal_strategy = "cosine" } end, "expected cos or linear")
end)

-- ---- the stepper -----------------------------------------------------------------------------------------------------------------

ddp.manual_seed(9)
local X, Y = ddp.randn(27, 6), ddp.randint(0, 3, { 27 })
local function net()
  ddp.manual_seed(1)
  return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
end
local function loss_of(m, first, n) return F.cross_entropy(m(X:narrow(1, first, n)), Y:narrow(1, first, n)) end
local function difference(a, b)
  local worst, pb = 0, b:parameters()
  for i, p in ipairs(a:parameters()) do
    local d = ddp.no_grad(function() return ((p - pb[i]):abs():max() / pb[i]:abs():max()):item() end)
    if not (d <= worst) then worst = d end
  end
  return worst
end

-- Three windows over micro-batches of these sizes; the last is flushed when it is short.
local function train(sizes, accumulate, opts)
  local m = net()
  local opt = ddp.optim.SGD(m:parameters(), { lr = 0.5, momentum = 0.9 })
  local step = ddp.stepper { model = m, optimizer = opt, accumulate = accumulate, scaler = opts and opts.scaler, clip = opts and opts.clip }
  local applied = 0
  for _ = 1, 3 do
    local first = 1
    for _, n in ipairs(sizes) do
      if step(loss_of(m, first, n), n) then applied = applied + 1 end
      first = first + n
    end
    if step:flush() then applied = applied + 1 end
  end
  t.eq(applied, 3, "steps applied")
  return m
end

t.test("P2 windows of 8, 8, 8 and 3 equal the full batch of 27", function()
  local full = train({ 27 }, 1)
  t.ok(difference(train({ 8, 8, 8, 3 }, 4), full) < 1e-6, "a full window of unequal micro-batches")
  t.ok(difference(train({ 3, 8, 8, 8 }, 4), full) < 1e-6, "the small one first")
  t.ok(difference(train({ 8, 8, 8, 3 }, 6), full) < 1e-6, "a short window, flushed")
end)
t.test("P1 P2 the same with a scaler and with clipping", function()
  local clipped = train({ 27 }, 1, { clip = 0.1 })
  t.ok(difference(clipped, train({ 27 }, 1)) > 1e-3, "clipping did nothing")
  t.ok(difference(train({ 8, 8, 8, 3 }, 4, { clip = 0.1, scaler = ddp.amp.GradScaler { init_scale = 1024 } }), clipped) < 1e-6)
  t.ok(difference(train({ 8, 8, 8, 3 }, 9, { clip = 0.1, scaler = ddp.amp.GradScaler { enabled = false } }), clipped) < 1e-6)
end)
t.test("P2 without weights every micro-batch counts alike, also in a short window", function()
  local m = net()
  local step = ddp.stepper { model = m, optimizer = ddp.optim.SGD(m:parameters(), { lr = 1 }), accumulate = 4 }
  local before = m[1].bias:clone()
  for i = 1, 3 do step(loss_of(m, 9 * i - 8, 9)) end
  t.ok(m[1].bias:equal(before), "nothing moves inside a window")
  local applied, info = step:flush()
  t.ok(applied and info.window_end and not info.skipped)
  local full = net()
  loss_of(full, 1, 27):backward()
  ddp.optim.SGD(full:parameters(), { lr = 1 }):step()
  t.ok(difference(m, full) < 1e-6)
  applied, info = step:flush()
  t.ok(not applied and not info.window_end, "nothing is left to flush")
end)
t.test("P1 one call says whether the step was applied, and schedules count applied steps", function()
  local p = leaf(1)
  local m = nn.Module "One"()
  m.p = nn.Parameter(p)
  local opt, scaler = ddp.optim.SGD({ m.p }, { lr = 1 }), ddp.amp.GradScaler { init_scale = 16 }
  local s = schedule.linear { optimizer = opt, steps = 4 }
  local step = ddp.stepper { model = m, optimizer = opt, accumulate = 2, clip = 1, scaler = scaler, schedule = s }
  local function window(factor)
    local applied, info = step((m.p * 2):sum())
    t.ok(applied == false and info.window_end == false and info.grad_norm == nil)
    return step((m.p * factor):sum())
  end
  local applied, info = window(4)
  t.ok(applied and info.window_end and not info.skipped)
  t.near(info.grad_norm, 3 * math.sqrt(2), 1e-5)
  t.eq(info.lr, 1)
  t.eq(opt.param_groups[1].lr, 0.75)
  local held = m.p:clone()
  applied, info = window(math.huge)
  t.ok(not applied and info.window_end and info.skipped and info.grad_norm == math.huge)
  t.eq({ opt.param_groups[1].lr, scaler:get_scale() }, { 0.75, 8 })
  t.ok(m.p:equal(held), "a skipped step moved a parameter")
  applied, info = window(4)
  t.ok(applied and info.lr == 0.75)
end)
t.test("P2 gradients of another loss never leak into a window", function()
  local a, b = net(), net()
  local function one(m)
    ddp.stepper { model = m, optimizer = ddp.optim.SGD(m:parameters(), { lr = 1 }) }(loss_of(m, 1, 8))
  end
  loss_of(a, 9, 8):backward()
  one(a)
  one(b)
  t.ok(difference(a, b) == 0)
end)
t.test("C6 a skipped micro-batch counts for nothing; a window of them is no step", function()
  local m, full = net(), net()
  local opt = ddp.optim.SGD(m:parameters(), { lr = 1 })
  local step = ddp.stepper { model = m, optimizer = opt, accumulate = 3, scaler = ddp.amp.GradScaler() }
  step:skip()
  step(loss_of(m, 1, 8), 8)
  local applied = step(loss_of(m, 9, 8), 0)
  t.ok(applied)
  loss_of(full, 1, 8):backward()
  ddp.optim.SGD(full:parameters(), { lr = 1 }):step()
  t.ok(difference(m, full) < 1e-6)
  step:skip()
  step:skip()
  local again, info = step:skip()
  t.ok(not again and info.window_end and info.skipped and difference(m, full) < 1e-6)
end)
-- ---- gradients are read once by the step, and written for those who look ------------------------------------------------------

-- One window of net() by the stepper, or by the calls it stands for. look(m): what is done between backward and the step; its
-- value comes back second. make: the optimizer.
local function window(by_calls, make, opts, look)
  local m, looked = net(), nil
  local opt = make(m:parameters())
  local scaler = opts.scale and ddp.amp.GradScaler { init_scale = opts.scale }
  m[3].bias:register_post_accumulate_grad_hook(function() looked = look and look(m) end)
  if by_calls then
    local loss = loss_of(m, 1, 27)
    local from = scaler and scaler:scale(loss) or loss
    from:backward()
    if scaler then scaler:unscale_(opt) end
    local norm = opts.clip and ddp.clip_grad_norm_(m:parameters(), opts.clip):item()
    if scaler then scaler:step(opt) else opt:step() end
    return m, looked, norm
  end
  local _, info = ddp.stepper { model = m, optimizer = opt, clip = opts.clip, scaler = scaler }(loss_of(m, 1, 27))
  return m, looked, info.grad_norm
end
local function sgd(params) return ddp.optim.SGD(params, { lr = 0.5, momentum = 0.9, weight_decay = 0.01 }) end
local function adamw(params) return ddp.optim.AdamW(params, { lr = 0.01 }) end
local function near_tensors(got, want, what)
  local top = ddp.no_grad(function() return want:abs():max():item() end)
  t.ok(got:allclose(want, { rtol = 0, atol = 1e-6 * top }), what)
end

t.test("P1 the stepper moves parameters as the calls do, whatever is unscaled and clipped", function()
  for _, make in ipairs { sgd, adamw } do
    for _, opts in ipairs { { clip = 0.1 }, { clip = 1e6 }, { scale = 1024 }, { scale = 3000, clip = 0.1 }, {} } do
      local m, _, norm = window(false, make, opts)
      local want, _, want_norm = window(true, make, opts)
      for i, p in ipairs(m:parameters()) do near_tensors(p, want:parameters()[i], "a parameter differs") end
      t.eq(norm == nil, want_norm == nil)
      if norm then t.near(norm / want_norm, 1, 1e-6, "the norm") end
    end
  end
end)
t.test("P1 p.grad after the step is unscaled and clipped, read once or again", function()
  for _, opts in ipairs { { clip = 0.1 }, { scale = 1024 }, { scale = 3000, clip = 0.1 } } do
    local m, want = window(false, sgd, opts), window(true, sgd, opts)
    for i, p in ipairs(m:parameters()) do
      near_tensors(p.grad, want:parameters()[i].grad, "a gradient differs")
      near_tensors(p.grad, want:parameters()[i].grad, "a gradient differs when it is read again")
    end
  end
end)
t.test("P1 a handle or a view of a gradient, taken before the step, shows it unscaled and clipped after it", function()
  local opts = { scale = 3000, clip = 0.1 }
  local want = window(true, sgd, opts)
  local _, held = window(false, sgd, opts, function(m) return m[1].weight.grad end)
  near_tensors(held, want[1].weight.grad, "the handle")
  local _, view = window(false, sgd, opts, function(m) return m[1].weight.grad:flatten(1) end)
  collectgarbage()
  collectgarbage()
  near_tensors(view, want[1].weight.grad:flatten(1), "the view")
end)
t.test("P1 a tensor set as p.grad is written, as the calls write it", function()
  local p = leaf(1)
  local opt, own = ddp.optim.SGD({ p }, { lr = 1 }), ddp.full({ 2 }, 8)
  local scaler = ddp.amp.GradScaler { init_scale = 4 }
  scaler:scale(p:sum()) -- counts as a loss
  p.grad = own
  scaler:step(opt)
  t.eq(own:tolist(), { 2, 2 })
  t.eq(p:tolist(), { -1, -1 })
end)
t.test("P1 scaler:step without unscale_ leaves p.grad unscaled, also where it skips", function()
  for _, factor in ipairs { 6, math.huge } do
    local p = leaf(1)
    local opt, scaler = ddp.optim.SGD({ p }, { lr = 1 }), ddp.amp.GradScaler { init_scale = 4 }
    scaler:scale((p * ddp.tensor { 3, factor }):sum()):backward()
    t.eq(scaler:step(opt), factor < math.huge)
    t.eq(p.grad:tolist(), { 3, factor })
    t.eq(p:tolist(), factor < math.huge and { -2, -5 } or { 1, 1 })
  end
end)
t.test("P1 a backward, a step and a norm after the step go on from gradients as they should be", function()
  local function after(fn)
    local p = leaf(1)
    local opt, scaler = ddp.optim.SGD({ p }, { lr = 1 }), ddp.amp.GradScaler { init_scale = 4 }
    scaler:scale((p * 3):sum()):backward()
    scaler:step(opt)
    return fn(p, opt)
  end
  after(function(p)
    (p * 5):sum():backward()
    t.eq(p.grad:tolist(), { 8, 8 }, "added to")
  end)
  after(function(p, opt)
    opt:step()
    t.eq(p:tolist(), { -5, -5 }, "stepped again")
    t.eq(p.grad:tolist(), { 3, 3 }, "stepped again")
  end)
  after(function(p) t.near(ddp.clip_grad_norm_({ p }, 100):item(), math.sqrt(18), 1e-6, "the norm") end)
  after(function(p, opt)
    opt:zero_grad();
    (p * 5):sum():backward()
    t.eq(p.grad:tolist(), { 5, 5 }, "dropped before")
  end)
end)
t.test("P1 a factor below f32's normal numbers loses no digits", function()
  local m, scaler = nn.Module "One"(), ddp.amp.GradScaler { init_scale = 2 ^ 118 }
  m.p = nn.Parameter(leaf(1))
  local opt = ddp.optim.SGD({ m.p }, { lr = 1 })
  ddp.stepper { model = m, optimizer = opt, clip = 3e-6, scaler = scaler }((m.p * 7):sum())
  local want = 3e-6 / math.sqrt(2)
  t.near(m.p.grad[1]:item() / want, 1, 1e-6)
  t.near((1 - m.p[1]:item()) / want, 1, 0.05) -- as far as 1 - p holds it
end)
t.test("P1 an optimizer with a step of its own sees its gradients unscaled and clipped", function()
  local m, seen = net(), nil
  local opt = sgd(m:parameters())
  local plain = opt.step
  opt.step = function(self)
    seen = m[1].weight.grad:clone()
    plain(self)
  end
  ddp.stepper { model = m, optimizer = opt, clip = 0.1, scaler = ddp.amp.GradScaler { init_scale = 3000 } }(loss_of(m, 1, 27))
  near_tensors(seen, window(true, sgd, { scale = 3000, clip = 0.1 })[1].weight.grad, "what it saw")
end)
t.test("P1 nobody looks, so nobody writes: gradients keep their bytes through the step", function()
  local p = nn.Parameter(ddp.ones(1000))
  local opt = ddp.optim.SGD({ p }, { lr = 1 })
  local rows = ddp.profile(function()
    local scaler = ddp.amp.GradScaler { init_scale = 4 }
    scaler:scale((p * 3):sum()):backward()
    scaler:step(opt)
  end)
  local ran = {}
  for _, r in ipairs(rows) do ran[r.op or r.kernel] = true end
  t.ok(not ran["grad_unscale_"], "a pass of its own")
  t.eq(p.grad[1]:item(), 3)
end)
t.test("P2 the end of a loader's loop ends an open window of a wrapped model; a flush then says how it went", function()
  local function epoch(wrap)
    ddp.manual_seed(7)
    local m = nn.Linear(6, 3)
    local model = wrap and ddp.DistributedDataParallel(m) or m
    local opt = ddp.optim.SGD(m:parameters(), { lr = 0.5 })
    local step = ddp.stepper { model = model, optimizer = opt, accumulate = 2 }
    ddp.manual_seed(8)
    local set = ddp.data.tensors(ddp.randn(5, 6), ddp.randint(0, 3, { 5 }))
    for x, y in ddp.data.DataLoader(set, { batch_size = 2 }):iter() do
      step(F.cross_entropy(model(x), y), x:size(1))
      -- Loops over other data inside leave the window alone.
      for _ in ddp.data.DataLoader(set, { batch_size = 5 }):iter() do t.ok(true) end
    end
    local before = m.weight:clone()
    local applied, info = step:flush()
    return m.weight:clone(), before, applied, info, step
  end
  local want = epoch(false)
  local got, before, applied, info, step = epoch(true)
  t.ok(got:equal(want) and before:equal(want), "the loop's end did not step")
  t.ok(applied and info.window_end and not info.skipped)
  t.eq(step:flush(), false)
end)
t.test("a stepper refuses bad arguments by name", function()
  local m = net()
  local opt = ddp.optim.SGD(m:parameters(), { lr = 1 })
  t.fails(function() ddp.stepper { optimizer = opt } end, "stepper: model is missing")
  t.fails(function() ddp.stepper { model = m } end, "stepper: optimizer is missing")
  t.fails(function() ddp.stepper { model = m, optimizer = opt, accumulat = 2 } end, "did you mean \"accumulate\"")
  t.fails(function() ddp.stepper { model = m, optimizer = opt, accumulate = 0 } end, "accumulate is 0, expected a whole number from 1")
  local step = ddp.stepper { model = m, optimizer = opt }
  t.fails(function() step(ddp.ones(3)) end, "the loss is [3], expected one number")
  t.fails(function() step(loss_of(m, 1, 8), -1) end, "weight is -1")
  t.fails(function() step(3) end, "expected a loss, got a number")
end)

t.done()
