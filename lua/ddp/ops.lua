-- ops.lua -- a Lua function for each op, made from its signature when it is first used. One function an op, written out
-- as source, so that a trace sees straight code.
local ffi = require "ffi"
local base = require "ddp.ffi"
local signatures = require "ddp.ops_sig"

local support = {
  ffi = ffi, C = base.C, own = base.own, raise = base.raise, out_of_memory = base.out_of_memory, fail = base.error,
  is_options = base.is_options, options = base.options, dtype = base.dtype, device = base.device, type = type,
  tonumber = tonumber, is_tensor = base.is_tensor, release = base.C.ddp_release, huge = math.huge,
}

-- A number as a tensor; the caller releases it.
function support.scalar(v)
  local s = base.C.ddp_scalar(v)
  if s == nil and base.out_of_memory() then s = base.C.ddp_scalar(v) end
  if s == nil then base.raise() end
  return s
end

function support.describe(x) return type(x) == "cdata" and tostring(ffi.typeof(x)) or type(x) end

-- Dims and positions count from 1; -1 is the last.
function support.from_one(v, what)
  if type(v) ~= "number" then base.error(("%s is a %s, expected a number"):format(what, type(v))) end
  if v > 0 then return v - 1 end
  if v == 0 then base.error(what .. " is 0; dims and positions count from 1, or from -1 back") end
  return v
end

function support.number(v, what)
  if type(v) == "number" then return v end
  base.error(("%s is %s, expected a number"):format(what, v == nil and "missing" or "a " .. type(v)))
end

function support.pair(buf, v, what)
  if type(v) == "number" then buf[0], buf[1] = v, v return buf end
  if type(v) == "table" and type(v[1]) == "number" and type(v[2]) == "number" and #v == 2 then buf[0], buf[1] = v[1], v[2] return buf end
  base.error(("%s is %s, expected a number or two"):format(what, v == nil and "missing" or "a " .. type(v)))
end

-- A list of numbers into buf; returns how many. `shift`: dims, counted from 1.
function support.list(buf, v, what, shift)
  if type(v) == "number" then v = {v} end
  if type(v) ~= "table" then base.error(("%s is %s, expected a list of numbers"):format(what, v == nil and "missing" or "a " .. type(v))) end
  if #v > 8 then base.error(("%s has %d values, at most 8"):format(what, #v)) end
  for i = 1, #v do buf[i - 1] = shift and support.from_one(v[i], what) or support.number(v[i], what) end
  return #v
end

function support.tensors(list, what)
  if type(list) ~= "table" then base.error(("%s is a %s, expected a list of tensors"):format(what, type(list))) end
  local buf = ffi.new("ddp_tensor *[?]", math.max(#list, 1))
  for i = 1, #list do
    if not base.is_tensor(list[i]) then base.error(("%s[%d] is a %s, expected a tensor"):format(what, i, support.describe(list[i]))) end
    buf[i - 1] = list[i]
  end
  return buf, #list
end

local function input_code(e, op, i, inp, numbers)
  if inp.list then
    e("local l%d, n = support.tensors(a%d, '%s: %s')", i, i, op, inp.name)
    return "l" .. i
  end
  e("if type(a%d) ~= 'cdata' then", i)
  if numbers and i > 1 then e("  if type(a%d) == 'number' then a%d = support.scalar(a%d); s%d = a%d else", i, i, i, i, i) end
  if inp.optional then e("  if a%d ~= nil then", i) end
  e("  fail('%s: %s is ' .. (a%d == nil and 'missing' or 'a ' .. support.describe(a%d)) .. ', expected a tensor')", op, inp.name, i, i)
  if inp.optional then e "  end" end
  if numbers and i > 1 then e "  end" end
  e "end"
  return "a" .. i
end

local LITERAL = { none = "nil", inf = "huge", ["-inf"] = "-huge" } -- a device that is not named is the default one

local function attr_code(e, op, k, at, args)
  local what = ("'%s: %s'"):format(op, at.name)
  local t, def = at.type, at.default
  if def then
    local lit = t == "device" and "nil" or LITERAL[def] or t == "dtype" and ("'%s'"):format(def) or def
    if lit ~= "nil" then e("if p%d == nil then p%d = %s end", k, k, lit) end
  end
  if t == "int" or t == "float" then args[#args + 1] = ("support.number(p%d, %s)"):format(k, what)
  elseif t == "dim" or t == "pos" then
    -- A default is C's number already.
    if def then args[#args + 1] = ("(g%d and p%d or support.from_one(p%d, %s))"):format(k, k, k, what)
    else args[#args + 1] = ("support.from_one(p%d, %s)"):format(k, what) end
  elseif t == "bool" then args[#args + 1] = ("(p%d and 1 or 0)"):format(k)
  elseif t == "dtype" then args[#args + 1] = ("support.dtype(p%d, %s)"):format(k, what)
  elseif t == "device" then args[#args + 1] = ("support.device(p%d, %s)"):format(k, what)
  elseif t == "int2" then args[#args + 1] = ("support.pair(b%d, p%d, %s)"):format(k, k, what)
  else
    local list = ("support.list(b%d, p%d, %s, %s)"):format(k, k, what, tostring(t == "dims"))
    if def == "none" then args[#args + 1] = ("(p%d == nil and -1 or %s)"):format(k, list) else args[#args + 1] = list end
    args[#args + 1] = "b" .. k
  end
end

local BINARY = { add = 1, sub = 1, mul = 1, div = 1, pow = 1, maximum = 1, minimum = 1, eq = 1, ne = 1, lt = 1, le = 1, gt = 1, ge = 1, where = 1 }

-- The source of one op's function. in_place: the form that writes its first input and returns it.
local function source(name, sig, in_place)
  local lines, params, args = {}, {}, {}
  local function e(fmt, ...) lines[#lines + 1] = select("#", ...) > 0 and fmt:format(...) or fmt end
  e "local support = ..."
  e "local ffi, C, own, fail, type, huge, release = support.ffi, support.C, support.own, support.fail, support.type, support.huge, support.release"
  local cname = "ddp_" .. name .. (in_place and not sig.only_in_place and "_" or "")
  local label = name .. (in_place and not sig.only_in_place and "_" or "")
  e("local f = C.%s", cname)
  local names = {}
  for k, at in ipairs(sig.attrs) do
    names[k] = ("%q"):format(at.name)
    if at.type == "int2" then e("local b%d = ffi.new 'int64_t[2]'", k)
    elseif at.type == "dims" or at.type == "shape" then e("local b%d = ffi.new 'int64_t[8]'", k) end
  end
  e("local known = {%s}", table.concat(names, ", "))
  for i = 1, #sig.inputs do params[#params + 1] = "a" .. i end
  for k = 1, #sig.attrs do params[#params + 1] = "p" .. k end
  local n_out = in_place and 0 or sig.n_out
  if n_out > 1 then for i = 1, n_out do e("local o%d = ffi.new 'ddp_tensor *[1]'", i) end end
  e("return function(%s)", table.concat(params, ", "))
  if #sig.attrs > 0 then
    e "local o"
    for k = 1, #sig.attrs do
      e("%s type(p%d) == 'table' and support.is_options(p%d) then o, p%d = p%d, nil", k == 1 and "if" or "elseif", k, k, k, k)
    end
    e "end"
    e("if o then support.options('%s', o, known)", label)
    for k, at in ipairs(sig.attrs) do e("if p%d == nil then p%d = o[%q] end", k, k, at.name) end
    e "end"
    for k, at in ipairs(sig.attrs) do if (at.type == "dim" or at.type == "pos") and at.default then e("local g%d = p%d == nil", k, k) end end
  end
  local numbers = BINARY[name]
  if numbers then for i = 2, #sig.inputs do e("local s%d", i) end end
  local n_passed = false
  for i, inp in ipairs(sig.inputs) do
    local a = input_code(e, label, i, inp, numbers)
    if inp.list and not n_passed then args[#args + 1] = "n"; n_passed = true end
    args[#args + 1] = a
  end
  for k, at in ipairs(sig.attrs) do attr_code(e, label, k, at, args) end
  if n_out > 1 then for i = 1, n_out do args[#args + 1] = "o" .. i end end
  local call = ("f(%s)"):format(table.concat(args, ", "))
  local status = in_place or n_out > 1
  e("local r = %s", call)
  e("if %s and support.out_of_memory() then r = %s end", status and "r < 0" or "r == nil", call)
  if numbers then for i = 2, #sig.inputs do e("if s%d then release(s%d) end", i, i) end end
  if in_place then
    e "if r < 0 then support.raise() end"
    e "return a1"
  elseif n_out > 1 then
    e "if r < 0 then support.raise() end"
    local outs = {}
    for i = 1, n_out do outs[i] = ("own(o%d[0])"):format(i) end
    e("return %s", table.concat(outs, ", "))
  else
    e "return own(r)"
  end
  e "end"
  return table.concat(lines, "\n")
end

local here = debug.getinfo(1, "S").source:match "^@(.*)ops%.lua$" or "?" -- so that generated code counts as the library's

local function make(key)
  local name, sig = key, signatures[key]
  local in_place = sig and sig.only_in_place
  if not sig then
    name, in_place = key:match "^(.*)_$", true
    sig = name and signatures[name]
    if not sig or not sig.in_place then return nil end
  end
  return assert(loadstring(source(name, sig, in_place), "@" .. here .. "op " .. key))(support)
end

-- ops.add, ops.add_, ...: nil for what is no op.
return setmetatable({}, { __index = function(t, key)
  local f = type(key) == "string" and make(key) or nil
  if f then rawset(t, key, f) end
  return f
end })
