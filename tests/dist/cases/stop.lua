-- A loop that asks whether to stop: stop.lua FOLDER [deaf]. Each rank leaves FOLDER/rank-N with the step at which it stopped.
local ddp = require "ddp"
local folder, deaf = arg[1], arg[2] == "deaf"
local w = ddp.zeros(4)
local function save(step)
  local f = assert(io.open(("%s/rank-%d"):format(folder, ddp.rank()), "w"))
  f:write(("step %d, sum %g\n"):format(step, w:sum():item()))
  f:close()
end
for step = 1, 1e6 do
  w:add_(ddp.all_reduce(ddp.ones(4)))
  local stop = ddp.stop_requested()
  if step == 1 then
    local pid = io.open("/proc/self/stat"):read "*n"
    print(("rank %d ready, pid %d"):format(ddp.rank(), pid))
    io.stdout:flush()
  end
  if stop and not deaf then save(step) break end
  if ddp.rank() == 1 then os.execute "sleep 0.003" end
end
ddp.finish()
