-- Host time of the smallest op, in microseconds: the median of many runs.
local ddp = require "ddp"
local a, b = ddp.ones(1), ddp.ones(1)
local N, times = 20000, {}
local function run()
  for _ = 1, N do local _ = a:add(b) end
end
run()
for i = 1, 15 do
  local t = os.clock()
  run()
  times[i] = (os.clock() - t) / N * 1e6
end
table.sort(times)
io.write(("%.2f"):format(times[8]))
