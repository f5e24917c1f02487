-- Uneven data (C5): ranks whose loops end at different steps, against one process that takes the same samples.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local C = require("ddp.ffi").C
local function now() return C.ddp_now() end
local function expect(cond, what) if not cond then error(what, 0) end end

local function mlp(seed)
  ddp.manual_seed(seed or 1)
  return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
end
local SIZE = 4
ddp.manual_seed(42)
local X, Y = ddp.randn(400, 6), ddp.randint(0, 3, { 400 })

-- The rows of rank's samples: 100 apart; and their loader, in the order of the rows.
local function rows(rank, n) return X:narrow(1, 100 * rank + 1, n), Y:narrow(1, 100 * rank + 1, n) end
local function loader_of(n, opts)
  opts = opts or {}
  opts.batch_size = SIZE
  local x, y = rows(r, math.max(n, 1))
  local set = ddp.data.tensors(x:clone(), y:clone())
  if n == 0 then set = ddp.data.subset(set, {}) end
  return ddp.data.DataLoader(set, opts)
end

local function difference(a, b)
  local worst, pb = 0, b:parameters()
  for i, p in ipairs(a:parameters()) do
    local d = ddp.no_grad(function() return ((p - pb[i]):abs():max() / pb[i]:abs():max()):item() end)
    if not (d <= worst) then worst = d end
  end
  return worst
end

-- Every bit that the next epoch depends on, equal on all ranks.
local function same_everywhere(what, model, opt)
  ddp.check(model)
  local mine = {}
  local function add(name, t) mine[#mine + 1] = name .. table.concat(t:contiguous():view(-1):tolist(), " ") end
  for name, p in model:named_parameters() do add(name, p) end
  local state = opt:state_dict()
  for i = 1, #opt.param_groups[1].params do
    for k, v in ddp.sorted(state.state[i] or {}) do
      if type(v) == "number" then mine[#mine + 1] = k .. v else add(k, v) end
    end
  end
  mine[#mine + 1] = "lr " .. opt.param_groups[1].lr
  for rank, theirs in ipairs(ddp.all_gather_object(mine)) do
    expect(#theirs == #mine, what .. ": other state on rank " .. rank - 1)
    for i, text in ipairs(theirs) do expect(text == mine[i], ("%s: rank %d has other bits of %s"):format(what, rank - 1, text:sub(1, 20))) end
  end
end

local OPTIMIZERS = {
  sgd = function(p) return ddp.optim.SGD(p, { lr = 0.1, momentum = 0.9, weight_decay = 0.01 }) end,
  adam = function(p) return ddp.optim.Adam(p, { lr = 0.01 }) end,
}

-- The same in one process: step t takes the t-th batch of each rank that has one; their mean, sum or weighted mean.
local function serial(samples, opts)
  local m = mlp()
  local opt = OPTIMIZERS[opts.optimizer or "sgd"](m:parameters())
  for _ = 1, opts.epochs or 1 do
    for t = 1, 100 do
      local losses, total = {}, 0
      for rank = 0, w - 1 do
        local left = math.min(SIZE, samples[rank + 1] - (t - 1) * SIZE)
        if left > 0 then
          local x, y = rows(rank, samples[rank + 1])
          local weight = opts.reduce == "weighted" and left or 1
          losses[#losses + 1] = F.cross_entropy(m(x:narrow(1, (t - 1) * SIZE + 1, left)), y:narrow(1, (t - 1) * SIZE + 1, left)) * weight
          total = total + weight
        end
      end
      if #losses == 0 then break end
      local loss = losses[1]
      for i = 2, #losses do loss = loss + losses[i] end
      if opts.reduce ~= "sum" then loss = loss / total end
      opt:zero_grad()
      loss:backward()
      opt:step()
    end
  end
  return m
end

local function train(samples, opts)
  local m = mlp(1 + r)
  local net = ddp.DistributedDataParallel(m, { reduce = opts.reduce, bucket_mb = opts.bucket_mb })
  local opt = OPTIMIZERS[opts.optimizer or "sgd"](net:parameters())
  local loader = loader_of(samples[r + 1], opts.loader)
  for _ = 1, opts.epochs or 1 do
    for x, y in loader:iter() do
      opt:zero_grad()
      F.cross_entropy(net(x), y):backward(nil, { weight = opts.reduce == "weighted" and x:size(1) or nil })
      opt:step()
    end
    same_everywhere(opts.name, m, opt)
  end
  return m
end

local function case(name, samples, opts)
  opts.name = name
  while #samples < w do samples[#samples + 1] = samples[#samples % 2 + 1] + 1 end
  local d = difference(train(samples, opts), serial(samples, opts))
  expect(d <= 1e-6, ("%s: differs from the serial run by %g"):format(name, d))
end

-- uneven.lua slow: steps that together take longer than the timeout, each of them less. metric: another collective inside.
if arg[1] then
  local net = ddp.DistributedDataParallel(mlp())
  for x, y in loader_of(r == 0 and 20 or 8):iter() do
    F.cross_entropy(net(x), y):backward()
    if arg[1] == "slow" then os.execute "sleep 0.5" else ddp.all_reduce(ddp.ones(1), "sum", { name = "metric" }) end
  end
  ddp.finish()
  if r == 0 then print "fine" end
  return
end

-- 5 batches beside 3, and so on over two epochs.
case("C5 5 batches and 3", { 20, 12 }, { epochs = 2 })
case("C5 5 batches and 3, Adam", { 20, 12 }, { epochs = 3, optimizer = "adam" })
case("C5 3 batches and 5", { 12, 20 }, { epochs = 2 })
case("C5 last batches of other sizes, weighted", { 19, 10 }, { epochs = 2, reduce = "weighted" })
case("C5 a sum", { 20, 9 }, { epochs = 2, reduce = "sum" })
case("C5 many small buckets", { 20, 12 }, { epochs = 2, bucket_mb = 1e-4 })
case("C5 equal numbers of batches", { 12, 12 }, { epochs = 2 })
case("C5 a rank without a batch", { 20, 0 }, { epochs = 2 })
case("C5 rank 0 without a batch", { 0, 9 }, { epochs = 2, optimizer = "adam" })
case("C5 loaders that can't know their last batch", { 20, 12 }, { epochs = 2, loader = { on_error = "skip" } })
case("C5 they end at once", { 12, 12 }, { epochs = 2, loader = { on_error = "skip" } })
case("C5 workers", { 20, 12 }, { epochs = 2, loader = { workers = 2 } })

-- A loop that all end at once exchanges nothing more: no rank waits for another. Where they can't know, gradients stay.
do
  local net = ddp.DistributedDataParallel(mlp())
  local batch, begin = 0, 0
  for x, y in loader_of(8):iter() do
    net:zero_grad()
    F.cross_entropy(net(x), y):backward()
    batch = batch + 1
    if batch == 2 and r == 1 then os.execute "sleep 1.5" end
    begin = now()
  end
  expect(now() - begin < 1, "a rank waited at the end of the loop")
  local g = net:parameters()[1].grad
  expect(g and g:norm():item() > 0, "the last gradient is gone")
  local skipping = loader_of(8, { on_error = "skip" })
  for x, y in skipping:iter() do
    net:zero_grad()
    F.cross_entropy(net(x), y):backward()
  end
  expect(net:parameters()[1].grad:equal(g), "answering changed the last gradient")
end

-- Windows made by hand with no_sync: what the last one left is still there after the loop, for reduce_gradients.
do
  local m, s = mlp(), mlp()
  local net = ddp.DistributedDataParallel(m)
  local opt, alone, n = OPTIMIZERS.sgd(net:parameters()), OPTIMIZERS.sgd(s:parameters()), 0
  local function accumulate(u, v) (F.cross_entropy(net(u), v) / 2):backward() end
  for x, y in loader_of(20):iter() do
    if n % 2 == 0 then
      opt:zero_grad()
      net:no_sync(accumulate, x, y)
    else
      accumulate(x, y)
      opt:step()
    end
    n = n + 1
  end
  net:reduce_gradients()
  opt:step()
  for first = 1, 5, 2 do
    alone:zero_grad()
    for rank = 0, w - 1 do
      local x, y = rows(rank, 20)
      for t = first, math.min(first + 1, 5) do
        (F.cross_entropy(s(x:narrow(1, (t - 1) * SIZE + 1, SIZE)), y:narrow(1, (t - 1) * SIZE + 1, SIZE)) / (2 * w)):backward()
      end
    end
    alone:step()
  end
  local d = difference(m, s)
  expect(d <= 1e-6, "C5 windows by hand: differ by " .. d)
end

-- Evaluation and a loop left by break do not join.
do
  local net = ddp.DistributedDataParallel(mlp())
  for _ = 1, 2 do
    for x, y in loader_of(8 + 4 * r):iter() do -- luacheck: ignore 512
      F.cross_entropy(net(x), y):backward()
      break
    end
    net:eval()
    local n = 0
    ddp.no_grad(function() for x in loader_of(8 * r):iter() do n = n + net(x):size(1) end end)
    net:train()
    expect(ddp.reduce_metrics { n = { n, 1 } }.n == 4 * (w - 1), "evaluation saw other samples")
  end
end

-- Running statistics and a schedule are taken over; a skipped step before the end confuses nobody.
do
  ddp.manual_seed(3)
  local m = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
  local net = ddp.DistributedDataParallel(m)
  local opt = ddp.optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
  local schedule = ddp.optim.schedule.linear { optimizer = opt, steps = 40 }
  local steps = r == 0 and 6 or 3
  for _ = 1, 2 do
    local t = 0
    for x, y in loader_of(SIZE * steps):iter() do
      t = t + 1
      opt:zero_grad()
      if t == 2 and r == w - 1 then net:skip() else F.cross_entropy(net(x), y):backward() end
      opt:step()
      schedule:step()
    end
    same_everywhere("C5 with a schedule", m, opt)
  end
  expect(math.abs(schedule:get_last_lr()[1] - 0.1 * (1 - 12 / 40)) < 1e-12, "the schedule missed steps")
  local mean = ddp.all_gather_object(m[2].running_mean:tolist())
  for rank = 2, w do
    if rank > 2 then break end
    for i, v in ipairs(mean[rank]) do expect(v == mean[1][i], "running statistics of the rank that missed steps") end
  end
end

-- Two wrapped models: each with its own backward (as in a GAN), and both in one.
for _, together in ipairs { false, true } do
  local what = together and "C5 two models in one backward" or "C5 two models in turn"
  local a, b = mlp(1), mlp(2)
  local da, db = ddp.DistributedDataParallel(a), ddp.DistributedDataParallel(b, { bucket_mb = 1e-4 })
  local oa, ob = ddp.optim.SGD(da:parameters(), { lr = 0.1, momentum = 0.9 }), ddp.optim.Adam(db:parameters(), { lr = 0.01 })
  local samples = r == 0 and 20 or 4 * r
  for _ = 1, 2 do
    for x, y in loader_of(samples):iter() do
      oa:zero_grad()
      ob:zero_grad()
      if together then F.cross_entropy(da(x) + db(x), y):backward()
      else
        F.cross_entropy(da(x), y):backward()
        F.cross_entropy(db(x * 2), y):backward()
      end
      oa:step()
      ob:step()
    end
    same_everywhere(what, a, oa)
    same_everywhere(what, b, ob)
  end
  local sa, sb = mlp(1), mlp(2)
  oa, ob = ddp.optim.SGD(sa:parameters(), { lr = 0.1, momentum = 0.9 }), ddp.optim.Adam(sb:parameters(), { lr = 0.01 })
  for _ = 1, 2 do
    for t = 1, 5 do
      oa:zero_grad()
      ob:zero_grad()
      local n = 0
      for rank = 0, w - 1 do if t <= (rank == 0 and 5 or rank) then n = n + 1 end end
      for rank = 0, w - 1 do
        if t <= (rank == 0 and 5 or rank) then
          local x, y = rows(rank, 20)
          x, y = x:narrow(1, (t - 1) * SIZE + 1, SIZE), y:narrow(1, (t - 1) * SIZE + 1, SIZE)
          if together then (F.cross_entropy(sa(x) + sb(x), y) / n):backward()
          else (F.cross_entropy(sa(x), y) / n + F.cross_entropy(sb(x * 2), y) / n):backward() end
        end
      end
      oa:step()
      ob:step()
    end
  end
  expect(difference(a, sa) <= 1e-5 and difference(b, sb) <= 1e-5, what .. ": differs from the serial run")
end

-- Steppers: windows of 2 micro-batches over 5 and 3 batches (and 4, 2 ... on more ranks), against the same windows in one process.
local function stepper_case(name, batches, opts)
  while #batches < w do batches[#batches + 1] = batches[#batches % 2 + 1] + 1 end
  local function scaler() return opts.scaled and ddp.amp.GradScaler { init_scale = 1024, growth_interval = 2 } or nil end
  local m = mlp()
  local net = ddp.DistributedDataParallel(m)
  local opt, sc = OPTIMIZERS.sgd(net:parameters()), scaler()
  local step = ddp.stepper { model = net, optimizer = opt, accumulate = 2, clip = opts.clip, scaler = sc }
  for _ = 1, 2 do
    for x, y in loader_of(SIZE * batches[r + 1]):iter() do step(F.cross_entropy(net(x), y), opts.weights and x:size(1) or nil) end
    if opts.flush then step:flush() end
    same_everywhere(name, m, opt)
  end
  local scales = ddp.all_gather_object(sc and sc:get_scale() or 1)
  for rank = 1, w do expect(scales[rank] == scales[1], name .. ": another scale on rank " .. rank - 1) end
  local s = mlp()
  opt = OPTIMIZERS.sgd(s:parameters())
  for _ = 1, 2 do
    for first = 1, 20, 2 do
      local losses = {}
      for rank = 0, w - 1 do
        for t = first, math.min(first + 1, batches[rank + 1]) do
          local x, y = rows(rank, 100)
          losses[#losses + 1] = F.cross_entropy(s(x:narrow(1, (t - 1) * SIZE + 1, SIZE)), y:narrow(1, (t - 1) * SIZE + 1, SIZE))
        end
      end
      if #losses == 0 then break end
      opt:zero_grad()
      for _, loss in ipairs(losses) do (loss / #losses):backward() end
      if opts.clip then ddp.clip_grad_norm_(s:parameters(), opts.clip) end
      opt:step()
    end
  end
  local d = difference(m, s)
  expect(d <= 1e-6, ("%s: differs from the serial run by %g"):format(name, d))
end
stepper_case("C5 P2 windows over 5 and 3 batches", { 5, 3 }, { flush = true })
stepper_case("C5 P2 without a flush", { 5, 3 }, {})
stepper_case("C5 P2 windows over 6 and 3 batches, with weights", { 6, 3 }, { weights = true })
stepper_case("C5 P2 windows over 4 and 5 batches", { 4, 5 }, { flush = true })
stepper_case("C5 P2 both end in a short window", { 5, 5 }, { flush = true })
stepper_case("C5 P1 windows over 7 and 2 batches, with scaler and clipping", { 7, 2 }, { scaled = true, clip = 0.1, flush = true })
stepper_case("C5 P1 a rank without a batch", { 5, 0 }, { scaled = true })

ddp.finish()
if r == 0 then print "fine" end
