-- resnet.lua -- training steps of a network with the CIFAR stem: what torch_resnet.py does.
-- One line at the end: img_s, rss_mb.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local F = ddp.nn.functional
local opts = ddp.args({ model = "resnet18", batch = 64, steps = 10, amp = "none" }, { amp = { "none", "bf16" } })
ddp.init()
ddp.manual_seed(0)
local net = ddp.DistributedDataParallel(ddp.models[opts.model] { num_classes = 10, stem = "cifar" })
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
local x, y = bench.channels_last(opts.batch, 3, 32, 32), ddp.randint(0, 10, { opts.batch })
local function forward() return F.cross_entropy(net(x), y) end
for _ = 1, opts.steps do
  local loss = opts.amp == "none" and forward() or ddp.autocast(opts.amp, forward)
  opt:zero_grad()
  loss:backward()
  opt:step()
  loss:item()
end
local n = ddp.report { batch = opts.batch, quiet = true }
ddp.print(("img_s %.1f rss_mb %.0f"):format(n.images_per_second, n.peak_mb))
ddp.finish()
