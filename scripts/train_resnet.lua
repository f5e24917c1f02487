-- Trains a residual network on the handwritten digits this repository carries, or on CIFAR-10.
--   ddprun -n 2 scripts/train_resnet.lua [--model resnet20|resnet18|resnet50] [--data digits|DIR] [--epochs E] ...
--   --save FILE: a checkpoint after each epoch, at the end, and with --save-every N after every N steps; --resume FILE goes on from one
-- DIR holds CIFAR-10's binary batches (data_batch_1.bin ... test_batch.bin), or a folder cifar-10-batches-bin with them.
local ddp = require "ddp"
local F = ddp.nn.functional

local args = ddp.args({
  model = "resnet20", data = "digits", synthetic = false, epochs = 0, steps = 0, batch = 64, lr = 0, seed = 1, workers = 2,
  amp = "none", accumulate = 1, compile = "off", deterministic = false, save = "", save_every = 0, resume = "",
}, { model = { "resnet20", "resnet18", "resnet50" }, amp = { "none", "bf16", "f16" }, compile = { "on", "off" } })

local function refuse(text)
  if ddp.rank() == 0 then io.stderr:write(text, "\n") end
  os.exit(2, true)
end
if args.compile ~= "off" then refuse(("--compile %s is not built yet; off is accepted"):format(args.compile)) end
if args.save_every ~= 0 and args.save == "" then refuse "--save-every needs --save FILE" end
for name, least in pairs { epochs = 0, steps = 0, batch = 1, accumulate = 1, workers = 0, seed = 0, save_every = 0 } do
  local v = args[name]
  if v % 1 ~= 0 or v < least then refuse(("--%s is %s, expected a whole number from %d"):format((name:gsub("_", "-")), tostring(v), least)) end
end

ddp.deterministic(args.deterministic)
ddp.init()
ddp.manual_seed(args.seed)

-- ---- data -------------------------------------------------------------------------------------------------------
local digits = args.data == "digits" and not args.synthetic
local train, test, image
if args.synthetic then
  train = ddp.data.tensors(ddp.randn(1024, 3, 32, 32), ddp.randint(0, 10, { 1024 }))
  image = { channels = 3 }
elseif digits then
  train, test = ddp.data.digits { train = true }, ddp.data.digits { train = false }
  image = { channels = 1, transform = { random_crop = { 8, padding = 1 }, normalize = { mean = { 0.31 }, std = { 0.38 } } } }
else
  train, test = ddp.data.cifar10(args.data, { train = true }), ddp.data.cifar10(args.data, { train = false })
  image = { channels = 3, transform = { random_crop = { 32, padding = 2 }, flip = true,
    normalize = { mean = { 0.4914, 0.4822, 0.4465 }, std = { 0.247, 0.2435, 0.2616 } } } }
end
local plain = image.transform and { normalize = image.transform.normalize }
local loader = ddp.data.DataLoader(train, { batch_size = args.batch, workers = args.workers, device = ddp.device(), drop_last = true, transform = image.transform,
  sampler = ddp.data.DistributedSampler(train, { shuffle = true, seed = args.seed }) })

-- ---- model --------------------------------------------------------------------------------------------------------
local model = ddp.models[args.model] { num_classes = 10, stem = "cifar", in_channels = image.channels }:to(ddp.device())
local net = ddp.DistributedDataParallel(model)
local epochs = args.epochs > 0 and args.epochs or args.steps > 0 and math.huge or digits and 20 or 30
local total = args.steps > 0 and args.steps or epochs * math.ceil(loader:len() / args.accumulate)
-- A long run on CIFAR-10 profits from a high peak; a short one would spend itself recovering from it.
local peak = args.lr > 0 and args.lr or digits and 0.1 or total > 1000 and 0.2 or 0.02
-- Weights of convolutions and the last layer decay; what norms and biases have, one number a channel, does not.
local weights, others = {}, {}
for _, p in ipairs(net:parameters()) do table.insert(p:dim() > 1 and weights or others, p) end
local opt = ddp.optim.SGD({ { params = weights, weight_decay = 5e-4 }, { params = others } }, { lr = peak, momentum = 0.9, nesterov = true })
ddp.print(("%s, %d parameters, %d rank%s of batch %d, %d steps"):format(args.model, model:num_parameters(), ddp.world_size(),
  ddp.world_size() == 1 and "" or "s", args.batch, total))

-- One cycle: up over the first fifth, then down to 0. f16 needs its gradients scaled, bf16 does not.
local schedule = ddp.optim.schedule.linear { optimizer = opt, steps = total, warmup = math.min(total, math.max(1, total * 0.2)) }
local scaler = args.amp == "f16" and ddp.amp.GradScaler() or nil
local stepper = ddp.stepper { model = net, optimizer = opt, accumulate = args.accumulate, schedule = schedule, scaler = scaler }

-- ---- training ------------------------------------------------------------------------------------------------------
local WINDOW = 50 -- steps that the loss shown is the mean of
local step, losses = 0, {} -- steps of the optimizer; the mean loss of each
-- Losses of steps that were not read yet: reading one waits for its step, so a GPU is asked now and then only.
local unread = {}
local function read_losses()
  for i, loss in ipairs(unread) do
    local at, value = step - #unread + i, loss:item()
    if value ~= value then error(("the loss is NaN at step %d; try a lower --lr"):format(at), 0) end
    losses[at], losses[at - WINDOW] = value, nil
  end
  unread = {}
end
local function recent()
  read_losses()
  local sum, n = 0, math.min(step, WINDOW)
  for i = step - n + 1, step do sum = sum + losses[i] end
  return sum, math.max(n, 1)
end

-- What a run goes on from; between windows there is nothing else.
local state = { model = net, optimizer = opt, schedule = schedule, scaler = scaler, loader = loader }
local function save()
  if args.save == "" then return end
  read_losses()
  state.extra = { model = args.model, step = step, losses = ddp.all_gather_object(losses) }
  ddp.save(args.save, state)
end
if args.resume ~= "" then
  local _, about = ddp.load(args.resume)
  if about.model ~= args.model then refuse(("--resume %s is a checkpoint of %s, not of %s"):format(args.resume, tostring(about.model), args.model)) end
  local extra = ddp.load(args.resume, state)
  step, losses = extra.step, extra.losses[ddp.rank() + 1] or extra.losses[1]
  ddp.print(("goes on after step %d, in epoch %d"):format(step, loader:epoch() + 1))
end

local sum, batches = nil, 0 -- losses of the window that is being accumulated
local function forward(x, y) return F.cross_entropy(net(x), y) end

-- A window has ended: its loss is noted, and shown now and then.
local function close_step(epoch)
  step = step + 1
  unread[#unread + 1] = batches == 1 and sum or sum / batches
  sum, batches = nil, 0
  if step % 10 == 0 then read_losses() end
  if args.save_every > 0 and step % args.save_every == 0 then save() end
  if step % 10 == 0 then ddp.progress(("epoch %d, step %d of %d, loss %.4f"):format(epoch, step, total, (recent()) / math.min(step, WINDOW))) end
end

local function train_batch(epoch, x, y)
  local loss = ddp.autocast(args.amp ~= "none" and args.amp, forward, x, y)
  local _, info = stepper(loss)
  loss = loss:detach()
  sum, batches = sum and sum + loss or loss, batches + 1
  if info.window_end then close_step(epoch) end
end

local epoch, done, mean = loader:epoch(), args.steps > 0 and step >= args.steps, nil
local stopped = false -- by SIGTERM or SIGINT, which reach the loop as an answer and not as an end
while not done and epoch < epochs do
  epoch = epoch + 1
  for x, y in loader:iter() do
    local before = step
    train_batch(epoch, x, y)
    if args.steps > 0 and step >= args.steps then done = true break end
    if step > before and ddp.stop_requested() then stopped, done = true, true break end
  end
  if stopped then break end
  local _, info = stepper:flush()
  if info.window_end then close_step(epoch) end
  if args.steps > 0 and step >= args.steps then done = true end
  save()
  mean = ddp.reduce_metrics { loss = { recent() } }.loss
  ddp.progress(("epoch %d, step %d of %d, loss %.4f (mean of the last %d steps)"):format(epoch, step, total, mean, math.min(step, WINDOW)), true)
end

-- All ranks leave after the same step, with what --save FILE keeps.
if stopped then
  save()
  ddp.progress(("stopped after step %d of %d"):format(step, total), true)
  loader:close()
  ddp.finish()
  return
end

-- ---- evaluation: each sample once, whatever the number of ranks -------------------------------------------------------
local accuracy
if test then
  local eval = ddp.data.DataLoader(test, { batch_size = 256, workers = args.workers, device = ddp.device(),
    transform = plain, sampler = ddp.data.DistributedSampler(test, { shuffle = false }) })
  net:eval()
  local right, seen = 0, 0
  ddp.no_grad(function()
    for x, y in eval:iter() do
      right = right + net(x):argmax(-1):eq(y):sum():item()
      seen = seen + y:numel()
    end
  end)
  accuracy = 100 * ddp.reduce_metrics { accuracy = { right, seen } }.accuracy
  eval:close()
end
loader:close()
ddp.report { batch = args.batch * args.accumulate, test_accuracy = accuracy, loss = mean }
ddp.finish()
