-- The stepper on two ranks against a serial run of the same samples (P1, P2, C6).
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r = ddp.rank()
local function expect(cond, what) if not cond then error(what, 0) end end

local function net()
  ddp.manual_seed(1)
  return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
end
ddp.manual_seed(42)
local X, Y = ddp.randn(27, 6), ddp.randint(0, 3, { 27 })
local function loss_of(m, first, n) return F.cross_entropy(m(X:narrow(1, first, n)), Y:narrow(1, first, n)) end

local function difference(a, b)
  local worst, pb = 0, b:parameters()
  for i, p in ipairs(a:parameters()) do
    local d = ddp.no_grad(function() return ((p - pb[i]):abs():max() / pb[i]:abs():max()):item() end)
    if not (d <= worst) then worst = d end
  end
  return worst
end

-- batches[rank + 1]: {first, n} of each micro-batch, n 0 where the rank has none; nil: all 27 in one process.
local function train(batches, opts, reduce)
  local m = net()
  local wrapped = batches and ddp.DistributedDataParallel(m, { reduce = reduce }) or m
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0.5, momentum = 0.9 })
  local scaler = opts.scaled and ddp.amp.GradScaler { init_scale = 512 } or nil
  local step = ddp.stepper { model = wrapped, optimizer = opt, accumulate = opts.accumulate, clip = opts.clip, scaler = scaler }
  for _ = 1, 3 do
    local applied
    for _, b in ipairs(batches and batches[r + 1] or { { 1, opts.rows or 27 } }) do
      if b[2] == 0 then applied = step:skip() else applied = step(loss_of(wrapped, b[1], b[2]), b[2]) end
    end
    expect(step:flush() or applied, "the window's end did not step")
  end
  return m
end

local full, clipped = train(nil, {}), train(nil, { clip = 0.1 })
local function equals(what, want, ...)
  local m = train(...)
  local d = difference(m, want)
  expect(d <= 1e-6, ("%s: differs from the serial run by %g"):format(what, d))
  expect(ddp.check(m), what)
end
local uneven = { { { 1, 8 }, { 9, 8 } }, { { 17, 8 }, { 25, 3 } } }
local sizes = { { { 1, 12 }, { 13, 4 } }, { { 17, 1 }, { 18, 10 } } }
local counts = { { { 1, 5 }, { 6, 5 }, { 11, 5 } }, { { 16, 12 } } }
local skips = { { { 1, 20 }, { 0, 0 } }, { { 0, 0 }, { 21, 7 } } }
equals("P2 8, 8 and 8, 3", full, uneven, { accumulate = 2 })
equals("P2 8, 8 and 8, 3, weighted", full, uneven, { accumulate = 2 }, "weighted")
equals("P2 equal weights", train(nil, { rows = 16 }), { { { 1, 4 }, { 5, 4 } }, { { 9, 4 }, { 13, 4 } } }, { accumulate = 2 })
equals("P2 8, 8 and 8, 3, a short window", full, uneven, { accumulate = 5 })
equals("P2 12, 4 and 1, 10", full, sizes, { accumulate = 2 })
equals("P2 three micro-batches beside one", full, counts, { accumulate = 4 })
equals("C6 skipped micro-batches", full, skips, { accumulate = 2 })
equals("C6 skipped micro-batches, a short window", full, skips, { accumulate = 3 })
equals("C6 a rank without a window", train(nil, { rows = 20 }), { { { 1, 8 }, { 9, 12 } }, { { 0, 0 }, { 0, 0 } } }, { accumulate = 2, scaled = true })
equals("P1 P2 with scaler and clipping", clipped, uneven, { accumulate = 2, scaled = true, clip = 0.1 })

-- A "sum" is the sum of the ranks' means, whatever the weights.
do
  local m = net()
  local opt = ddp.optim.SGD(m:parameters(), { lr = 0.5, momentum = 0.9 })
  for _ = 1, 3 do
    opt:zero_grad();
    (loss_of(m, 1, 16) + loss_of(m, 17, 11)):backward()
    opt:step()
  end
  equals("P2 a sum over the ranks", m, uneven, { accumulate = 2 }, "sum")
end

-- P2: one reduction a window: inside it the ranks' gradients stay apart.
do
  local m = net()
  local wrapped = ddp.DistributedDataParallel(m)
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0 })
  local step = ddp.stepper { model = wrapped, optimizer = opt, accumulate = 2 }
  local function same()
    local all = ddp.all_gather_object(m[1].weight.grad:norm():item())
    return all[1] == all[2]
  end
  step(loss_of(wrapped, 1 + 8 * r, 8))
  expect(not same(), "gradients were reduced inside a window")
  step(loss_of(wrapped, 1 + 8 * r, 8))
  expect(same(), "gradients were not reduced at the window's end")
end

-- P1 P3: gradients in buckets are unscaled and clipped after the step, for a handle of an earlier step and for a first look.
do
  local function two_steps(m, model, first, n)
    local opt, scaler = ddp.optim.SGD(m:parameters(), { lr = 0.5 }), ddp.amp.GradScaler { init_scale = 3000 }
    local step, held, seen = ddp.stepper { model = model, optimizer = opt, clip = 0.1, scaler = scaler }, nil, nil
    for _ = 1, 2 do
      step(loss_of(model, first, n), n)
      seen = held and held:clone() -- before anything asks the parameter again
      held = held or m[1].weight.grad
    end
    return seen, m[1].weight.grad, m[3].weight.grad
  end
  local serial, a = net(), net()
  local _, first, last = two_steps(serial, serial, 1, 27)
  local b = { two_steps(a, ddp.DistributedDataParallel(a), r == 0 and 1 or 17, r == 0 and 16 or 11) }
  for i, want in ipairs { first, first, last } do
    expect(b[i]:allclose(want, { rtol = 0, atol = 1e-6 }), "a gradient differs from the serial run's")
  end
end

-- P1: an infinity on one rank alone, without a wrapped model, is skipped by both; so is one inside a wrapped model.
for _, wrap in ipairs { false, true } do
  local m = net()
  local model = wrap and ddp.DistributedDataParallel(m) or m
  local opt, scaler = ddp.optim.SGD(m:parameters(), { lr = 1 }), ddp.amp.GradScaler { init_scale = 64 }
  local s = ddp.optim.schedule.linear { optimizer = opt, steps = 4 }
  local step = ddp.stepper { model = model, optimizer = opt, scaler = scaler, schedule = s }
  local before = m[1].weight:clone()
  local applied, info = step(loss_of(model, 1, 8) * (r == 1 and math.huge or 1))
  expect(not applied and info.skipped, "found_inf was not decided by all ranks")
  expect(m[1].weight:equal(before) and scaler:get_scale() == 32 and s:get_last_lr()[1] == 1, "a skipped step left traces")
  expect(step(loss_of(model, 1, 8)) and s:get_last_lr()[1] == 0.75, "the next step was not applied")
end

ddp.finish()
if r == 0 then print "fine" end
