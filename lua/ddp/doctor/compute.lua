-- compute.lua -- `ddprun doctor`: the processor, which kernels run on it, and whether training does.
local find = require("ddp.doctor.system").find

local M = {}
local ddp, ops -- loaded by start

-- Whether libddp can be loaded; the rest of this file needs it.
function M.start(r)
  local ok, why = pcall(function() ddp, ops = require "ddp", require "ddp.ops" end)
  if ok then
    r.say("ddp", "%s, %s%s", ddp.version():gsub("^ddp ", ""), jit.version, jit.status() and "" or ", its JIT off")
  else
    r.say("ddp", "cannot be loaded")
    r.broken("libddp: %s", (tostring(why):match "[^\n]*"))
  end
  return ok
end

-- The kernel that fn's last op runs on.
local function kernel_of(fn)
  local rows = ddp.profile(function() ddp.no_grad(fn) end)
  return rows[#rows].kernel
end

local function flags() return " " .. (find("/proc/cpuinfo", "^flags%s*:(.*)") or "") .. " " end

function M.processor(r)
  r.say("processor", "%s", find("/proc/cpuinfo", "^model name%s*:%s*(.*)") or "unknown")
  if not flags():find(" sse4_2 ", 1, true) then r.broken "this processor has no SSE 4.2, which every vectorised kernel needs: take one of 2009 or later" end
end

-- What plain f32 ops run on; its short name.
local function instructions(r)
  local x = ddp.randn(1000)
  local isa = kernel_of(function() return x + x end):match "%.(v%d)$"
  local cap = os.getenv "DDP_ISA"
  local names = { v2 = "SSE 4.2", v3 = "AVX2", v4 = "AVX-512" }
  r.say("instructions", "%s%s; %d thread%s a rank", names[isa] or "plain loops", cap and ", capped by DDP_ISA=" .. cap or "",
    ddp.num_threads(), ddp.num_threads() == 1 and "" or "s")
  if isa ~= "v3" and isa ~= "v4" then
    r.slow("%s: everything runs, but convolutions and 16-bit products fall to oneDNN or plain loops, many times slower",
      cap and "DDP_ISA leaves out AVX2" or "this processor has no AVX2")
  end
  return isa
end

local function product_of(t) return kernel_of(function() return t:matmul(t) end) end

-- What multiplies bf16, and f32 of precision "high".
local function products(r, isa)
  local has = flags()
  local by_amx = product_of(ddp.randn(128, 128):to "bf16"):find(".amx.", 1, true)
  local emulated = os.getenv "DDP_AMX" == "emulate"
  local why = ""
  if has:find " amx_bf16 " and has:find " amx_tile " and not by_amx then
    why = os.getenv "DDP_ISA" and "; AMX is left out by DDP_ISA" or "; AMX is not lent by the system, or failed its check"
  end
  local pairs_too = isa == "v4" and has:find " avx512_bf16 "
  r.say("bf16 products", "%s%s", by_amx and (emulated and "AMX, emulated" or "AMX") or pairs_too and "pairs (AVX512_BF16)" or "widened to f32", why)
  if by_amx and emulated then r.slow "DDP_AMX=emulate is for tests: tiles are plain loops in memory" end
  ddp.set_float32_matmul_precision "high"
  r.say("f32 \"high\"", "%s", product_of(ddp.randn(128, 128)):find(".amx.", 1, true) and "two bf16 parts by AMX" or "as \"highest\": there is no AMX")
  ddp.set_float32_matmul_precision "highest"
end

local function onednn(r)
  local a, w = ddp.randn(4, 64, 16, 16), ddp.randn(64, 32, 3, 3)
  local there = kernel_of(function() return ops.conv2d(a, w, nil, 1, 1, 1, 2) end):find "onednn"
  r.say("oneDNN", "%s", there and "loaded" or "not there")
  if not there then r.slow "oneDNN is missing (libddp_onednn.so): grouped convolutions and large products run on plain loops; install libdnnl-dev and build" end
end

local function speed(r)
  local m = ddp.randn(512, 512)
  local function product()
    local begin = os.clock()
    for _ = 1, 20 do m:matmul(m) end
    return 20 * 2 * 512 ^ 3 / (os.clock() - begin) / 1e9
  end
  ddp.no_grad(product)
  r.say("f32 products", "%.0f GFLOP/s of processor time", ddp.no_grad(product))
end

local function gradient(r)
  local y = ddp.ones(8, 8, { requires_grad = true })
  y:matmul(y):sum():backward()
  local right = math.abs(y.grad:sum():item() - 1024) < 1e-3 -- 16 for each of 64
  r.say("a gradient", right and "works" or "is wrong")
  if not right then r.broken "the gradient of a product is wrong: this build or this processor can't be trusted; run make test" end
end

function M.kernels(r)
  products(r, instructions(r))
  onednn(r)
  speed(r)
  gradient(r)
end

return M
