-- One way of going wrong a run: fault.lua KIND
local ddp = require "ddp"
local nn = ddp.nn
local kind = arg[1]
local C = require("ddp.ffi").C
if kind == "no-join" then return end
if kind == "late" and ddp.rank() == 1 then os.execute "sleep 60" end
if kind == "exit-early" and ddp.rank() == 1 then os.execute "sleep 0.2" os.exit(0) end
ddp.init()
local r = ddp.rank()
if kind == "shape" then
  local x = ddp.ones(2, 3)
  ddp.all_reduce(ddp.ones(1))
  if r == 1 then x = x:matmul(ddp.ones(4, 4)) end
  ddp.all_reduce(x)
elseif kind == "mismatch" then
  if r == 0 then ddp.all_reduce(ddp.ones(4096), "sum", { name = "loss" }) else ddp.broadcast(ddp.ones(10), 0) end
elseif kind == "dtype" then
  ddp.all_reduce(r == 0 and ddp.ones(8) or ddp.ones(8):to "f64")
elseif kind == "stall" then
  if r == 1 then os.execute "sleep 60" end
  ddp.all_reduce(ddp.ones(4))
elseif kind == "stall3" then
  ddp.all_reduce(ddp.ones(4))
  if r == 2 then os.execute "sleep 5" end
  ddp.all_reduce(ddp.ones(4))
elseif kind == "stop" or kind == "kill" or kind == "kill3" then
  local ffi = require "ffi"
  ffi.cdef "int getpid(void); int kill(int pid, int signal);"
  ddp.all_reduce(ddp.ones(4))
  if r == (kind == "kill3" and 2 or 1) then ffi.C.kill(ffi.C.getpid(), kind == "stop" and 19 or 9) end
  for _ = 1, 100 do ddp.all_reduce(ddp.ones(400000)) end
elseif kind == "loop" then
  local x = ddp.ones(400000)
  ddp.all_reduce(x)
  io.write "begun\n"
  io.flush()
  while true do
    local t = C.ddp_now()
    local ok, e = pcall(ddp.all_reduce, x)
    if not ok then error(("after %.2f s: %s"):format(C.ddp_now() - t, e), 0) end
  end
elseif kind == "exit0" then
  if r == 1 then os.exit(0) end
  ddp.barrier()
elseif kind == "finish" then
  if r == 1 then ddp.finish() return end
  ddp.barrier()
elseif kind == "error" then
  if r == 1 then error "deliberate" end
  ddp.barrier()
elseif kind == "segv" then
  if r == 1 then require("ffi").cast("int *", 8)[0] = 1 end
  ddp.barrier()
elseif kind == "model" then
  ddp.manual_seed(1)
  local m = nn.Sequential(nn.Linear(2, r == 0 and 3 or 4), nn.Linear(3 + r, 1))
  ddp.DistributedDataParallel(m)
elseif kind == "delay" then
  -- C14: with a delay of 20 ms in the transport, a step of one bucket shows 20 ms of exposed communication.
  ddp.manual_seed(1)
  local m = nn.Linear(10, 10)
  local net = ddp.DistributedDataParallel(m)
  local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01 })
  for _ = 1, 12 do
    opt:zero_grad()
    net(ddp.ones(4, 10)):mean():backward()
    opt:step()
  end
  local n = ddp.report { quiet = true }
  if r == 0 then print(("comm_ms %.2f"):format(n.parts_us.comm / 1000)) end
end
C.ddp_finish()
