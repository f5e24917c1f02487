-- test_nvrtc.lua -- the chains of test_chain.lua compiled by the real NVRTC for every architecture: no GPU is needed for that.
local ffi = require "ffi"
ffi.cdef "int unsetenv(const char *name);"
ffi.C.unsetenv "DDP_CUDA_LIBS" -- the folder of the double
assert(loadfile "tests/cuda/test_chain.lua")("real")
