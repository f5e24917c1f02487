-- all_reduce.lua -- the time of an all-reduce of 4 B, 1 MB, 25 MB and 100 MB, f32, medians over calls after a barrier:
--   ddprun -n 2 --engine gloo tests/bench/all_reduce.lua
-- One line at the end: "us 4 B 61.2, 1 MB 812.0, ...".
local ddp = require "ddp"
local C = require("ddp.ffi").C
ddp.init()

local function median(n, calls)
  local x, times = ddp.randn(n), {}
  for i = 1, calls do
    ddp.barrier()
    local t = C.ddp_now()
    ddp.all_reduce(x, "mean")
    times[i] = 1e6 * (C.ddp_now() - t)
  end
  table.sort(times)
  return times[math.ceil(calls / 2)]
end

local parts = {}
for _, case in ipairs { { "4 B", 1, 2000 }, { "1 MB", 2 ^ 18, 200 }, { "25 MB", 25 * 2 ^ 18, 15 }, { "100 MB", 100 * 2 ^ 18, 7 } } do
  median(case[2], 2)
  parts[#parts + 1] = ("%s %.1f"):format(case[1], median(case[2], case[3]))
end
ddp.print("us " .. table.concat(parts, ", "))
ddp.finish()
