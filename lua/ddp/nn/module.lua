-- module.lua -- modules: classes, children and parameters in order of assignment, state, hooks.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local fail = base.error

local M = {}
local Module = {} -- methods of every module
M.Module = Module

local is_parameter_id = {}

-- A leaf that wants a gradient, registered when it becomes a field of a module.
function M.Parameter(t, opts)
  opts = base.options("Parameter", opts, { "requires_grad" })
  if not tensor.is_tensor(t) then fail("Parameter: expected a tensor, got a " .. type(t)) end
  local p = t:detach()
  if opts.requires_grad ~= false then p:requires_grad_(true) end
  is_parameter_id[p:id()] = true
  return p
end

local function is_module(x) return type(x) == "table" and rawget(x, "_fields") ~= nil end
M.is_module = is_module
local function is_parameter(x) return tensor.is_tensor(x) and is_parameter_id[x:id()] == true end

-- ---- classes ----------------------------------------------------------------------------------------------------

local function note_field(self, key, value)
  if is_module(value) or is_parameter(value) then
    local fields = rawget(self, "_fields")
    fields[#fields + 1] = key
  end
  rawset(self, key, value)
end

-- With check_nan: trace(run, self, ...) runs a module and tells who it is.
local trace
function M.set_trace(fn) trace = fn end
function M.traced() return trace ~= nil end

local function run(self, ...)
  local pre, post = rawget(self, "_pre_hooks"), rawget(self, "_hooks")
  if not pre and not post then return self:forward(...) end
  local input = { ... }
  for _, fn in ipairs(pre or {}) do
    local changed = fn(self, input)
    if changed ~= nil then input = type(changed) == "table" and changed or { changed } end
  end
  local output = { self:forward(unpack(input)) }
  for _, fn in ipairs(post or {}) do
    local changed = fn(self, input, unpack(output))
    if changed ~= nil then output = { changed } end
  end
  return unpack(output)
end
local function call(self, ...)
  if trace then return trace(run, self, ...) end
  return run(self, ...)
end

-- nn.Module("Block", Base): a class; calling it makes an object and runs its init.
function M.class(name, parent)
  parent = parent or Module
  local class = setmetatable({}, { __index = parent, __tostring = function() return "class " .. name end })
  class._name = name
  class._parent = parent
  class._meta = { __index = class, __newindex = note_field, __call = call, __tostring = function(self) return self:to_text "" end }
  getmetatable(class).__call = function(_, ...)
    local self = setmetatable({ _fields = {}, _buffers = {}, training = true }, class._meta)
    if class.init then class.init(self, ...) end
    return self
  end
  return class
end

-- ---- walking ---------------------------------------------------------------------------------------------------------

local INTERNAL = { _fields = true, _buffers = true, _hooks = true, _pre_hooks = true }

-- A plain table that holds modules would hide them: an error that says where.
local function refuse_hidden(self)
  for key, value in pairs(self) do
    if type(value) == "table" and not INTERNAL[key] and not is_module(value) and getmetatable(value) == nil then
      for _, inner in pairs(value) do
        if is_module(inner) or is_parameter(inner) then
          fail(("%s: field \"%s\" is a plain table that holds modules or parameters; use nn.ModuleList"):format(self:type(), tostring(key)))
        end
      end
    end
  end
end

local function field_name(key) return type(key) == "number" and tostring(key - 1) or key end

-- Calls fn(name, module) for self and all below, parents first, each object once.
local function each_module(self, fn, prefix, seen)
  seen = seen or {}
  if seen[self] then return end
  seen[self] = true
  refuse_hidden(self)
  fn(prefix or "", self)
  for _, key in ipairs(self._fields) do
    local child = rawget(self, key)
    if is_module(child) then each_module(child, fn, (prefix or "") .. field_name(key) .. ".", seen) end
  end
end

-- Lists {name, tensor} of parameters and, when asked, buffers, in order of assignment; a tied one once.
local function entries(self, what)
  local list, seen = {}, {}
  local function visit(prefix, m)
    if what ~= "buffers" then
      for _, key in ipairs(m._fields) do
        local p = rawget(m, key)
        if is_parameter(p) and (what == "state" or not seen[p:id()]) then
          seen[p:id()] = true
          list[#list + 1] = { prefix .. field_name(key), p }
        end
      end
    end
    if what ~= "parameters" then
      for _, key in ipairs(m._buffers) do
        local b = rawget(m, key)
        if b ~= nil then list[#list + 1] = { prefix .. key, b } end
      end
    end
  end
  each_module(self, visit)
  return list
end

local function pairs_of(list)
  local i = 0
  return function()
    i = i + 1
    if list[i] then return list[i][1], list[i][2] end
  end
end

function Module:named_parameters() return pairs_of(entries(self, "parameters")) end
function Module:named_buffers() return pairs_of(entries(self, "buffers")) end
function Module:named_modules()
  local list = {}
  each_module(self, function(prefix, m) list[#list + 1] = { prefix:gsub("%.$", ""), m } end)
  return pairs_of(list)
end
function Module:named_children()
  local list = {}
  for _, key in ipairs(self._fields) do
    if is_module(rawget(self, key)) then list[#list + 1] = { field_name(key), rawget(self, key) } end
  end
  return pairs_of(list)
end
local function seconds(list)
  local out = {}
  for i, e in ipairs(list) do out[i] = e[2] end
  return out
end
function Module:parameters() return seconds(entries(self, "parameters")) end
function Module:buffers() return seconds(entries(self, "buffers")) end
function Module:apply(fn)
  local list = {}
  each_module(self, function(_, m) list[#list + 1] = m end)
  for i = #list, 1, -1 do fn(list[i]) end
  return self
end
function Module:num_parameters()
  local n = 0
  for _, p in ipairs(self:parameters()) do n = n + p:numel() end
  return n
end

-- ---- state --------------------------------------------------------------------------------------------------------------

function Module:register_buffer(name, t)
  self._buffers[#self._buffers + 1] = name
  rawset(self, name, t)
end
function Module:register_parameter(name, p) self[name] = p end

-- Aliases of parameters and buffers by name.
function Module:state_dict()
  local sd = {}
  for _, e in ipairs(entries(self, "state")) do sd[e[1]] = e[2] end
  return sd
end

-- Walks a state_dict by name.
function M.sorted(sd)
  local names = {}
  for name in pairs(sd) do names[#names + 1] = name end
  table.sort(names)
  local i = 0
  return function()
    i = i + 1
    if names[i] then return names[i], sd[names[i]] end
  end
end

-- Copies values in. strict (the default): a missing or unexpected name is an error, and nothing is copied.
function Module:load_state_dict(sd, opts)
  opts = base.options("load_state_dict", opts, { "strict" })
  local mine, missing, unexpected = self:state_dict(), {}, {}
  for name, t in M.sorted(mine) do
    if sd[name] == nil then missing[#missing + 1] = name
    else
      local a, b = table.concat(t:size(), ","), table.concat(sd[name]:size(), ",")
      if a ~= b then fail(("load_state_dict: %s is [%s] here, [%s] in the state"):format(name, a, b)) end
    end
  end
  for name in M.sorted(sd) do if mine[name] == nil then unexpected[#unexpected + 1] = name end end
  if opts.strict ~= false and (#missing > 0 or #unexpected > 0) then
    fail(("load_state_dict: missing: %s; unexpected: %s"):format(#missing > 0 and table.concat(missing, ", ") or "none",
      #unexpected > 0 and table.concat(unexpected, ", ") or "none"))
  end
  grad.no_grad(function()
    for name, t in pairs(mine) do if sd[name] ~= nil then ops.copy_(t, sd[name]) end end
  end)
  return { missing_keys = missing, unexpected_keys = unexpected }
end

function Module:train(on)
  on = on ~= false
  each_module(self, function(_, m) rawset(m, "training", on) end)
  return self
end
function Module:eval() return self:train(false) end
function Module:to(what)
  if base.dtypes[what] and what ~= "f32" then fail("to: parameters stay in f32; ddp.autocast(\"bf16\", fn, ...) computes with them in 16 bits") end
  if base.dtypes[what] then return self end
  local device = base.device(what, "to")
  for _, list in ipairs { self:parameters(), self:buffers() } do
    for _, t in ipairs(list) do
      base.check(base.C.ddp_move_(t, device))
      base.note_line(t)
    end
  end
  return self
end
function Module:cuda() return self:to "cuda" end
function Module:cpu() return self:to "cpu" end
function Module:zero_grad() for _, p in ipairs(self:parameters()) do p.grad = nil end end
function Module:requires_grad_(on)
  for _, p in ipairs(self:parameters()) do p:requires_grad_(on ~= false) end
  return self
end

-- ---- kind, hooks, text ------------------------------------------------------------------------------------------------------

function Module:type() return self._name end
function Module:is(class)
  local c = getmetatable(self).__index
  while c do
    if c == class then return true end
    c = rawget(c, "_parent")
  end
  return false
end
function Module:forward() fail(("%s has no forward"):format(self:type())) end

local function add(self, list, fn)
  local hooks = rawget(self, list) or {}
  rawset(self, list, hooks)
  hooks[#hooks + 1] = fn
  return { remove = function()
    for i, f in ipairs(hooks) do if f == fn then table.remove(hooks, i) break end end
    if #hooks == 0 then rawset(self, list, nil) end
  end }
end
-- fn(module, inputs, output...) after forward; a result replaces the output. pre: fn(module, inputs) before it.
function Module:register_forward_hook(fn) return add(self, "_hooks", fn) end
function Module:register_forward_pre_hook(fn) return add(self, "_pre_hooks", fn) end

function Module:extra() return "" end
function Module:to_text(indent)
  local lines = {}
  for name, child in self:named_children() do lines[#lines + 1] = ("%s  (%s): %s"):format(indent, name, child:to_text(indent .. "  ")) end
  if #lines == 0 then return ("%s(%s)"):format(self:type(), self:extra()) end
  return ("%s(\n%s\n%s)"):format(self:type(), table.concat(lines, "\n"), indent)
end

return M
