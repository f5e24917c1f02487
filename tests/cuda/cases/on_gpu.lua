-- on_gpu.lua CASE [ARGS] -- runs a case of tests/dist with new tensors on this rank's GPU, and batches copied there.
local ddp = require "ddp"
ddp.set_default_device "cuda"
local tensors, loader = ddp.data.tensors, ddp.data.DataLoader
function ddp.data.tensors(x, y) return tensors(x:to "cpu", y and y:to "cpu") end
function ddp.data.DataLoader(set, opts)
  opts = opts or {}
  opts.device = ddp.device()
  return loader(set, opts)
end
dofile(table.remove(arg, 1))
if ddp.memory_stats("cuda").peak == 0 then error("the case used no GPU", 0) end
