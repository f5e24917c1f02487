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

local a, w = ddp.randn(4, 64, 16, 16), ddp.randn(64, 32, 3, 3)
local grouped = kernel_of(function() return ops.conv2d(a, w, nil, 1, 1, 1, 2) end)
say("oneDNN", "%s", grouped:find "onednn" and "loaded" or "not there")
if not grouped:find "onednn" then slow[#slow + 1] = "oneDNN is missing (libddp_onednn.so): grouped convolutions and large products run on plain loops" end

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
