-- conv_cases.lua -- shapes of convolutions for tests, and what kernels this processor and DDP_ISA give them.
local M = {}

local function pair(v) return type(v) == "table" and v or { v, v } end

-- x [n, c, h, w], window r x s to k channels; stride, padding, dilation; groups = c where depthwise.
function M.case(n, c, h, w, k, window, stride, padding, more)
  local v = { n = n, c = c, h = h, w = w, k = k, r = pair(window)[1], s = pair(window)[2], stride = pair(stride or 1), padding = pair(padding or 0) }
  v.dilation, v.groups = { 1, 1 }, 1
  for key, value in pairs(more or {}) do v[key] = value end
  v.ho = math.floor((h + 2 * v.padding[1] - v.dilation[1] * (v.r - 1) - 1) / v.stride[1]) + 1
  v.wo = math.floor((w + 2 * v.padding[2] - v.dilation[2] * (v.s - 1) - 1) / v.stride[2]) + 1
  v.name = ("%dx%dx%dx%d to %d by %dx%d stride %d,%d padding %d,%d%s%s"):format(n, c, h, w, k, v.r, v.s, v.stride[1], v.stride[2], v.padding[1], v.padding[2],
    v.dilation[1] > 1 and " dilation " .. v.dilation[1] or "", v.groups > 1 and " groups " .. v.groups or "")
  return v
end
function M.depthwise(n, c, h, w, window, stride, padding) return M.case(n, c, h, w, c, window, stride, padding, { groups = c }) end

local function flags()
  for line in io.lines "/proc/cpuinfo" do if line:match "^flags" then return line .. " " end end
  return ""
end
local isa, cap = "v2", os.getenv "DDP_ISA"
if flags():find " avx2 " and cap ~= "sse" then isa = "v3" end
if flags():find " avx512bw " and flags():find " avx512vl " and (cap == nil or cap == "avx512" or cap == "amx") then isa = "v4" end

-- AMX multiplies bf16, and f32 in two parts.
local has_amx = os.getenv "DDP_AMX" == "emulate" or (flags():find " amx_bf16 " and flags():find " amx_tile ")
local pairs_of_bf16 = isa == "v4" and flags():find " avx512_bf16 "
local amx = pairs_of_bf16 and has_amx and (cap == nil or cap == "amx")

M.isa, M.amx, M.pairs_of_bf16 = isa, amx, pairs_of_bf16
return M
