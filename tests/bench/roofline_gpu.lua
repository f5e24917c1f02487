-- roofline_gpu.lua -- one training step "on paper" for a GPU that is not here: the step runs on the test double, which chooses and queues as on
-- that GPU and computes nothing; what was queued is read and priced by the device's data sheet (gpu/devices.lua). Run by
-- `make roofline DEVICE=h200 ARGS="--batch 128 --amp bf16 --stem cifar"`.
package.path = "tests/bench/gpu/?.lua;" .. package.path
local ddp = require "ddp"
local devices = require "devices"
local reader = require "trace"
local opts = ddp.args({ device = "h200", model = "resnet50", stem = "imagenet", batch = 64, amp = "none", rows = 40, double = "build/cuda-double", keep = "", brief = false },
  { amp = { "none", "bf16", "f16", "tf32" }, stem = { "imagenet", "cifar" } })
local device = devices[opts.device]
if not device then
  local names = {}
  for name in pairs(devices) do names[#names + 1] = name end
  table.sort(names)
  error(("no device %s: there are %s"):format(opts.device, table.concat(names, ", ")), 0)
end
local double = io.open(opts.double .. "/libcudart.so")
if not double then error(opts.double .. " has no test double: make cuda-double builds it (it needs CUDA's headers and g++)", 0) end
double:close()

local function output(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

local cache = output("mktemp -d"):match "%S+" -- plans for GPUs that are not here stay out of the user's cache
local double_is = ("DDP_CUDA_LIBS=%s DDP_CACHE=%s DDP_DOUBLE_MODE=dry DDP_DOUBLE_LEAKS=quiet DDP_DOUBLE_CC=%d DDP_DOUBLE_SMS=%d DDP_DOUBLE_MB=%d DDP_DOUBLE_PROFILE=%s")
  :format(opts.double, cache, device.cc, device.sms, device.gb * 953, opts.device)
local step = ("luajit tests/bench/gpu/step.lua --model %s --stem %s --batch %d --amp %s"):format(opts.model, opts.stem, opts.batch, opts.amp)
-- The output of step.lua on the double, nothing computed.
local function run(environment, arguments)
  local text = output(("env %s %s %s %s 2>&1; echo status $?"):format(double_is, environment, step, arguments))
  if not text:find "status 0\n$" then error("the step does not run on the double:\n" .. text, 0) end
  return text
end

local log = opts.keep ~= "" and opts.keep or os.tmpname()
os.remove(log)
local parameters = {}
for sizes in run("DDP_DOUBLE_LOG=" .. log, "--trace " .. log):gmatch "parameter (%S+)" do parameters[#parameters + 1] = sizes end
local host_ms = tonumber(run("", "--steps 5"):match "host_ms (%S+)")
local trace = reader.analyse(log, device, { batch = opts.batch, parameters = parameters, tf32 = opts.amp == "tf32" })
if opts.keep == "" then os.remove(log) end
os.execute("rm -rf " .. cache)

local function title(text) print("\n" .. text) end

local function kernels()
  local format, head = "%-26s %-46s %5d %6d %9.1f %8.1f %9.1f  %s", "%-26s %-46s %5s %6s %9s %8s %9s  %s"
  print(head:format("kernel", "shape", "calls", "queued", "GFLOP", "MB", "limit us", "by: what one call queues"))
  local rest, calls = 0, 0
  for i, r in ipairs(trace.rows) do
    if i <= opts.rows then
      local shape = #r.shape > 46 and r.shape:sub(1, 44) .. ".." or r.shape
      print(format:format(r.kernel, shape, r.calls, r.launches, r.flops / 1e9, r.moved / 1e6, r.seconds * 1e6, r.by .. ": " .. table.concat(r.queued, " + ")))
    else
      rest, calls = rest + r.seconds, calls + r.calls
    end
  end
  if calls > 0 then print(("%-73s %5d %35.1f"):format(("%d rows more (--rows)"):format(#trace.rows - opts.rows), calls, rest * 1e6)) end
  local queued = trace.own + trace.calls_out + trace.copies
  print(("%-73s %5d %6d %9.1f %8.1f %9.1f"):format("sum", #trace.calls, queued, trace.flops / 1e9, trace.moved / 1e6, trace.seconds * 1e6))
  print(("at these limits: %.3f ms a step, %.0f images/s; no step is faster, most are slower"):format(trace.seconds * 1e3, opts.batch / trace.seconds))
end

local function launches()
  title "queued on the GPU"
  local counts = "  %d launches of own kernels, %d calls of libraries (each one kernel or a few), %d copies and fills; %d allocations from the driver"
  print(counts:format(trace.own, trace.calls_out, trace.copies, trace.allocations))
  local host = "  host: %.2f ms a step, %.2f us an op, measured on this machine on the test double, whose launches cost less or more than a driver's"
  print(host:format(host_ms, 1e3 * host_ms / #trace.calls))
end

local function activations()
  local n, bytes, times = 0, 0, {}
  for _, t in ipairs(trace.tensors) do
    if t.activation then
      n, bytes = n + 1, bytes + t.bytes
      local key = ("read %d times, written %d times"):format(t.reads, t.writes)
      times[key] = times[key] or { key = key, n = 0, bytes = 0 }
      times[key].n, times[key].bytes = times[key].n + 1, times[key].bytes + t.bytes
    end
  end
  title(("passes over the %d activations and their gradients, %.1f MB in all, by what was queued"):format(n, bytes / 1e6))
  local list = {}
  for _, k in pairs(times) do list[#list + 1] = k end
  table.sort(list, function(a, b) return a.bytes > b.bytes end)
  for _, k in ipairs(list) do print(("  %4d tensors of %9.1f MB together: %s"):format(k.n, k.bytes / 1e6, k.key)) end
  local sums = "  bytes moved %.1f MB; least possible %.1f MB (each op reads and writes each operand once, fusable passes fused): %.2f times as many"
  print(sums:format(trace.moved / 1e6, trace.least / 1e6, trace.moved / trace.least))
end

-- Groups of equal text, the largest first: {text, n, bytes}.
local function grouped(list, text_of)
  local by_text, out = {}, {}
  for _, v in ipairs(list) do
    local text, bytes = text_of(v)
    local g = by_text[text]
    if not g then
      g = { text = text, n = 0, bytes = 0 }
      by_text[text], out[#out + 1] = g, g
    end
    g.n, g.bytes = g.n + 1, g.bytes + bytes
  end
  table.sort(out, function(a, b) return a.bytes > b.bytes end)
  return out
end

local function again()
  title "activations that one op reads more than once"
  local list = grouped(trace.again, function(a)
    return ("%s reads %s %d times"):format(a.call.kernel, a.operand.name, a.reads), (a.reads - 1) * a.operand.bytes
  end)
  for _, g in ipairs(list) do print(("  %s: %d calls, %.1f MB more"):format(g.text, g.n, g.bytes / 1e6)) end
  if #list == 0 then print "  none" end
end

local function fusable()
  title "elementwise passes over activations that a neighbour could have done"
  for _, f in ipairs(trace.fusable) do print(("  %s; %.1f MB, %.1f us"):format(reader.describe(f), f.bytes / 1e6, f.bytes / device.gb_per_s / 1e3)) end
  if #trace.fusable == 0 then print "  none" end
end

if opts.brief then
  local counts = ("own %d library %d copies %d fusable %d"):format(trace.own, trace.calls_out, trace.copies, #trace.fusable)
  print(("limit_ms %.4f moved_mb %.1f %s"):format(trace.seconds * 1e3, trace.moved / 1e6, counts))
  os.exit(0)
end
local shape = opts.model == "toy" and "" or opts.stem == "cifar" and ", 32x32" or ", 224x224"
print(("%s%s, batch %d, %s: a training step on paper for %s"):format(opts.model, shape, opts.batch, opts.amp == "none" and "f32" or opts.amp, device.name))
local sheet = "data sheet: f32 %.1f, TF32 %.1f, 16 bits %.1f TFLOP/s (dense), memory %d GB/s, %d multiprocessors"
print(sheet:format(device.f32, device.tf32, device.half, device.gb_per_s, device.sms))
print()
kernels()
launches()
activations()
again()
fusable()
