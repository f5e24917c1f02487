-- micro.lua -- what a launch, a byte and an operation cost on a GPU: one line each, best of several runs. --scale 1: sizes that fill a GPU.
-- --sheet NAME: beside the data sheet (devices.lua).
package.path = "tests/bench/gpu/?.lua;" .. package.path
local ddp = require "ddp"
local C, ops = require("ddp.ffi").C, require "ddp.ops"
local free = require("ddp.ffi").free
local opts = ddp.args { scale = 1, sheet = "" }
local sheet = opts.sheet ~= "" and require("devices")[opts.sheet] or nil
local GPU = 1 -- the core's number of cuda:0
local function wait() if C.ddp_device_wait(GPU) < 0 then error "the GPU does not answer" end end

-- Seconds a call of fn, `n` queued at a time and waited for together; the best of five. Results are dropped at once. Second: host seconds alone.
local function timed(n, fn)
  local best, host = math.huge, math.huge
  for _ = 1, 5 do
    wait()
    local begin = C.ddp_now()
    for _ = 1, n do
      local r = fn()
      if ddp.is_tensor(r) then free(r) end
    end
    local queued = C.ddp_now()
    wait()
    best, host = math.min(best, (C.ddp_now() - begin) / n), math.min(host, (queued - begin) / n)
  end
  return best, host
end
local function share(value, of) return sheet and ("  %3.0f %% of the data sheet"):format(100 * value / of) or "" end
local function line(what, value, unit, of) print(("%-44s %10.3f %s%s"):format(what, value, unit, of and share(value, of) or "")) end
local function times(n) return math.max(1, math.floor(n * opts.scale)) end

local one, value = ddp.zeros(1):to "cuda", 0
local function launch() value = 1 - value; ops.fill_(one, value) end
local each, host = timed(times(5000), launch)
line("fill of one element, a queue of them", each * 1e6, "us each")
line("  of which on the host", host * 1e6, "us each")
line("fill of one element, waited for", timed(1, launch) * 1e6, "us")
local function allocate() return ddp.empty(1000, { device = "cuda" }) end
line("allocation of 4 KB, and its release", timed(times(2000), allocate) * 1e6, "us each")

local m = ddp.randn(times(1024 * 1024)):to "cuda"
local function mega(t) return t:numel() / 1e6 end
line(("add of %.2f M elements, f32 (may lie in L2)"):format(mega(m)), 12 * m:numel() / timed(times(200), function() return ops.add(m, m) end) / 1e9, "GB/s")
local big, other = ddp.zeros(times(2 ^ 28), { device = "cuda" }), ddp.ones(times(2 ^ 28), { device = "cuda" })
line(("add of %.2f M elements, f32"):format(mega(big)), 12 * big:numel() / timed(times(20), function() return ops.add(big, other) end) / 1e9, "GB/s", sheet and sheet.gb_per_s)
local copied = 8 * big:numel() / timed(times(20), function() return ops.clone(big, true) end) / 1e9
line(("copy of %.2f MB on the GPU"):format(4 * mega(big)), copied, "GB/s read and written", sheet and sheet.gb_per_s)
big, other = nil, nil -- luacheck: ignore 311
collectgarbage()
local host_side = ddp.zeros(times(2 ^ 26))
line(("copy of %.2f MB to the GPU"):format(4 * mega(host_side)), 4 * host_side:numel() / timed(1, function() return host_side:to "cuda" end) / 1e9, "GB/s")
local gpu_side = host_side:to "cuda"
line(("copy of %.2f MB from the GPU"):format(4 * mega(gpu_side)), 4 * gpu_side:numel() / timed(1, function() return gpu_side:to "cpu" end) / 1e9, "GB/s")
host_side, gpu_side = nil, nil -- luacheck: ignore 311
collectgarbage()

local DTYPES = { { "f32", "f32", "highest" }, { "TF32", "f32", "high" }, { "bf16", "bf16", "highest" } }
local PEAK = { f32 = "f32", TF32 = "tf32", bf16 = "half" }
local n = math.max(16, math.floor(8192 * opts.scale ^ (1 / 3)))
for _, d in ipairs(DTYPES) do
  ddp.set_float32_matmul_precision(d[3])
  local a = ddp.randn(n, n):to("cuda"):to(d[2])
  local seconds = timed(times(8), function() return ops.matmul(a, a) end)
  line(("product of two %d x %d, %s"):format(n, n, d[1]), 2 * n ^ 3 / seconds / 1e12, "TFLOP/s", sheet and sheet[PEAK[d[1]]])
end
local batch = math.max(1, math.floor(128 * opts.scale))
for _, d in ipairs(DTYPES) do
  ddp.set_float32_matmul_precision(d[3])
  local x = ddp.randn(batch, 28, 28, 128):permute(1, 4, 2, 3):to("cuda"):to(d[2])
  local w = ddp.randn(128, 128, 3, 3):to("cuda"):to(d[2])
  local flops = 2 * batch * 28 * 28 * 128 * 128 * 9
  local seconds = timed(times(20), function() return ops.conv2d(x, w, nil, 1, 1) end)
  line(("convolution 3x3, %d x 128 x 28 x 28, %s"):format(batch, d[1]), flops / seconds / 1e12, "TFLOP/s", sheet and sheet[PEAK[d[1]]])
end
