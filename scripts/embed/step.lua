-- step.lua -- what host.c calls: one training step, the loss back.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional

local model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
local optimizer = ddp.optim.Adam(model:parameters(), { lr = 0.01 })

function _G.train_step(x, y)
  local loss = F.mse_loss(model(x), y)
  optimizer:zero_grad()
  loss:backward()
  optimizer:step()
  return loss
end
