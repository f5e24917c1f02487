-- test_errors.lua -- what can be wrong with a GPU, each with its sentence: cause and remedy. On the double's faults.
package.path = "tests/cuda/?.lua;" .. package.path
local t, child = require "harness", require "child"

local LIBS = os.getenv "DDP_CUDA_LIBS"

-- Under this environment the code's error has each of these texts, in this order; nothing crashes.
local function says(name, env, code, ...)
  local texts = { ... }
  t.test(name, function()
    local out, ended = child.run(env, "local ddp = require 'ddp'; print(select(2, pcall(function() " .. code .. " end)))")
    t.ok(ended, out)
    local at = 1
    for _, text in ipairs(texts) do
      local from, to = out:find(text, at, true)
      t.ok(from, ("\"%s\" is missing, or out of order, in: %s"):format(text, out))
      at = to
    end
  end)
end
local ZEROS = "return ddp.zeros(3, { device = 'cuda' }):sum():item()"

-- ---- nothing to compute on ----

says("a driver that is too old is named with its version and ours", "DDP_DOUBLE_STATUS=35 DDP_DOUBLE_DRIVER=12020", ZEROS,
  "\"cuda:0\"", "the NVIDIA driver is too old: it is for CUDA 12.2, this build for CUDA 1", "update the driver")
says("no driver that answers", "DDP_DOUBLE_STATUS=35 DDP_DOUBLE_DRIVER=0", ZEROS, "no NVIDIA driver answers", "nvidia-smi")
says("no GPU", "DDP_DOUBLE_STATUS=100 CUDA_VISIBLE_DEVICES=", ZEROS, "CUDA_VISIBLE_DEVICES= names none")
says("no GPU, as in a container", "-u CUDA_VISIBLE_DEVICES DDP_DOUBLE_STATUS=100", ZEROS, "no GPU", "nvidia-smi -L", "--gpus all")
says("CUDA_VISIBLE_DEVICES that names none that is here", "CUDA_VISIBLE_DEVICES=7", ZEROS, "CUDA_VISIBLE_DEVICES=7 names none that is here",
  "nvidia-smi -L")
says("a driver without its library", "DDP_DOUBLE_STATUS=34", ZEROS, "no GPU")
says("a runtime that is not there", "DDP_CUDA_LIBS=/nowhere", ZEROS, "libcudart.so.", "is not there: install the CUDA runtime", "DDP_CUDA_LIBS")
says("a GPU with a number that is not there", "DDP_DOUBLE_GPUS=2", "return ddp.zeros(3, { device = 'cuda:5' })", "no \"cuda:5\"", "sees 2 GPUs")
says("DDP_DEVICE=cpu", "DDP_DEVICE=cpu", "return ddp.zeros(3, { device = 'cuda:0' })", "DDP_DEVICE=cpu keeps this process on the cpu")
says("a GPU of a generation that this CUDA does not compute on", "DDP_DOUBLE_CC=50", ZEROS, "compute capability 5.0", "and later")
says("with DDP_DEVICE=cpu there is none", "DDP_DEVICE=cpu", "return ddp.device()", "cpu")
says("the GPU of a rank, by name", "DDP_DOUBLE_GPUS=2 LOCAL_RANK=1 RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1",
  "return ddp.device()", "cuda:1")

t.test("a library that is older than its headers is named by what it lacks", function()
  local dir = child.file()
  os.remove(dir)
  local source = "int cudaDriverGetVersion(int *v) { return *v = 0; }"
  os.execute(("mkdir -p %s && echo '%s' | gcc -shared -fPIC -x c - -o %s/$(basename %s/libcudart.so.[0-9]*)"):format(dir, source, dir, LIBS))
  local out, ended = child.run("DDP_CUDA_LIBS=" .. dir, "print(pcall(require('ddp').zeros, 3, { device = 'cuda' }))")
  os.execute("rm -r " .. dir)
  t.ok(ended and out:find "has no cuda%w+: it is older than the one ddp was built for; install the CUDA runtime", out)
end)

-- ---- while it computes ----

local CHAIN = "local x = ddp.ones(3, { device = 'cuda' }); local y = x * 2; local z = y + 1; "
says("an error that comes later names the ops it may be of, and how to find which", "DDP_DOUBLE_FAIL=kernel:2", CHAIN .. "return z:to 'cpu'",
  "reading from the GPU: CUDA error 700, cudaErrorIllegalAddress", "It comes from this or an op launched before: ", "mul (mul_f32), add (add_f32)",
  "DDP_SYNC=1 finds which", "start it again, from a checkpoint")
says("with DDP_SYNC=1 it is raised by the op itself", "DDP_SYNC=1 DDP_DOUBLE_FAIL=kernel:2", CHAIN .. "return 'no error'", "mul (kernel mul_f32): CUDA error 700")
says("after such an error the GPU's work has ended, in one sentence", "DDP_DOUBLE_FAIL=kernel:2",
  CHAIN .. "pcall(z.to, z, 'cpu'); return ddp.ones(2, { device = 'cuda' }):to 'cpu'", "the GPU's work ended before: reading from the GPU: CUDA error 700")
says("and the script can go on on the cpu", "DDP_DOUBLE_FAIL=kernel:2", CHAIN .. "pcall(z.to, z, 'cpu'); x, y, z = nil; collectgarbage(); return ddp.ones(2):sum():item()",
  "2\n")
says("a GPU that falls off the bus", "DDP_DOUBLE_FAIL=lost:2", CHAIN .. "return z:to 'cpu'", "the GPU does not answer any more", "fallen off the bus", "xid",
  "checkpoint")
says("a stream that cannot be made", "DDP_DOUBLE_FAIL=cudaStreamCreateWithPriority:2:1", ZEROS, "making a GPU ready: CUDA error")
says("a copy that fails", "DDP_DOUBLE_FAIL=cudaMemcpyAsync:1:1", "return ddp.ones(3):to 'cuda'", "copying to the GPU: CUDA error 1, cudaErrorInvalidValue")
says("a launch that fails names op and kernel", "DDP_DOUBLE_FAIL=cudaLaunchKernel:2:1", CHAIN, "mul (kernel mul_f32): CUDA error 1")
says("an image that does not load", "DDP_DOUBLE_FAIL=cudaLibraryLoadData:1:209", ZEROS, "compute capability 9.0", "CUDA_ARCHS")
says("a GPU whose memory is full of others", "DDP_DOUBLE_FAIL=cudaEventCreateWithFlags:1:2,cudaEventCreateWithFlags:2:2", ZEROS, "out of memory on cuda:0")

-- ---- ids ----

local LABELS = "local x = ddp.randn(4, 10, { device = 'cpu' }):to 'cuda'; local y = ddp.tensor({ 1, 12, 3, 4 }, { dtype = 'i64' }):to 'cuda'; "
says("an id out of range is raised where the host waits", "", LABELS .. "local l = ddp.nn.functional.cross_entropy(x, y); return l:item()",
  "cross_entropy: id 12, expected 0 to 9")
says("once", "", LABELS .. "local l = ddp.nn.functional.cross_entropy(x, y); pcall(l.item, l); return (ddp.ones(3, { device = 'cuda' }) + 1):sum():item()", "6\n")
says("with DDP_SYNC=1 by the op itself", "DDP_SYNC=1", LABELS .. "ddp.nn.functional.cross_entropy(x, y); return 'no error'", "cross_entropy: id 12, expected 0 to 9")

child.clean()
t.done()
