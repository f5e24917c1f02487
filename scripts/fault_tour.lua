-- One way of going wrong a run, for fault_tour.sh: fault_tour.lua train | memory | error | models
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
local what = ddp.args({ what = "train" }, { what = { "train", "memory", "error", "models" } }).what
ddp.init()
ddp.manual_seed(1)
local second = ddp.rank() == 1
local net = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(64, what == "models" and second and 48 or 32), nn.ReLU(), nn.Linear(32, 10)))
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.05, momentum = 0.9 })
local x, y = ddp.randn(16, 64), ddp.randint(0, 10, { 16 })
local kept = {}
for step = 1, 40 do
  opt:zero_grad()
  local logits = net(x)
  if step == 20 and second then
    if what == "error" then logits = logits:matmul(ddp.ones(4, 4)) end
    if what == "memory" then while true do kept[#kept + 1] = ddp.empty(1024, 1024, 512) end end
  end
  F.cross_entropy(logits, y):backward()
  opt:step()
  if step % 10 == 0 then ddp.check(net) end
end
ddp.finish()
