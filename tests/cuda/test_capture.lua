-- test_capture.lua -- a forward and backward recorded once as a CUDA graph, and replayed with other numbers in the same memory.
package.path = "tests/cuda/?.lua;" .. package.path
local t = require "harness"
local ffi = require "ffi"
local ddp = require "ddp"
local base = require "ddp.ffi"
local F = ddp.nn.functional
ffi.cdef [[
typedef struct ddp_capture ddp_capture;
int ddp__captures(int op);
int ddp__capture_begin(int i);
int ddp__capture_end(int i, ddp_capture **out);
int ddp__capture_run(const ddp_capture *c);
void ddp__capture_free(ddp_capture *c);
]]
local cuda = ffi.load(os.getenv "DDP_LIB" .. "/libddp_cuda.so")

local net = ddp.models.resnet20 { num_classes = 10, in_channels = 1 }:to "cuda"
local x = ddp.zeros(2, 1, 8, 8, { device = "cuda" })
local y = ddp.tensor({ 3, 7 }, { dtype = "i64", device = "cuda" })
local function step()
  local loss = F.cross_entropy(net(x), y)
  net:zero_grad()
  loss:backward()
  return loss
end
local function numbers(seed)
  ddp.manual_seed(seed)
  x:copy_(ddp.randn(2, 1, 8, 8))
end

-- Runs step once into a graph; what it made is kept, for the graph writes there.
local function record()
  numbers(1)
  for _ = 1, 3 do step() end -- all memory is in the cache, all plans are made
  collectgarbage()
  collectgarbage "stop"
  base.check(cuda.ddp__capture_begin(0))
  local loss = step()
  local out = ffi.new "ddp_capture *[1]"
  base.check(cuda.ddp__capture_end(0, out))
  return loss, out[0]
end

t.test("a recorded forward and backward gives, replayed, the bits of one that runs", function()
  local loss, graph = record()
  local weight = net:parameters()[1]
  local recorded = weight.grad
  for seed = 2, 4 do
    numbers(seed)
    base.check(cuda.ddp__capture_run(graph))
    local by_graph, grad_by_graph = loss:item(), recorded:to "cpu"
    local plain = step()
    t.eq(by_graph, plain:item())
    t.ok((grad_by_graph - weight.grad:to "cpu"):abs():max():item() == 0, "its gradient")
  end
  cuda.ddp__capture_free(graph)
  collectgarbage "restart"
end)

t.test("what the host takes part in is never captured, what draws has arguments of its own", function()
  local list, id = {}, 0
  for line in io.lines "core/op/ops.def" do
    local name = line:match "^OP%(([%w_]+),"
    if name then
      list[name] = cuda.ddp__captures(id)
      if line:match "%f[%w]RANDOM%f[%W]" and name ~= "randperm" then t.eq(list[name], 1, name) end
      if line:match "%f[%w]COLLECTIVE%f[%W]" then t.eq(list[name], 2, name) end
      id = id + 1
    end
  end
  t.eq(list.conv2d, 0)
  t.eq(list.to_device, 2)
  t.eq(list.sgd_step, 1)
end)

t.test("reading a number while recording is refused, and the GPU goes on", function()
  base.check(cuda.ddp__capture_begin(0))
  local ok, err = pcall(function() return (x + 1):sum():item() end)
  t.ok(not ok and tostring(err):find "CUDA error", tostring(err))
  local out = ffi.new "ddp_capture *[1]"
  t.ok(cuda.ddp__capture_end(0, out) < 0, "the capture is void")
  pcall(base.raise)
  t.eq((x * 0 + 1):sum():item(), 128)
end)
t.done()
