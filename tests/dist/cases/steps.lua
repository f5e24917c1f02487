-- Trains a small network for 30 steps: steps.lua [check]; with `check` the ranks compare their parameters at each tenth step.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
ddp.init()
ddp.manual_seed(1)
local net = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.05, momentum = 0.9 })
local x, y = ddp.randn(16, 8), ddp.randint(0, 4, { 16 })
for step = 1, 30 do
  opt:zero_grad()
  local loss = F.cross_entropy(net(x), y)
  loss:backward()
  opt:step()
  if step % 5 == 0 then ddp.all_gather(loss:detach()) end
  if arg[1] == "check" and step % 10 == 0 then ddp.check(net) end
end
ddp.barrier()
ddp.print "fine"
ddp.finish()
