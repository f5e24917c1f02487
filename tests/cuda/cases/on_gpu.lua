-- on_gpu.lua CASE [ARGS] -- runs a case of tests/dist with new tensors on this rank's GPU.
local ddp = require "ddp"
ddp.set_default_device "cuda"
arg[0] = table.remove(arg, 1)
dofile(arg[0])
