-- Trains 20 steps, saving each fifth, and goes on from what there is: restart.lua CHECKPOINT RESULT
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
local file, result = arg[1], arg[2]
ddp.deterministic(true)
ddp.init()
ddp.manual_seed(1)
local net = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)))
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.05, momentum = 0.9 })
-- Before the load, which sets the random numbers to where they were.
local x, y = ddp.randn(64, 8, { generator = ddp.generator(7, { per_rank = true }) }), ddp.randint(0, 4, { 64 })
local state = { model = net, optimizer = opt }
local first = 1
if io.open(file) then first = ddp.load(file, state).step + 1 end
if first > 1 then ddp.print(("goes on at step %d, attempt %s"):format(first, os.getenv "DDP_RESTART")) end
for step = first, 20 do
  opt:zero_grad()
  F.cross_entropy(net(x), y):backward()
  opt:step()
  if step % 5 == 0 then
    state.extra = { step = step }
    ddp.save(file, state)
  end
end
state.extra = nil
ddp.save(result, state)
ddp.finish()
