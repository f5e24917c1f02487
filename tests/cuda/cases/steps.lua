-- Ten steps of a small model on GPUs. cpu: the model stays in host memory; one_on_cpu: rank 1's does; kill, stall: what
-- rank 1 does at the sixth step.
local ddp = require "ddp"
local ffi = require "ffi"
ffi.cdef "int kill(int pid, int sig); int getpid(void); unsigned sleep(unsigned s);"
local what = arg[1] or ""
ddp.init()
ddp.manual_seed(1)
local here = (what == "cpu" or what == "one_on_cpu" and ddp.rank() == 1) and "cpu" or "cuda"
local model = ddp.nn.Sequential(ddp.nn.Linear(8, 16), ddp.nn.ReLU(), ddp.nn.Linear(16, 1)):to(here)
local net = ddp.DistributedDataParallel(model)
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.1 })
local first, last
for step = 1, 10 do
  if step == 6 and ddp.rank() == 1 then
    if what == "kill" then ffi.C.kill(ffi.C.getpid(), 9) end
    if what == "stall" then for _ = 1, 30 do ffi.C.sleep(1) end end -- a signal ends a sleep
  end
  local x = ddp.ones(4, 8, { device = here }) * (ddp.rank() + 1)
  local loss = (net(x) - 3):pow(2):mean()
  opt:zero_grad()
  loss:backward()
  opt:step()
  last = loss:item()
  first = first or last
end
if not (last < first) then error(("the loss went from %g to %g"):format(first, last), 0) end
ddp.print "fine"
ddp.finish()
