-- ResNet-18 with the CIFAR stem, batch 64, f32: what torch_resnet18.py does.
local ddp = require "ddp"
local F = ddp.nn.functional
ddp.init()
ddp.manual_seed(0)
local net = ddp.DistributedDataParallel(ddp.models.resnet18 { num_classes = 10, stem = "cifar" })
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
local x, y = ddp.randn(64, 32, 32, 3):permute(1, 4, 2, 3), ddp.randint(0, 10, { 64 })
for _ = 1, 10 do
  local loss = F.cross_entropy(net(x), y)
  opt:zero_grad()
  loss:backward()
  opt:step()
  loss:item()
end
ddp.report { batch = 64 }
ddp.finish()
