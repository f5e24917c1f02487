-- ranks.lua -- collectives between GPUs and a step of a wrapped model, checked: ddprun -n 1 (or 2, with two GPUs) tests/bench/gpu/ranks.lua
local ddp = require "ddp"
ddp.init()
local n, rank, device = ddp.world_size(), ddp.rank(), ddp.device()
assert(device:find "^cuda", "this rank computes on " .. device)
local function same(what, got, want)
  for i, v in ipairs(want) do assert(got[i] == v, ("%s: element %d is %s, expected %g"):format(what, i, tostring(got[i]), v)) end
  assert(#got == #want, what .. ": another size")
end
for _, size in ipairs { 1, 1000, 300000 } do
  local x = ddp.full({ size }, rank + 1, { device = device })
  ddp.all_reduce(x, "sum")
  same("all_reduce", { x:amin():item(), x:amax():item() }, { n * (n + 1) / 2, n * (n + 1) / 2 })
end
local b = ddp.full({ 3 }, rank + 5, { device = device })
ddp.broadcast(b, n - 1)
same("broadcast", b:to("cpu"):tolist(), { n + 4, n + 4, n + 4 })
local g = ddp.all_gather(ddp.full({ 2 }, rank, { device = device })):to "cpu"
same("all_gather", { g:numel(), g:sum():item() }, { 2 * n, n * (n - 1) })

ddp.manual_seed(1)
local model = ddp.nn.Sequential(ddp.nn.Linear(6, 8), ddp.nn.ReLU(), ddp.nn.Linear(8, 2))
model:to(device)
local net = ddp.DistributedDataParallel(model)
local opt = ddp.optim.SGD(net:parameters(), { lr = .1 })
local x, y = ddp.randn(8, 6):to(device), ddp.randint(0, 2, { 8 }):to(device)
local first, last
for _ = 1, 10 do
  local loss = ddp.nn.functional.cross_entropy(net(x), y)
  opt:zero_grad()
  loss:backward()
  opt:step()
  last = loss:item()
  first = first or last
end
assert(last < first, ("the loss went from %g to %g"):format(first, last))
ddp.check(net)
ddp.print(("%d rank%s: all_reduce, broadcast, all_gather and ten steps are right; the loss fell from %.4f to %.4f"):format(n, n == 1 and "" or "s", first, last))
ddp.finish()
