-- Checkpoints of real runs: save.lua train KIND STOP FROM TO | cross FILE SAMPLES TO | kill FILE PIDFILE | full FILE | differ FILE | norm FILE |
-- stall FILE ("-": none).
local ddp = require "ddp"
local ffi = require "ffi"
local nn, F = ddp.nn, ddp.nn.functional
local mode = arg[1]
ddp.deterministic(true)
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function fails(fn, text)
  local ok, err = pcall(fn)
  expect(not ok, "no error where \"" .. text .. "\" was expected")
  expect(tostring(err):find(text, 1, true), ("the error on rank %d is \"%s\", expected \"%s\" in it"):format(r, tostring(err), text))
end

local BATCHES = 10 -- of 16 samples over all ranks, an epoch

-- A run with everything that has a state: dropout, running statistics, momentum, a schedule, a scaler, workers that augment.
local function new_run(seed, workers)
  ddp.manual_seed(seed)
  local set = ddp.data.subset(ddp.data.digits { train = true }, (function()
    local ids = {}
    for i = 1, BATCHES * 16 do ids[i] = i end
    return ids
  end)())
  local run = {}
  run.loader = ddp.data.DataLoader(set, { batch_size = 16 / w, workers = workers, sampler = ddp.data.DistributedSampler(set, { shuffle = true, seed = 4 }),
    seed = 11, transform = { random_crop = { 8, padding = 1 }, flip = true } })
  run.model = ddp.DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10)))
  run.optimizer = ddp.optim.SGD(run.model:parameters(), { lr = 0.05, momentum = 0.9, weight_decay = 1e-3 })
  run.schedule = ddp.optim.schedule.cosine { optimizer = run.optimizer, steps = 30, warmup = 5 }
  run.scaler = ddp.amp.GradScaler { init_scale = 1024, growth_interval = 4 }
  return run
end

-- Steps until `stop`; on the way, after step `at`, fn is called. Step 12 has an infinity on the last rank.
local function train(run, step, stop, at, fn)
  local stepper = ddp.stepper { model = run.model, optimizer = run.optimizer, scaler = run.scaler, schedule = run.schedule, clip = 1 }
  local last
  while step < stop do
    for x, y in run.loader:iter() do
      local loss = F.cross_entropy(run.model(x), y)
      if step == 11 and r == w - 1 then loss = loss * math.huge end
      stepper(loss)
      step, last = step + 1, loss:item()
      if step == at and fn then
        fn(step)
        if stop == at then return last end
      end
      if step >= stop then break end
    end
    if fn and at == -step then
      fn(step)
      if stop == step then return last end
    end
  end
  return last
end

local function keep(run, file, extra)
  local things = { extra = extra }
  for k, v in pairs(run) do things[k] = v end
  ddp.save(file, things)
end

if mode == "train" then
  -- KIND middle, end (behind the loop), last (inside it, at the epoch's last batch), skip (after the skipped step), each with 0 or 2 workers.
  local kind, stop, from, to = arg[2], tonumber(arg[3]), arg[4], arg[5]
  local at = ({ middle = 13, ["end"] = -10, last = 10, skip = 12 })[kind:match "^%a+"]
  local run, step = new_run(from == "-" and 1 or 99, tonumber(kind:match "%d+")), 0
  if from ~= "-" then step = ddp.load(from, run).step end
  local loss = train(run, step, stop, stop == math.abs(at) and at or nil, function(s) keep(run, to, { step = s }) end)
  if stop ~= math.abs(at) then
    local all = ddp.all_gather_object(loss)
    keep(run, to, { losses = all, draw = ddp.rand(2):tolist() })
    ddp.check(run.model.module)
  end
elseif mode == "cross" then
  -- Another number of ranks: the same model, the place in the data after as many samples, random numbers where rank 0 was.
  local file, samples, to = arg[2], tonumber(arg[3]), arg[4]
  local run = new_run(99, 0)
  local extra = ddp.load(file, run)
  local draw = ddp.rand(3):tolist()
  local all = ddp.load(file)
  for name, p in ddp.sorted(run.model.module:state_dict()) do expect(all[name] and all[name]:equal(p), name .. " differs from the file") end
  local state = run.loader:state_dict()
  expect((state.epoch * BATCHES + state.batch) * 16 == samples, ("loader: epoch %d, batch %d"):format(state.epoch, state.batch))
  for _, theirs in ipairs(ddp.all_gather_object(draw)) do
    for i = 1, 3 do expect(theirs[i] == draw[i], "ranks draw other numbers") end
  end
  train(run, extra.step, extra.step + 3)
  expect(ddp.check(run.model.module), "check")
  if to ~= "-" then keep(run, to, { step = extra.step + 3 }) end
elseif mode == "kill" then
  -- Saves for ever until it is killed; first it looks at what the last one left. All tensors of a file hold its number.
  local file, pidfile = arg[2], arg[3]
  local tensors = {}
  for i = 1, 4 do tensors["t" .. i] = ddp.zeros(2 ^ 17) end
  local number = 0
  local f = io.open(file, "rb")
  if f then
    f:close()
    local extra = ddp.load(file, { model = tensors })
    number = extra.number
    for name, t in ddp.sorted(tensors) do
      expect(t:min():item() == number and t:max():item() == number, ("%s of save %d holds %g to %g"):format(name, number, t:min():item(), t:max():item()))
    end
  end
  local deadline = tonumber(arg[4])
  repeat
    number = number + 1
    for _, t in ddp.sorted(tensors) do t:fill_(number) end
    ddp.save(file, { model = tensors, extra = { number = number } })
    if r == 0 and pidfile ~= "-" then
      ffi.cdef "int getpid(void);"
      local p = assert(io.open(pidfile .. ".new", "w"))
      p:write(ffi.C.getpid())
      p:close()
      os.rename(pidfile .. ".new", pidfile)
      pidfile = "-"
    end
    if deadline then deadline = deadline - 1 end
  until deadline == 0
elseif mode == "full" then
  -- A disk, or a limit, of 1 MB: the first file fits, the second does not, and the first is still there.
  local file = arg[2]
  ddp.manual_seed(1)
  local small = ddp.randn(1000)
  ddp.save(file, { model = { a = small } })
  for _ = 1, 2 do
    fails(function() ddp.save(file, { model = { a = ddp.zeros(2 ^ 20) } }) end, arg[3])
    expect(ddp.load(file).a:equal(small), "the old file is gone")
  end
  ddp.save(file, { model = { a = small * 2 } })
  expect(ddp.load(file).a:equal(small * 2), "a later save")
elseif mode == "norm" then
  -- Running statistics in the file are the ranks' average; those of the models stay as they are, and come back by rank.
  local file = arg[2]
  ddp.manual_seed(1)
  local m = nn.Sequential(nn.BatchNorm2d(2))
  local wrapped = ddp.DistributedDataParallel(m)
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0.1 })
  wrapped(ddp.rand(4, 2, 3, 3) + 2 * r)
  local mine, mean = m[1].running_mean:clone(), ddp.all_reduce(m[1].running_mean:clone(), "mean")
  expect(not mine:equal(mean), "the ranks' statistics are alike")
  ddp.save(file, { model = wrapped, optimizer = opt })
  expect(m[1].running_mean:equal(mine), "saving changed the model")
  expect(ddp.load(file)["0.running_mean"]:equal(mean), "the file does not hold the average")
  ddp.load(file, { model = wrapped })
  expect(m[1].running_mean:equal(mean), "a model alone is the average")
  ddp.load(file, { model = wrapped, optimizer = opt })
  expect(m[1].running_mean:equal(mine), "a run that goes on has its own again")
elseif mode == "stall" then
  -- The last rank never comes to save.
  if r == w - 1 then ffi.cdef "int usleep(unsigned us);" while true do ffi.C.usleep(1e5) end end
  ddp.save(arg[2], { model = nn.Linear(1, 1) })
elseif mode == "differ" then
  -- An error of one rank reaches all, and nobody hangs.
  local file = arg[2]
  local m = nn.Linear(2, 2)
  fails(function() ddp.save(file, { model = m, extra = { v = r == w - 1 and print or 1 } }) end, "extra.v is a function")
  fails(function() ddp.save(r == 0 and file or file .. "x", { model = m }) end, "save: rank 0 saves " .. file .. ", rank ")
  fails(function() ddp.save(file, r == 0 and { model = m } or { model = m, other = m }) end, "save: rank 0 saves model, rank ")
  fails(function() ddp.save("/nowhere/f", { model = m }) end, "cannot write /nowhere/f: No such file or directory")
  if r == 0 then ddp.save(file, { model = m }, { collective = false }) else ddp.save(file .. r, { model = nn.Linear(2, 2), b = m }, { collective = false }) end
  ddp.barrier()
  fails(function() ddp.load(r == 0 and file or file .. "missing", { model = m }) end, "missing: No such file or directory")
  fails(function() ddp.load(file .. (r == 0 and "" or r), { model = m }) end, "is not the file that rank 0 has")
  fails(function() ddp.rank0(function() ddp.save(file, { model = m }) end) end, "a collective inside rank0")
  ddp.rank0(function() ddp.save(file, { model = m }, { collective = false }) end)
  ddp.load(file, { model = m })
end
ddp.finish()
if r == 0 then print "fine" end
