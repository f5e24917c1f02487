-- The article's toy: Linear 10-100-10, Adam, a new random batch each step, loss = mean of the outputs.
--   ddprun -n 2 scripts/train_toy.lua [--steps N]
local ddp = require "ddp"
local nn = ddp.nn
local args = ddp.args { steps = 500 }

ddp.init()
ddp.manual_seed(0)
local model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)):to(ddp.device())
local net = ddp.DistributedDataParallel(model)
local optimizer = ddp.optim.Adam(net:parameters())
local draws = ddp.generator(1, { per_rank = true })

local loss
for step = 1, args.steps do
  loss = net(ddp.randn(32, 10, { generator = draws, device = ddp.device() })):mean()
  optimizer:zero_grad()
  loss:backward()
  optimizer:step()
  if step % 100 == 0 then ddp.print(("step %d loss %.4f"):format(step, loss:item())) end
end
ddp.report { loss = loss and loss:item() }
ddp.finish()
