-- host.lua -- tensors between a C program and its Lua side. Addresses come as light userdata.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local C = base.C

local M = {}

-- A handle of Lua's own on the C program's tensor; nil for NULL.
local function adopt(address)
  local t = ffi.cast("ddp_tensor *", address)
  if t == nil then return nil end
  return base.own(C.ddp_retain(t))
end

function M.set(name, address) _G[name] = adopt(address) end

local function give(out, i, v, name)
  if v == nil then return end
  if type(v) == "number" then
    local buf = ffi.new("double[1]", v)
    out[i] = C.ddp_from_data(buf, 0, nil, C.DDP_F64, C.DDP_CPU)
  elseif tensor.is_tensor(v) then
    out[i] = C.ddp_retain(v)
  else
    error(("%s: result %d is a %s, expected a tensor or a number"):format(name, i + 1, type(v)), 0)
  end
end

function M.call(name, nin, in_address, nout, out_address)
  local fn = _G[name]
  if type(fn) ~= "function" then error(("no global function \"%s\" (it is a %s)"):format(name, type(fn)), 0) end
  local ins = ffi.cast("ddp_tensor **", in_address)
  local args = {}
  for i = 1, nin do args[i] = adopt(ffi.cast("void *", ins[i - 1])) end
  local results = { fn(unpack(args, 1, nin)) }
  local out = ffi.cast("ddp_tensor **", out_address)
  for i = 1, nout do give(out, i - 1, results[i], name) end
end

return M
