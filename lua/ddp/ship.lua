-- ship.lua -- sends a Lua function to another Lua state: written down as text here, read back there. Its upvalues may be
-- tensors (shared), numbers, strings, booleans, plain tables (copied), functions under the same rule, and modules.
local ffi = require "ffi"
local base = require "ddp.ffi"
local C = base.C

ffi.cdef [[
int ddp_host_worker_hooks(const char *code, int64_t n, const char *path, const char *cpath, ddp_tensor *const *tensors,
                          int n_tensors, ddp_data_hooks *out);
]]

local M = {}

-- ---- writing ------------------------------------------------------------------------------------------------------

-- Values that the other state finds by name: loaded modules, and what stands in Lua's own and in ddp's.
local STANDARD = { _G = true, string = true, table = true, math = true, io = true, os = true, coroutine = true, debug = true, bit = true,
  jit = true, ffi = true, package = true }

local function named_values()
  local names = {}
  for name, value in pairs(package.loaded) do
    if type(value) == "table" or type(value) == "function" then names[value] = { name } end
  end
  local function fields(t, path, depth)
    for k, v in pairs(t) do
      if type(k) == "string" and (type(v) == "function" or type(v) == "table") and not names[v] then
        local at = { unpack(path) }
        at[#at + 1] = k
        names[v] = at
        if type(v) == "table" and depth > 0 then fields(v, at, depth - 1) end
      end
    end
  end
  for name, value in pairs(package.loaded) do
    if type(value) == "table" then
      if STANDARD[name] then fields(value, { name }, 0)
      elseif name == "ddp" then fields(value, { name }, 1)
      elseif name:match "^ddp%." then fields(value, { name }, 0) end
    end
  end
  return names
end

local write

local function write_text(w, s) w[#w + 1] = #s .. ":" .. s end

local function write_table(w, t, path)
  if getmetatable(t) ~= nil then
    base.error(("%s: upvalue \"%s\" is a table with a metatable, which can't go to a worker; plain tables can"):format(w.what, path))
  end
  w[#w + 1] = "{"
  for k, v in pairs(t) do
    local at = ("%s%s"):format(path, type(k) == "string" and "." .. k or "[" .. tostring(k) .. "]")
    write(w, k, at)
    write(w, v, at)
  end
  w[#w + 1] = "}"
end

local function write_function(w, fn, path)
  local ok, code = pcall(string.dump, fn)
  if not ok then base.error(("%s: %s is a function of C, which can't go to a worker"):format(w.what, path or "fn")) end
  w[#w + 1] = "F"
  write_text(w, code)
  local n = debug.getinfo(fn, "u").nups
  write_text(w, tostring(n))
  for i = 1, n do
    local name, value = debug.getupvalue(fn, i)
    write(w, value, path and path .. " > " .. name or name)
  end
end

local ALLOWED = "tensors, numbers, strings, booleans, plain tables, functions and modules can"

write = function(w, v, path)
  local kind = type(v)
  if kind == "nil" then w[#w + 1] = "n"
  elseif kind == "boolean" then w[#w + 1] = v and "t" or "f"
  elseif kind == "number" then w[#w + 1] = "d" .. ffi.string(ffi.new("double[1]", v), 8)
  elseif kind == "string" then w[#w + 1] = "s"; write_text(w, v)
  elseif base.is_tensor(v) then
    w.tensors[#w.tensors + 1] = v
    w[#w + 1] = "x"
    write_text(w, tostring(#w.tensors))
  elseif w.seen[v] and (kind == "table" or kind == "function") then
    w[#w + 1] = "r"
    write_text(w, tostring(w.seen[v]))
  elseif w.names[v] and (kind == "table" or kind == "function") then
    local name = w.names[v]
    w[#w + 1] = "m"
    write_text(w, tostring(#name))
    for _, part in ipairs(name) do write_text(w, part) end
  elseif kind == "table" or kind == "function" then
    w.count = w.count + 1
    w.seen[v] = w.count
    if kind == "table" then write_table(w, v, path) else write_function(w, v, path) end
  else
    local type_name = kind == "cdata" and "a cdata " .. tostring(ffi.typeof(v)) or "a " .. kind
    base.error(("%s: upvalue \"%s\" is %s, which can't go to a worker; %s"):format(w.what, path, type_name, ALLOWED))
  end
end

-- The text of a function, and the tensors that it names. `fn` may also be "module.function" or {"module", "function"}.
local function pack(what, fn, kind)
  local w = { what = what, tensors = {}, seen = {}, count = 0, names = named_values(), kind }
  if type(fn) == "string" then fn = { fn:match "^(.*)%.([^.]+)$" } end
  if type(fn) == "table" and type(fn[1]) == "string" and type(fn[2]) == "string" then
    w[2] = "m"
    write_text(w, "2")
    write_text(w, fn[1])
    write_text(w, fn[2])
  elseif type(fn) == "function" then write(w, fn)
  else base.error(("%s: fn is a %s, expected a function, or the names of a module and its function"):format(what, type(fn))) end
  return table.concat(w), w.tensors
end

local library
local function load_library()
  if library then return library end
  local dir = os.getenv "DDP_LIB"
  library = ffi.load(dir and dir ~= "" and dir .. "/libddp_host.so" or "ddp_host")
  return library
end

-- Hooks for the C side that run fn in workers. kind: "get" for fn(i), "map" for fn(x, y, rng).
function M.hooks(what, fn, kind)
  local code, tensors = pack(what, fn, kind == "get" and "g" or "t")
  local list = ffi.new("ddp_tensor *[?]", #tensors + 1)
  for i, t in ipairs(tensors) do list[i - 1] = t end
  local out = ffi.new "ddp_data_hooks[1]"
  base.check(load_library().ddp_host_worker_hooks(code, #code, package.path, package.cpath, list, #tensors, out))
  return out
end

-- ---- reading, in the worker's state -----------------------------------------------------------------------------------

local read

local function read_text(r)
  local first, last, n = r.code:find("^(%d+):", r.at)
  assert(first, "ship: the text is damaged")
  r.at = last + 1 + tonumber(n)
  return r.code:sub(last + 1, r.at - 1)
end

local function read_module(r)
  local n = tonumber(read_text(r))
  local name = read_text(r)
  local v = require(name)
  for _ = 2, n do
    local field = read_text(r)
    v = v[field]
    name = name .. "." .. field
    if v == nil then error(("%s is not there in a worker"):format(name), 0) end
  end
  return v
end

local function register(r, v)
  r.seen[#r.seen + 1] = v
  return v
end

local READ = {
  n = function() return nil end,
  t = function() return true end,
  f = function() return false end,
  d = function(r)
    r.at = r.at + 8
    local v = ffi.new "double[1]"
    ffi.copy(v, r.code:sub(r.at - 8, r.at - 1), 8)
    return v[0]
  end,
  s = read_text,
  x = function(r) return base.own(C.ddp_retain(r.tensors[tonumber(read_text(r)) - 1])) end,
  r = function(r) return r.seen[tonumber(read_text(r))] end,
  m = read_module,
  ["{"] = function(r)
    local t = register(r, {})
    while r.code:sub(r.at, r.at) ~= "}" do
      local k = read(r)
      t[k] = read(r)
    end
    r.at = r.at + 1
    return t
  end,
  F = function(r)
    local fn = register(r, assert(loadstring(read_text(r), "=worker")))
    for i = 1, tonumber(read_text(r)) do debug.setupvalue(fn, i, read(r)) end
    return fn
  end,
}

read = function(r)
  local tag = r.code:sub(r.at, r.at)
  r.at = r.at + 1
  return READ[tag](r)
end

-- A sample's random numbers, drawn by the counter (seed, epoch, index).
local Rng = {}
Rng.__index = Rng
function Rng:uniform(lo, hi)
  local u = C.ddp_sample_uniform(self.call)
  if lo == nil then return u end
  return lo + u * ((hi or 1) - lo)
end
-- lo <= v <= hi, as math.random.
function Rng:integer(lo, hi)
  if type(lo) ~= "number" or type(hi) ~= "number" then error("rng:integer: expected two numbers", 2) end
  return tonumber(C.ddp_sample_integer(self.call, lo, hi))
end

-- A result as a tensor that the loader owns.
local function give(v, name)
  if v == nil then return nil end
  local t
  if base.is_tensor(v) then t = C.ddp_retain(v)
  elseif type(v) == "number" then t = C.ddp_scalar(v)
  elseif type(v) == "boolean" then t = C.ddp_scalar(v and 1 or 0)
  elseif type(v) == "table" then t = C.ddp_retain(require("ddp").tensor(v))
  else error(("the function's %s is a %s, expected a tensor or a number"):format(name, type(v)), 0) end
  if t == nil then base.raise() end
  return t
end

local ENOUGH = 8 * 2 ^ 20 -- bytes of samples between collections of a worker's state

-- The function that a worker calls with the address of a ddp_sample_call.
function M.worker(code, tensors)
  local ddp = require "ddp" -- methods of tensors
  local r = { code = code, at = 2, seen = {}, tensors = ffi.cast("ddp_tensor **", tensors) }
  local fn, get = read(r), code:sub(1, 1) == "g"
  local call_type, rng, bytes = ffi.typeof "ddp_sample_call *", setmetatable({}, Rng), 0
  setmetatable(_G, { __index = function(_, name)
    error(("global \"%s\" is not there in a worker; a local of the script is (upvalues travel)"):format(tostring(name)), 2)
  end })
  local function adopt(t)
    if t == nil then return nil end
    bytes = bytes + 512 + 8 * tonumber(C.ddp_numel(t))
    return base.own(C.ddp_retain(t))
  end
  return function(address)
    local call = ffi.cast(call_type, address)
    local x, y
    if get then
      x, y = fn(tonumber(call.index) + 1)
    else
      rng.call = call
      local y_before = adopt(call.y)
      x, y = fn(adopt(call.x), y_before, rng)
      if y == nil then y = y_before end
    end
    if x == nil then error("the function returned no x", 0) end
    call.out_x = give(x, "x")
    call.out_y = give(y, "y")
    if get and ddp.is_tensor(x) then bytes = bytes + 8 * tonumber(C.ddp_numel(x)) end
    if bytes > ENOUGH then
      bytes = 0
      collectgarbage "collect"
    end
  end
end

return M
