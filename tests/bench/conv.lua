-- conv.lua -- every convolution of ResNet-18 and ResNet-50 (CIFAR stem), all three passes: the kernel that is chosen by
-- default, ours through oneDNN alone, and PyTorch's better layout (torch_conv.py, where --python has a torch). Useful
-- GFLOP/s (two an element of the product, whatever the kernel does), best of several runs, random data, one thread.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local ops = require "ddp.ops"
local opts = ddp.args { models = "resnet18,resnet50", batch = 64, dtypes = "f32,bf16", seconds = .1, first = 1000, python = "" }

-- {c, h, o, k, stride, padding, times = uses in a network}: each once, in the order of the networks.
local function shapes()
  local list, seen = {}, {}
  for name in opts.models:gmatch "[^,]+" do
    local model = ddp.models[name] { num_classes = 10, stem = "cifar" }
    local forward = ops.conv2d
    local function note(x, w, bias, stride, padding)
      local xs, ws = x:size(), w:size()
      local two = function(v) return type(v) == "table" and v[1] or v or 1 end
      local s = { c = xs[2], h = xs[3], o = ws[1], k = ws[3], stride = two(stride), padding = type(padding) == "table" and padding[1] or padding or 0 }
      local key = table.concat({ s.c, s.h, s.o, s.k, s.stride }, " ")
      if not seen[key] then
        seen[key] = s
        list[#list + 1] = s
      end
      return forward(x, w, bias, stride, padding)
    end
    rawset(ops, "conv2d", note)
    ddp.no_grad(function() model(bench.channels_last(1, 3, 32, 32)) end)
    rawset(ops, "conv2d", forward)
  end
  while #list > opts.first do list[#list] = nil end
  return list
end

local PASSES = { "forward", "grad_input", "grad_weight" }

-- The three passes of s as functions, for `batch` images.
local function calls(s, batch, dtype)
  local out = math.floor((s.h + 2 * s.padding - s.k) / s.stride) + 1
  local x = bench.channels_last(batch, s.c, s.h, s.h):to(dtype)
  local g = bench.channels_last(batch, s.o, out, out):to(dtype)
  local w = ddp.randn(s.o, s.c, s.k, s.k):to(dtype)
  local x_size, w_size = x:size(), w:size()
  return {
    forward = function() return ops.conv2d(x, w, nil, s.stride, s.padding) end,
    grad_input = function() return ops.conv2d_grad_input(g, w, x_size, s.stride, s.padding) end,
    grad_weight = function() return ops.conv2d_grad_weight(g, x, w_size, s.stride, s.padding) end,
  }, 2 * batch * out * out * s.o * s.c * s.k * s.k
end

-- PyTorch's seconds by "index dtype pass"; none without a torch.
local function torch_times(list)
  local times = {}
  if opts.python == "" then return times end
  local name = os.tmpname()
  local file = assert(io.open(name, "w"))
  for _, s in ipairs(list) do file:write(("%d %d %d %d %d %d\n"):format(s.c, s.h, s.o, s.k, s.stride, s.padding)) end
  file:close()
  local pipe = assert(io.popen(("%s tests/bench/torch_conv.py %s %d %s %g"):format(opts.python, name, opts.batch, opts.dtypes, opts.seconds)))
  for line in pipe:lines() do
    local key, seconds = line:match "^(%d+ %w+ [%w_]+) ([%d.e+-]+)$"
    if key then times[key] = tonumber(seconds) end
  end
  pipe:close()
  os.remove(name)
  return times
end

-- Seconds and kernel, by the kernels of `list` (nil: as it is chosen), or nil where none of them takes it, or only the
-- reference's loops, which one image shows.
local function ours(s, pass, dtype, list)
  local one, all = calls(s, 1, dtype)[pass], calls(s, opts.batch, dtype)[pass]
  local function run()
    one()
    if bench.last_kernel():find "%.ref" then return nil end
    return { bench.best(all, opts.seconds), bench.last_kernel() }
  end
  local result
  if list then result = bench.with_list(list, run)
  else
    local ok, r = pcall(run)
    result = ok and r or nil
  end
  if result then return result[1], result[2] end
end

local list = shapes()
local torch = torch_times(list)
local sums = {}
local function rate(flops, seconds) return seconds and ("%.0f"):format(flops / seconds / 1e9) or "-" end
print(("batch %d, useful GFLOP/s on one thread, best of runs; ratio: ours over the better of the two others"):format(opts.batch))
print(("%-30s %-5s %-12s %-26s %7s %7s %7s %6s"):format("c x h, o, kernel/stride", "dtype", "pass", "kernel", "ours", "oneDNN", "PyTorch", "ratio"))
for i, s in ipairs(list) do
  for dtype in opts.dtypes:gmatch "[^,]+" do
    for _, pass in ipairs(PASSES) do
      local _, flops = calls(s, opts.batch, dtype)
      local mine, kernel = ours(s, pass, dtype)
      local onednn = mine and kernel:find "onednn" and mine or ours(s, pass, dtype, "onednn")
      local theirs = torch[("%d %s %s"):format(i, dtype, pass)]
      local other = math.min(onednn or math.huge, theirs or math.huge)
      local ratio = mine and other < math.huge and ("%.2f"):format(other / mine) or "-"
      print(("%-30s %-5s %-12s %-26s %7s %7s %7s %6s"):format(("%d x %d, %d, %d/%d"):format(s.c, s.h, s.o, s.k, s.stride), dtype, pass,
        kernel or "-", rate(flops, mine), rate(flops, onednn), rate(flops, theirs), ratio))
      local key = dtype .. " " .. pass
      local sum = sums[key] or { ours = 0, theirs = 0, n = 0 }
      sums[key] = sum
      if mine and theirs then sum.ours, sum.theirs, sum.n = sum.ours + mine, sum.theirs + theirs, sum.n + 1 end
      collectgarbage()
    end
  end
end
for dtype in opts.dtypes:gmatch "[^,]+" do
  for _, pass in ipairs(PASSES) do
    local sum = sums[dtype .. " " .. pass]
    if sum and sum.n > 0 then
      print(("%-4s %-12s each shape once: ours %.1f ms, PyTorch %.1f ms, %.2f times as fast"):format(dtype, pass, sum.ours * 1e3, sum.theirs * 1e3, sum.theirs / sum.ours))
    end
  end
end
