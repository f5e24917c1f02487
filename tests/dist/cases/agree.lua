-- What ranks agree about: parameters (C9), metrics (C10), statistics of norms (C11), shared files (D7), data sets (D8).
-- agree.lua check | metrics | norm | first FILE | data | prepare FILE PIDFILE
local ddp = require "ddp"
local ffi = require "ffi"
local base = require "ddp.ffi"
local nn, F = ddp.nn, ddp.nn.functional
local mode = arg[1]
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function fails(fn, text)
  local ok, err = pcall(fn)
  expect(not ok, "no error where \"" .. text .. "\" was expected")
  expect(tostring(err):find(text, 1, true), ("the error on rank %d is \"%s\", expected \"%s\" in it"):format(r, tostring(err), text))
end

-- The largest difference over the largest value.
local function difference(a, b) return ddp.no_grad(function() return ((a - b):abs():max() / b:abs():max()):item() end) end

local run = {}

function run.check()
  ddp.manual_seed(1)
  local model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
  expect(ddp.check(model) and ddp.check(ddp.DistributedDataParallel(model)), "equal models")
  for _, at in ipairs { { "2.weight", 20, 0 }, { "0.weight", 0, 31 }, { "2.bias", 1, 7 } } do
    local p = model:state_dict()[at[1]]
    local words = ffi.cast("uint32_t *", base.C.ddp_data(p))
    local function flip() if r == w - 1 then words[at[2]] = bit.bxor(words[at[2]], bit.lshift(1, at[3])) end end
    flip()
    fails(function() ddp.check(model) end, ("check: parameter %s differs between rank 0 and rank %d"):format(at[1], w - 1))
    flip()
    expect(ddp.check(model), "the bit was put back")
  end
  fails(function() ddp.check(r == 0 and model or nn.Sequential(model[1])) end, "check: parameter 3 is 2.weight on rank 0, missing on rank 1")
  fails(function() ddp.check(r == 0 and nn.Sequential(model[1]) or model) end, "check: parameter 3 is missing on rank 0, 2.weight on rank 1")
  fails(function() ddp.check(3) end, "check: expected a module")
  if w > 2 then
    if r > 0 then ddp.no_grad(function() model[1].bias:fill_(r == 1 and -0.0 or 0.5) end) end
    fails(function() ddp.check(model) end, "check: parameter 0.bias differs between rank 0 and ranks 1, 2")
  end
end

function run.metrics()
  local m = ddp.reduce_metrics { loss = { ddp.tensor(2 * (r + 1)), r + 1 }, accuracy = { r, 4 } }
  expect(m.loss == 2 and m.accuracy == w * (w - 1) / 2 / (4 * w), "C10 sums and counts")
  fails(function() ddp.reduce_metrics { loss = { 1, 1 }, [r == 1 and "acc" or "accuracy"] = { 1, 1 } } end, "reduce_metrics: rank 0 has \"accuracy\", rank 1 has not")
  fails(function() ddp.reduce_metrics(r == 1 and { a = { 1, 1 }, b = { 1, 1 } } or { a = { 1, 1 } }) end, "reduce_metrics: rank 1 has \"b\", rank 0 has not")
  fails(function() ddp.reduce_metrics(r == 1 and { a = 3 } or { a = { 1, 1 } }) end, "reduce_metrics: \"a\": expected { sum, count }")
  expect(ddp.reduce_metrics({ a = { r, 1 } }).a == (w - 1) / 2, "ranks go on after an error")
end

-- Two norms, one behind the other, so that gradients go through both.
local function net(norm)
  ddp.manual_seed(3)
  return nn.Sequential(nn.Conv2d(2, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 4, 3), norm(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
end

-- Gradients and running statistics after two steps on rows [first, first + n) of each rank.
local function train(model, wrapped, rows, weight, stepper)
  ddp.manual_seed(8)
  local x, y = ddp.randn(12, 2, 8, 8) * 2 + 1, ddp.randint(0, 3, { 12 })
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0.05 })
  local step = stepper and ddp.stepper { model = wrapped, optimizer = opt }
  local input
  for _ = 1, 2 do
    input = x:narrow(1, rows[1], rows[2]):clone():requires_grad_(true)
    local loss = F.cross_entropy(wrapped(input), y:narrow(1, rows[1], rows[2]))
    if step then step(loss, weight)
    else
      opt:zero_grad()
      loss:backward(nil, { weight = weight })
      opt:step()
    end
  end
  return input.grad
end

local function same(a, b, what)
  local want = b:state_dict()
  for name, p in ddp.sorted(a:state_dict()) do
    if p:dtype() == "i64" then expect(p:equal(want[name]), what .. ": " .. name)
    else
      local d = difference(p, want[name])
      expect(d <= 1e-5, ("%s: %s differs by %g"):format(what, name, d))
    end
  end
  local theirs = b:parameters()
  for i, p in ipairs(a:parameters()) do
    local scale = theirs[i].grad:abs():max():item()
    local d = (p.grad - theirs[i].grad):abs():max():item()
    -- a bias before a norm has no gradient but for rounding
    expect(d <= 1e-5 * scale or scale < 1e-6 and d < 1e-6, ("%s: the gradient of parameter %d differs by %g of %g"):format(what, i, d, scale))
  end
end

function run.norm()
  local serial = net(nn.BatchNorm2d)
  train(serial, serial, { 1, 12 })
  local each = 12 / w
  local model = net(nn.SyncBatchNorm)
  local sum = train(model, ddp.DistributedDataParallel(model), { r * each + 1, each })
  same(model, serial, "C11 equal batches")
  expect(sum ~= nil and sum:abs():max():item() > 0, "C11 the input has a gradient")
  -- Unequal ones, weighted; by hand, and by a stepper.
  local rows = r == 0 and { 1, 12 - 2 * (w - 1) } or { 12 - 2 * (w - r) + 1, 2 }
  for _, stepper in ipairs { false, true } do
    model = nn.SyncBatchNorm.convert(net(nn.BatchNorm2d))
    expect(tostring(model):find("SyncBatchNorm", 1, true) and not tostring(model):find("BatchNorm2d", 1, true), "convert")
    train(model, ddp.DistributedDataParallel(model, { reduce = stepper and "mean" or "weighted", bucket_mb = stepper and 1e-4 or nil }), rows, rows[2], stepper)
    same(model, serial, "C11 unequal batches" .. (stepper and ", a stepper" or ""))
    ddp.check(model)
  end
  -- A rank with one value a channel, and one with none, have their part.
  ddp.manual_seed(2)
  local x = ddp.randn(5, 3) * 2 + 1
  local one, all = nn.SyncBatchNorm(3), nn.BatchNorm1d(3)
  local mine = r == 0 and x:narrow(1, 1, 4) or r == 1 and x:narrow(1, 5, 1) or x:narrow(1, 1, 0)
  local got, want = one(mine), all(x)
  if r < 2 then expect(difference(got, r == 0 and want:narrow(1, 1, 4) or want:narrow(1, 5, 1)) < 1e-5, "C11 one value a channel") end
  expect(difference(one.running_var, all.running_var) < 1e-5 and difference(one.running_mean, all.running_mean) < 1e-5, "C11 running statistics")
  fails(function() nn.SyncBatchNorm(3)(r == 0 and x:narrow(1, 1, 1) or x:narrow(1, 1, 0)) end, "one value a channel over all ranks")
  -- In 16 bits, and recomputed in backward, as in one run.
  local half = one(mine:to "bf16")
  expect(half:dtype() == "bf16", "bf16")
  local a, b = net(nn.SyncBatchNorm), net(nn.SyncBatchNorm)
  local input = ddp.randn(4, 2, 8, 8) * (r + 1)
  a(input):sum():backward()
  ddp.checkpoint(function(v) return b(v) end, input):sum():backward()
  for i, p in ipairs(a:parameters()) do expect(p.grad:equal(b:parameters()[i].grad), "C11 a checkpoint") end
  expect(a[2].running_mean:equal(b[2].running_mean), "C11 a checkpoint counts once")
  -- In evaluation a rank is alone: the others never come here.
  model:eval()
  if r == 0 then
    local y = model(ddp.randn(1, 2, 8, 8))
    expect(y:size(1) == 1, "eval")
  end
  -- Running statistics are averaged before evaluation.
  local bn = nn.Sequential(nn.BatchNorm2d(2))
  local wrapped = ddp.DistributedDataParallel(bn)
  wrapped(ddp.full({ 4, 2, 3, 3 }, r * 2) + ddp.rand(4, 2, 3, 3))
  local before = bn[1].running_mean:clone()
  wrapped:eval()
  local mean = ddp.all_reduce(before, "mean")
  expect(bn[1].running_mean:equal(mean), "C11 running statistics are averaged before eval")
end

function run.first()
  local file, calls = arg[2], 0
  local function prepare(tag)
    calls = calls + 1
    local f = io.open(file)
    if f then
      local text = f:read "*a"
      f:close()
      return "found", text .. tag
    end
    expect(r == 0, "rank " .. r .. " came before rank 0")
    ddp.replace_file(file, function(name)
      expect(not io.open(file), "the file is there before it is whole")
      local out = assert(io.open(name, "w"))
      out:write "whole"
      out:close()
    end)
    return "made", tag
  end
  local how, what = ddp.rank0_first(prepare, "!")
  expect(calls == 1 and (r == 0 and how == "made" and what == "!" or r > 0 and how == "found" and what == "whole!"), ("D7 rank %d: %s %s"):format(r, how, what))
  fails(function() ddp.rank0_first(function() if r == 0 then error "no network" end calls = calls + 1 end) end, "no network")
  expect(calls == 1, "D7 others ran fn though rank 0 failed")
  if r == 0 then
    fails(function() ddp.replace_file(file, function(name)
      local out = assert(io.open(name, "w"))
      out:write "half"
      out:close()
      error "gone wrong"
    end) end, "gone wrong")
    expect(io.open(file):read "*a" == "whole", "D7 a failed function leaves the old file")
    fails(function() ddp.replace_file("/nowhere/f", print) end, "cannot write /nowhere/f")
  end
end

function run.prepare() -- writes for ever: to be killed
  local file = arg[2]
  if r == 0 and io.open(file) then error("half a file: " .. io.open(file):read "*a", 0) end
  ddp.rank0_first(function()
    expect(r == 0, "rank 1 came before rank 0 had ended")
    ddp.replace_file(file, function(name)
      local out = assert(io.open(name, "w"))
      out:write "half"
      out:flush()
      ffi.cdef "int getpid(void);"
      local p = assert(io.open(arg[3] .. ".new", "w"))
      p:write(ffi.C.getpid())
      p:close()
      os.rename(arg[3] .. ".new", arg[3])
      while true do out:write "more" end -- luacheck: ignore
    end)
  end)
end

function run.data()
  local function loader(set) return ddp.data.DataLoader(set, { batch_size = 2, sampler = ddp.data.DistributedSampler(set, { shuffle = true }) }) end
  ddp.manual_seed(1)
  local same_set = loader(ddp.data.tensors(ddp.randn(20, 3)))
  for _ = 1, 2 do for _ in same_set:iter() do end end -- luacheck: ignore
  local odd = loader(ddp.data.tensors(ddp.randn(20, 3) + r))
  local found = not pcall(function() for _ in odd:iter() do end end) -- luacheck: ignore
  local n = 0
  for _, theirs in ipairs(ddp.all_gather_object(found)) do n = n + (theirs and 1 or 0) end
  expect(n == w - 1, "D8 all but the first rank that came find that its data differ")
  local short = loader(ddp.data.tensors(ddp.ones(20 + r, 3)))
  local ok, err = pcall(function() for _ in short:iter() do end end) -- luacheck: ignore
  expect(ok or tostring(err):find("DistributedSampler: the ranks read different data: rank %d has data set tensors of 2%d samples, fingerprint %d+, rank %d has"), tostring(err))
  if r == 0 then -- a loader is not collective: this rank alone goes on
    local alone = loader(ddp.data.tensors(ddp.ones(4, 3)))
    for _ in alone:iter() do end -- luacheck: ignore
  end
end

run[mode]()
ddp.finish()
if r == 0 then print "fine" end
