-- What a step uses and what it leaves out (C6, C7), options that are not needed, parameters that are frozen for a while, and
-- steps of several forwards, backwards and models; on any number of ranks, against one process.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function close(a, b, what)
  local d = ddp.no_grad(function() return ((a - b):abs():max() / (b:abs():max() + 1e-12)):item() end)
  expect(d <= 1e-6, ("%s: differs by %g"):format(what, d))
end
local function mlp(seed)
  ddp.manual_seed(seed)
  return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
end
ddp.manual_seed(9)
local X, Y = ddp.randn(8 * w, 6), ddp.randint(0, 3, { 8 * w })
local x, y = X:narrow(1, 8 * r + 1, 8), Y:narrow(1, 8 * r + 1, 8)
local function sgd(m) return ddp.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9, weight_decay = 0.1 }) end
local function same_model(a, b, what)
  local pb = b:parameters()
  for i, p in ipairs(a:parameters()) do close(p, pb[i], what) end
  ddp.check(a)
end

-- C6: ranks skip by turns; the mean is over the others. A step that all skip moves nothing.
do
  local m, s = mlp(1), mlp(1)
  local net = ddp.DistributedDataParallel(m)
  local opt, serial = sgd(net), sgd(s)
  for t = 1, 6 do
    local function skips(rank) return t == 4 or (w > 1 and (t + rank) % w == 0) end
    opt:zero_grad()
    if skips(r) then net:skip() else F.cross_entropy(net(x), y):backward() end
    if t == 4 and w > 1 then expect(m:parameters()[1].grad == nil, "C6: a gradient though all skipped") end
    opt:step()
    serial:zero_grad()
    local n = 0
    for rank = 0, w - 1 do if not skips(rank) then n = n + 1 end end
    for rank = 0, w - 1 do
      if not skips(rank) then (F.cross_entropy(s(X:narrow(1, 8 * rank + 1, 8)), Y:narrow(1, 8 * rank + 1, 8)) / n):backward() end
    end
    serial:step()
  end
  same_model(m, s, "C6 skipping by turns")
end

local kept -- as a script keeps its model until it is finished
-- C7: a parameter that no rank used in a step is moved neither by weight decay nor by momentum, in that step alone.
do
  local Fork = nn.Module "Fork"
  function Fork:init() self.a, self.b, self.c = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3) end
  function Fork:forward(v, with_b) return with_b and self.a(v) + self.b(v) or self.a(v) end
  ddp.manual_seed(4)
  local m = Fork()
  ddp.manual_seed(4)
  local s = Fork()
  local net = ddp.DistributedDataParallel(m, { bucket_mb = 1e-4 })
  kept = net
  for _, make in ipairs { sgd, function(v) return ddp.optim.AdamW(v:parameters(), { lr = 0.01, weight_decay = 0.1 }) end } do
    local opt, serial = make(net), make(s)
    for t = 1, 4 do
      opt:zero_grad()
      F.cross_entropy(net(x, t % 2 == 1 and r == 0), y):backward()
      local before = m.b.weight:clone()
      opt:step()
      expect((t % 2 == 0) == m.b.weight:equal(before), "C7: b moved in a step that did not use it, or not in one that did")
      serial:zero_grad()
      for rank = 0, w - 1 do
        (F.cross_entropy(s(X:narrow(1, 8 * rank + 1, 8), t % 2 == 1 and rank == 0), Y:narrow(1, 8 * rank + 1, 8)) / w):backward()
      end
      serial:step()
    end
    same_model(m, s, "C7 a branch that some steps use")
  end
  expect(m.c.weight.grad == nil, "C7: a gradient that no rank made")
end

-- Several forwards before one backward, several backwards before a step, and both models in one backward: with small buckets,
-- and on odd ranks a graph in which the gradients come in another order.
do
  local function models() return mlp(1), mlp(2) end
  local function step(a, b, v, z, odd, share)
    local one, two
    if odd then two = b(v) one = a(v) else one = a(v) two = b(v) end
    local out = odd and two + one or one + two
    local loss = F.cross_entropy(out + a(v * 0.5), z) * share
    loss:backward()
    local again = F.cross_entropy(b(v * 2), z) * share
    again:backward();
    (F.cross_entropy(a(v), z) * share):backward()
  end
  local a, b = models()
  local da, db = ddp.DistributedDataParallel(a, { bucket_mb = 1e-4 }), ddp.DistributedDataParallel(b, { bucket_mb = 1e-4 })
  local oa, ob = sgd(da), sgd(db)
  local sa, sb = models()
  local pa, pb = sgd(sa), sgd(sb)
  for _ = 1, 4 do
    for _, o in ipairs { oa, ob, pa, pb } do o:zero_grad() end
    step(da, db, x, y, r % 2 == 1, 1)
    for rank = 0, w - 1 do step(sa, sb, X:narrow(1, 8 * rank + 1, 8), Y:narrow(1, 8 * rank + 1, 8), false, 1 / w) end
    for _, o in ipairs { oa, ob, pa, pb } do o:step() end
  end
  same_model(a, sa, "several backwards, the first model")
  same_model(b, sb, "several backwards, the second model")
end

-- A sum that is added to again counts each rank once.
do
  local m = mlp(3)
  local net = ddp.DistributedDataParallel(m, { reduce = "sum" })
  F.cross_entropy(net(x), y):backward()
  local once = m[1].weight.grad:clone()
  net:reduce_gradients()
  close(m[1].weight.grad, once, "reduce_gradients of a sum that is one")
  F.cross_entropy(net(x), y):backward()
  close(m[1].weight.grad, once * 2, "a second backward adds to a sum")
end

-- Frozen and unfrozen between steps, on all ranks alike.
do
  local m, s = mlp(5), mlp(5)
  m[3]:requires_grad_(false)
  s[3]:requires_grad_(false)
  local net = ddp.DistributedDataParallel(m)
  local opt, serial = sgd(m), sgd(s)
  for t = 1, 6 do
    for _, model in ipairs { m, s } do
      model[3]:requires_grad_(t > 2)
      model[1]:requires_grad_(t < 5)
    end
    local before = { m[1].weight:clone(), m[3].weight:clone() }
    opt:zero_grad()
    F.cross_entropy(net(x), y):backward()
    opt:step()
    serial:zero_grad()
    for rank = 0, w - 1 do (F.cross_entropy(s(X:narrow(1, 8 * rank + 1, 8)), Y:narrow(1, 8 * rank + 1, 8)) / w):backward() end
    serial:step()
    expect((t < 5) ~= m[1].weight:equal(before[1]) and (t > 2) ~= m[3].weight:equal(before[2]), "a frozen parameter moved, or a free one did not")
  end
  same_model(m, s, "frozen for a while")
end

-- PyTorch's options are taken; what is wrong is named.
ddp.DistributedDataParallel(mlp(6), { find_unused_parameters = true, static_graph = true, gradient_as_bucket_view = true, broadcast_buffers = false })
ddp.DistributedDataParallel(mlp(6), { find_unused_parameters = true })
local function fails(opts, text)
  local ok, err = pcall(ddp.DistributedDataParallel, mlp(6), opts)
  expect(not ok and tostring(err):find(text, 1, true), ("expected \"%s\", got %s"):format(text, tostring(err)))
end
fails({ compression = "powersgd" }, 'compression "powersgd" is not built; expected none, bf16 or f16')
fails({ compression = "topk" }, 'compression "topk" is not built')
fails({ find_unused_parameter = true }, 'did you mean "find_unused_parameters"')
ddp.finish()
if r == 0 and kept then print "fine" end
