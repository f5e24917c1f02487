-- Checkpoints under DistributedDataParallel: the same bits as without, each parameter reduced once though it is used in
-- two checkpoints and outside, dropout drawn by rank, and with small buckets that go out while backward runs.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end

local function train(wrap)
  ddp.manual_seed(5)
  local first, shared, last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
  local norm = nn.BatchNorm1d(16)
  local model = nn.Sequential(first, shared, norm, last)
  local net = ddp.DistributedDataParallel(model, { bucket_mb = 1e-4 })
  local opt = ddp.optim.SGD(net:parameters(), { lr = .05, momentum = .9 })
  local block = function(x) return F.dropout(norm(shared(x)):tanh(), .25) end
  local x = ddp.randn(12, 8) * (r + 1)
  local y = ddp.randint(0, 3, { 12 })
  local gradients
  for step = 1, 4 do
    local function backward()
      local h = wrap(function(v) return wrap(block, first(v)) end, x)
      h = wrap(block, h) + shared(h)
      F.cross_entropy(last(h), y):backward()
    end
    opt:zero_grad()
    if step == 3 then net:no_sync(backward) end
    backward()
    gradients = {}
    for name, p in model:named_parameters() do gradients[#gradients + 1] = { name, p.grad:tolist() } end
    opt:step()
  end
  ddp.check(model)
  local values = {}
  for name, p in model:named_parameters() do values[#values + 1] = { name, p:tolist() } end
  return { gradients, values, ddp.rand(2):tolist() }
end

local function same(a, b)
  if type(a) ~= "table" then return a == b end
  if #a ~= #b then return false end
  for i = 1, #a do if not same(a[i], b[i]) then return false end end
  return true
end
local plain, recomputed = train(function(fn, ...) return fn(...) end), train(ddp.checkpoint)
expect(same(plain, plain), "NaN")
for i = 1, #plain[1] do expect(same(plain[1][i], recomputed[1][i]), "gradients differ: " .. plain[1][i][1]) end
expect(same(plain, recomputed), "parameters or draws differ")
for _, theirs in ipairs(ddp.all_gather_object(recomputed[1])) do expect(same(theirs, recomputed[1]), "ranks hold other gradients") end
ddp.finish()
if r == w - 1 then print "fine" end
