-- comm.lua -- what of communication a training step waits for, beside a cold all-reduce of as many bytes: both ranks of
--   ddprun -n 2 tests/bench/comm.lua [--amp bf16] [--batch 64] [--steps 20]
-- One line at the end. Cold: 64 MB are written before each call, so that no cache holds what is reduced.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local C = require("ddp.ffi").C
local opts = ddp.args({ model = "resnet18", batch = 64, steps = 20, amp = "none" }, { amp = { "none", "bf16" } })
local n, model = bench.train(opts)

local bytes, other, times = ddp.ones(model:num_parameters()), ddp.zeros(16 * 2 ^ 20), {}
for i = 1, 9 do
  other:add_(1)
  ddp.barrier()
  local t = C.ddp_now()
  ddp.all_reduce(bytes, "mean")
  times[i] = 1000 * (C.ddp_now() - t)
end
table.sort(times)
local exposed, cold = n.comm_share * n.step_us / 1000, times[5]
ddp.print(("%.1f images/s, exposed communication %.1f ms of a step of %.0f ms; a cold all-reduce of %.1f MB %.1f ms; %.2fx"):format(n.images_per_second, exposed,
  n.step_us / 1000, model:num_parameters() * 4e-6, cold, exposed / cold))
ddp.finish()
