-- What `ddprun doctor` runs: what is installed, what works, what is slow, and why. Status 0 unless something does not work.
local ddp = require "ddp"
local ops = require "ddp.ops"

local function first_line(path, pattern)
  local f = io.open(path)
  if not f then return nil end
  for line in f:lines() do
    local found = line:match(pattern)
    if found then f:close() return found end
  end
  f:close()
end
local slow = {}
local function say(what, fmt, ...) print(("%-14s"):format(what) .. fmt:format(...)) end
-- The kernel that fn's last op runs on.
local function kernel_of(fn)
  local rows = ddp.profile(function() ddp.no_grad(fn) end)
  return rows[#rows].kernel
end

say("ddp", "%s, %s", ddp.version():gsub("^ddp ", ""), jit.version)
say("processor", "%s; %d thread%s a rank", first_line("/proc/cpuinfo", "^model name%s*:%s*(.*)") or "unknown", ddp.num_threads(), ddp.num_threads() == 1 and "" or "s")

local x = ddp.randn(1000)
local isa = kernel_of(function() return x + x end):match "%.(v%d)$"
local NAMES = { v2 = "SSE 4.2", v3 = "AVX2", v4 = "AVX-512" }
say("instructions", "%s%s", NAMES[isa] or "plain loops", os.getenv "DDP_ISA" and ", capped by DDP_ISA=" .. os.getenv "DDP_ISA" or "")
if isa ~= "v3" and isa ~= "v4" then
  slow[#slow + 1] = ("%s: everything runs, but convolutions and 16-bit products fall to oneDNN or plain loops, many times slower")
    :format(os.getenv "DDP_ISA" and "DDP_ISA leaves out AVX2" or "this processor has no AVX2")
end

-- What multiplies bf16, and f32 of precision "high".
local flags = (first_line("/proc/cpuinfo", "^flags%s*:(.*)") or "") .. " "
local half = ddp.randn(128, 128):to "bf16"
local function product_of(t) return kernel_of(function() return t:matmul(t) end) end
local by_amx = product_of(half):find(".amx.", 1, true)
local emulated = os.getenv "DDP_AMX" == "emulate"
local has_amx = flags:find " amx_bf16 " and flags:find " amx_tile "
local why = ""
if has_amx and not by_amx then why = os.getenv "DDP_ISA" and "; AMX is left out by DDP_ISA" or "; AMX is not lent by the system, or failed its check" end
local pairs_too = isa == "v4" and flags:find " avx512_bf16 "
say("bf16 products", "%s%s", by_amx and (emulated and "AMX, emulated" or "AMX") or pairs_too and "pairs (AVX512_BF16)" or "widened to f32", why)
if by_amx and emulated then slow[#slow + 1] = "DDP_AMX=emulate is for tests: tiles are plain loops in memory" end
ddp.set_float32_matmul_precision "high"
say("f32 \"high\"", "%s", product_of(ddp.randn(128, 128)):find(".amx.", 1, true) and "two bf16 parts by AMX" or "as \"highest\": there is no AMX")
ddp.set_float32_matmul_precision "highest"

local a, w = ddp.randn(4, 64, 16, 16), ddp.randn(64, 32, 3, 3)
local grouped = kernel_of(function() return ops.conv2d(a, w, nil, 1, 1, 1, 2) end)
say("oneDNN", "%s", grouped:find "onednn" and "loaded" or "not there")
if not grouped:find "onednn" then slow[#slow + 1] = "oneDNN is missing (libddp_onednn.so): grouped convolutions and large products run on plain loops" end

-- Engines over a library are files beside libddp.so.
local function plugin(name)
  local f = io.open((os.getenv "DDP_LIB" or ".") .. "/libddp_" .. name .. ".so")
  if f then f:close() end
  return f and name
end
local mpis = {}
for _, name in ipairs { "openmpi", "mpich" } do mpis[#mpis + 1] = plugin(name) end
say("engines", "shm%s%s", plugin "gloo" and ", gloo, hier" or "", #mpis > 0 and (", mpi (%s)"):format(table.concat(mpis, ", ")) or "")

local kb = tonumber(first_line("/proc/meminfo", "^MemAvailable:%s*(%d+)") or 0)
say("memory", "%.1f GB free; huge pages: %s", kb / 2 ^ 20, first_line("/sys/kernel/mm/transparent_hugepage/enabled", "%[(%w+)%]") or "unknown")
if first_line("/sys/kernel/mm/transparent_hugepage/enabled", "%[(never)%]") then
  slow[#slow + 1] = "huge pages are off: large tensors cost more (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
end
say("GPU", "not used in this build")

local m = ddp.randn(512, 512)
local function product()
  local begin = os.clock()
  for _ = 1, 20 do m:matmul(m) end
  return 20 * 2 * 512 ^ 3 / (os.clock() - begin) / 1e9
end
ddp.no_grad(product)
say("f32 products", "%.0f GFLOP/s of processor time", ddp.no_grad(product))

local y = ddp.randn(8, 8, { requires_grad = true })
y:matmul(y):sum():backward()
if not (y.grad:abs():sum():item() > 0) then error("a gradient came out as zero", 0) end
say("a gradient", "works")
for _, text in ipairs(slow) do say("slow", "%s", text) end
if #slow == 0 then say("slow", "nothing") end
