-- Trains ResNet-20 on digits for a few steps, and prints each loss, the mean over the ranks: the same on a GPU as on the CPU.
--   train.lua [none|bf16|f16]
local ddp = require "ddp"
local amp = arg[1] or "none"
ddp.init()
ddp.manual_seed(3)
local set = ddp.data.digits { train = true }
local loader = ddp.data.DataLoader(set, { batch_size = 8, workers = 1, drop_last = true, device = ddp.device(),
  transform = { random_crop = { 8, padding = 1 }, normalize = { mean = { 0.31 }, std = { 0.38 } } },
  sampler = ddp.data.DistributedSampler(set, { shuffle = true, seed = 3 }) })
local net = ddp.DistributedDataParallel(ddp.models.resnet20 { num_classes = 10, in_channels = 1 }:to(ddp.device()))
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
local scaler = amp == "f16" and ddp.amp.GradScaler() or nil
local step = ddp.stepper { model = net, optimizer = opt, clip = 5, scaler = scaler }
local function forward(x, y) return ddp.nn.functional.cross_entropy(net(x), y) end
local n = 0
for x, y in loader:iter() do
  local loss = ddp.autocast(amp ~= "none" and amp, forward, x, y)
  step(loss)
  n = n + 1
  ddp.print(("step %d loss %.6f"):format(n, ddp.reduce_metrics { loss = { loss:item(), 1 } }.loss))
  if n == 8 then break end
end
net:eval()
local x = ddp.zeros(1, 1, 8, 8, { device = ddp.device() })
ddp.print(("on %s, logits %.5f"):format(ddp.device(), ddp.no_grad(function() return net(x):abs():sum():item() end)))
loader:close()
ddp.finish()
