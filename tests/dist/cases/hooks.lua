-- Communication hooks and compression, on any number of ranks.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function mlp(seed)
  ddp.manual_seed(seed)
  return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
end
ddp.manual_seed(9)
local X, Y = ddp.randn(8 * w, 6), ddp.randint(0, 3, { 8 * w })
local x, y = X:narrow(1, 8 * r + 1, 8), Y:narrow(1, 8 * r + 1, 8)
local function distance(a, b)
  local worst, pb = 0, b:parameters()
  for i, p in ipairs(a:parameters()) do
    local d = ddp.no_grad(function() return ((p - pb[i]):abs():max() / pb[i]:abs():max()):item() end)
    if not (d <= worst) then worst = d end
  end
  return worst
end
-- `step(net, opt, t)` in place of a plain step, where given.
local function train(opts, hook, step, samples)
  local m = mlp(1)
  opts.bucket_mb = 0.004
  local net = ddp.DistributedDataParallel(m, opts)
  if hook then net:register_comm_hook(hook) end
  local opt = ddp.optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
  if samples then
    local loader = ddp.data.DataLoader(ddp.data.tensors(x:narrow(1, 1, samples):clone(), y:narrow(1, 1, samples):clone()), { batch_size = 2 })
    for _ = 1, 2 do
      for u, v in loader:iter() do
        opt:zero_grad()
        F.cross_entropy(net(u), v):backward()
        opt:step()
      end
    end
  else
    for t = 1, 5 do
      opt:zero_grad()
      if step then step(net, t) else F.cross_entropy(net(x), y):backward() end
      opt:step()
    end
  end
  expect(ddp.check(m), "ranks differ")
  return m
end
local plain = train {}

-- The same bits with a hook that does what the reducer does, whether it waits or hands its handle on.
local seen
local function sync(bucket)
  seen[#seen + 1] = bucket
  ddp.all_reduce(bucket.tensor, "mean")
end
local function async(bucket) return ddp.all_reduce(bucket.tensor, "mean", { async = true, name = bucket.name }) end
seen = {}
local m = train({}, sync)
expect(distance(m, plain) == 0, "a hook that averages gives other bits")
if w == 1 then expect(#seen == 0, "a hook ran in a world of one")
else
  local n = #seen / 5
  expect(n > 1 and n % 1 == 0, "expected each bucket once a step")
  local total = 0
  for k = 1, n do
    local b = seen[k]
    expect(b.index == k and b.name == "bucket " .. k - 1 and b.is_last == (k == n) and b.tensor:dim() == 1 and b.tensor:dtype() == "f32", "a bucket says something else")
    expect(seen[n + k].index == k, "the order of the buckets changed")
    total = total + b.tensor:numel()
  end
  expect(total >= m:num_parameters(), "the buckets do not hold all gradients")
end
expect(distance(train({}, async), plain) == 0, "asynchronous hooks give other bits")

-- A hook of its own arithmetic: the sum, then a tenth of it; a handle of its own is waited for.
if w > 1 then
  local got = mlp(1)
  local net = ddp.DistributedDataParallel(got)
  net:register_comm_hook(function(bucket)
    local h = ddp.all_reduce(bucket.tensor, "sum", { async = true })
    return { wait = function()
      h:wait()
      bucket.tensor:mul_(0.1)
    end }
  end)
  F.cross_entropy(net(x), y):backward()
  local s = mlp(1)
  for rank = 0, w - 1 do (F.cross_entropy(s(X:narrow(1, 8 * rank + 1, 8)), Y:narrow(1, 8 * rank + 1, 8)) * 0.1):backward() end
  expect(got[1].weight.grad:allclose(s[1].weight.grad, { rtol = 1e-5, atol = 1e-7 }), "the hook's own arithmetic is lost")
  local ok, err = pcall(net.register_comm_hook, net, sync)
  expect(not ok and tostring(err):find "has one already", "a second hook")
end

-- no_sync, reduce_gradients and skip go through the hook too.
local function windows(net, t)
  if t == 3 then
    net:no_sync(function() F.cross_entropy(net(x), y):backward() end)
    return net:reduce_gradients()
  end
  if t == 4 then return net:skip() end
  F.cross_entropy(net(x), y):backward()
end
local function without(net, t)
  if t == 4 then return net:skip() end
  F.cross_entropy(net(x), y):backward()
end
expect(distance(train({}, async, windows), train({}, nil, without)) == 0, "no_sync, reduce_gradients or skip with a hook")

-- C5 with a hook: a rank that has ended answers with zeros; a sum makes that exact.
local function sum(bucket) return ddp.all_reduce(bucket.tensor, "sum", { async = true }) end
local samples = r == 0 and 8 or 4
expect(distance(train({ reduce = "sum" }, sum, nil, samples), train({ reduce = "sum" }, nil, nil, samples)) == 0, "C5 with a hook gives other bits")

-- Compression: near the plain run, the same on all ranks, and not the plain run's bits; means, sums, weights, uneven data.
for _, case in ipairs { { "bf16", 0.02 }, { "f16", 2e-3 } } do
  local kind, tol = case[1], case[2]
  local d = distance(train { compression = kind }, plain)
  if w == 1 then expect(d == 0, "compression in a world of one changed something")
  else expect(d > 0 and d <= tol, ("%s: differs from the plain run by %g"):format(kind, d)) end
  d = distance(train { compression = kind, reduce = "sum" }, train { reduce = "sum" })
  expect(d <= 2 * tol, ("%s, a sum: differs by %g"):format(kind, d))
  d = distance(train({ compression = kind }, nil, nil, samples), train({}, nil, nil, samples))
  expect(d <= tol, ("%s, C5: differs by %g"):format(kind, d))
  if w > 1 then
    local net = ddp.DistributedDataParallel(mlp(2), { compression = kind })
    F.cross_entropy(net(x), y):backward()
    local g = net.module[1].weight.grad
    expect(g:to(kind):float():equal(g), kind .. ": the gradient is no number of 16 bits")
    local ok, err = pcall(net.register_comm_hook, net, sync)
    expect(not ok and tostring(err):find "besides compression", "a hook besides compression")
  end
end
-- With error feedback the mean over steps of the same gradient nears the true one (but for rounding the result); without, each step rounds alike.
if w > 1 then
  local function off(opts)
    local net, exact = ddp.DistributedDataParallel(mlp(2), opts), ddp.DistributedDataParallel(mlp(2))
    F.cross_entropy(exact(x), y):backward()
    local total = ddp.zeros(40, 6)
    for _ = 1, 32 do
      net:zero_grad()
      F.cross_entropy(net(x), y):backward()
      total:add_(net.module[1].weight.grad)
    end
    local true_one = exact.module[1].weight.grad
    return ((total / 32 - true_one):abs():sum() / true_one:abs():sum()):item()
  end
  local fed, plainly = off { compression = "bf16", error_feedback = true }, off { compression = "bf16" }
  expect(fed < plainly * 0.6, ("error feedback: %g off with it, %g without"):format(fed, plainly))
  local d = distance(train({ compression = "bf16", error_feedback = true }, nil, nil, samples), train({}, nil, nil, samples))
  expect(d <= 0.02, ("error feedback, C5: differs by %g"):format(d))
  local ok, err = pcall(ddp.DistributedDataParallel, mlp(2), { error_feedback = true })
  expect(not ok and tostring(err):find "comes with a compression", "error feedback of nothing")
end
ddp.finish()
if r == 0 then print "fine" end
