-- comm.lua -- what of communication a training step waits for, beside a cold all-reduce of as many bytes: both ranks of
--   ddprun -n 2 tests/bench/comm.lua [--amp bf16] [--batch 64] [--steps 20]
-- One line at the end. Cold: 64 MB are written before each call, so that no cache holds what is reduced.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local C = require("ddp.ffi").C
local F = ddp.nn.functional
local opts = ddp.args({ model = "resnet18", batch = 64, steps = 20, amp = "none" }, { amp = { "none", "bf16" } })
ddp.init()
ddp.manual_seed(0)
local model = ddp.models[opts.model] { num_classes = 10, stem = "cifar" }
local net = ddp.DistributedDataParallel(model)
local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
local x, y = bench.channels_last(opts.batch, 3, 32, 32), ddp.randint(0, 10, { opts.batch })
local function forward() return F.cross_entropy(net(x), y) end
for _ = 1, opts.steps do
  local loss = ddp.autocast(opts.amp ~= "none" and opts.amp, forward)
  opt:zero_grad()
  loss:backward()
  opt:step()
  loss:item()
end
local n = ddp.report { batch = opts.batch, quiet = true }

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
