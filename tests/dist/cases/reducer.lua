-- Data-parallel training against a serial run of the same samples (C12, P2, P3, C7, C8's agreement).
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end

local function net(seed)
  ddp.manual_seed(seed)
  return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
end
ddp.manual_seed(42)
local X, Y = ddp.randn(16, 6), ddp.randint(0, 3, { 16 })

-- The largest difference of parameters between two models, over the largest value.
local function difference(a, b)
  local worst = 0
  local pb = b:parameters()
  for i, p in ipairs(a:parameters()) do
    local d = ddp.no_grad(function() return ((p - pb[i]):abs():max() / pb[i]:abs():max()):item() end)
    if not (d <= worst) then worst = d end
  end
  return worst
end

-- Trains `steps` steps; cut(rank) gives this rank's rows; a serial run takes all 16.
local function train(model, rows, opts, weight, scale)
  local wrapped = rows and ddp.DistributedDataParallel(model, opts) or model
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0.1, momentum = 0.9 })
  local x, y = X, Y
  if rows then x, y = X:narrow(1, rows[1], rows[2]), Y:narrow(1, rows[1], rows[2]) end
  for _ = 1, 5 do
    local loss = F.cross_entropy(wrapped(x), y)
    if scale then loss = loss * scale end
    opt:zero_grad()
    loss:backward(nil, { weight = weight })
    opt:step()
  end
  return model
end

local serial = train(net(1))
local half = 16 / w
local d = difference(train(net(1 + r), { r * half + 1, half }), serial)
expect(d <= 1e-6, "mean: ranks of equal batches differ from the serial run by " .. d)
d = difference(train(net(1), { r * half + 1, half }, { reduce = "sum" }, nil, 1 / w), serial)
expect(d <= 1e-6, "sum: differs by " .. d)
d = difference(train(net(1), { r * half + 1, half }, { bucket_mb = 0.0001 }), serial)
expect(d <= 1e-6, "many small buckets: differs by " .. d)
if w == 2 then
  local rows = r == 0 and { 1, 12 } or { 13, 4 }
  d = difference(train(net(1), rows, { reduce = "weighted" }, rows[2]), serial)
  expect(d <= 1e-6, "weighted 12/4: differs by " .. d)
end
expect(ddp.check(serial), "check")

-- P3: gradients are views into buckets, at the same addresses from the second step on; no_sync adds up.
local model = net(1)
local wrapped = ddp.DistributedDataParallel(model)
local function backward(rows)
  F.cross_entropy(wrapped(X:narrow(1, rows[1], rows[2])), Y:narrow(1, rows[1], rows[2])):backward()
end
local p = model:parameters()[1]
backward { r * half + 1, half }
local first = tostring(require("ffi").cast("void *", require("ddp.ffi").C.ddp_data(p.grad)))
p.grad = nil
model:zero_grad()
backward { r * half + 1, half }
expect(w == 1 or first == tostring(require("ffi").cast("void *", require("ddp.ffi").C.ddp_data(p.grad))), "the gradient moved")
local whole = p.grad:clone()
model:zero_grad()
local q = half / 2
wrapped:no_sync(function() backward { r * half + 1, q } end)
backward { r * half + q + 1, q }
expect(((p.grad * 0.5 - whole):abs():max() / whole:abs():max()):item() < 1e-5, "no_sync and a backward add up to the whole")
model:zero_grad()
wrapped:no_sync(function() backward { r * half + 1, half } end)
wrapped:reduce_gradients()
expect(((p.grad - whole):abs():max() / whole:abs():max()):item() < 1e-5, "reduce_gradients reduces what no_sync left")

-- C7: a parameter that no rank used has no gradient and does not move; one that a single rank used moves on all.
local Two = nn.Module "Two"
function Two:init()
  self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
end
function Two:forward(x, use_b) return use_b and self.a(x) + self.b(x) or self.a(x) end
ddp.manual_seed(5)
local two = Two()
local dtwo = ddp.DistributedDataParallel(two)
local opt = ddp.optim.SGD(dtwo:parameters(), { lr = 0.1, momentum = 0.9, weight_decay = 0.1 })
local c_before = two.c.weight:clone()
for _ = 1, 3 do
  opt:zero_grad()
  dtwo(ddp.ones(1, 2), r == 0):sum():backward()
  opt:step()
end
expect(two.c.weight.grad == nil and two.c.weight:equal(c_before), "an unused parameter moved")
expect(two.b.weight.grad ~= nil, "a parameter that one rank used has a gradient on all")
expect(ddp.check(two), "ranks agree after uneven use")

-- C6: a rank that skips joins with weight 0.
if w == 2 then
  local m = net(1)
  local n = ddp.DistributedDataParallel(m)
  if r == 0 then F.cross_entropy(n(X), Y):backward() else n:skip() end
  local alone = net(1)
  F.cross_entropy(alone(X), Y):backward()
  local g, want = m:parameters()[1].grad, alone:parameters()[1].grad
  expect(((g - want):abs():max() / want:abs():max()):item() < 1e-6, "a skipped rank changes the mean")
end

-- Running statistics are averaged before evaluation.
local bn = nn.Sequential(nn.BatchNorm2d(2))
local dbn = ddp.DistributedDataParallel(bn)
dbn(ddp.full({ 4, 2, 3, 3 }, r * 2) + ddp.rand(4, 2, 3, 3))
dbn:eval()
expect(#ddp.all_gather_object(bn[1].running_mean[1]:item()) == w)
local means = ddp.all_gather_object(bn[1].running_mean[1]:item())
for _, v in ipairs(means) do expect(v == means[1], "running means differ after eval") end
ddp.finish()
if r == 0 then print "fine" end
