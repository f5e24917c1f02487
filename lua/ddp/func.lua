-- func.lua -- ddp.func: a function whose gradient the user gives.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local C, fail, is_tensor = base.C, base.error, base.is_tensor

local M = {}

-- What forward leaves for backward: ctx:save_for_backward(...), ctx.needs_input_grad[i], and any field of the user's own.
local Context = {}

function Context.save_for_backward(ctx, ...)
  local saved = { n = select("#", ...), ... }
  for i = 1, saved.n do
    local t = saved[i]
    if t ~= nil and not is_tensor(t) then fail(("func: save_for_backward: value %d is a %s, expected a tensor; keep others in fields of ctx"):format(i, type(t))) end
  end
  rawset(ctx, "_saved", saved)
end

-- Inputs are kept with their history; others as aliases without, for a handle on a result would hold its own graph.
local function keep_saved(ctx, is_input)
  local saved = rawget(ctx, "_saved") or { n = 0 }
  local versions = {}
  for i = 1, saved.n do
    local t = saved[i]
    if t ~= nil then
      if not is_input[t:id()] then saved[i] = t:detach() end
      versions[i] = C.ddp_version_of(t)
    end
  end
  rawset(ctx, "_saved", saved)
  rawset(ctx, "_versions", versions)
end

local function saved_tensors(ctx)
  local saved, versions = rawget(ctx, "_saved") or { n = 0 }, rawget(ctx, "_versions") or {}
  local list = {}
  for i = 1, saved.n do
    if versions[i] and C.ddp_version_of(saved[i]) ~= versions[i] then
      fail(("func: saved tensor %d was changed in place since it was saved"):format(i))
    end
    list[i] = saved[i]
  end
  return list
end

local context_meta = { __index = function(ctx, key)
  if key == "saved_tensors" then return saved_tensors(ctx) end
  return Context[key]
end }

local function same_size(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do if a[i] ~= b[i] then return false end end
  return true
end

-- The gradients that backward returned, one an argument of forward, as one a tensor among them.
local function check_grads(inputs, place, n_args, ...)
  local n = select("#", ...)
  if n > n_args then fail(("func: backward returned %d gradients, forward has %d arguments"):format(n, n_args)) end
  local out = {}
  for k, x in ipairs(inputs) do
    local g = select(place[k], ...)
    if place[k] > n then g = nil end
    if g ~= nil and not is_tensor(g) then fail(("func: gradient %d is a %s, expected a tensor or nothing"):format(place[k], type(g))) end
    if g ~= nil and not same_size(g:size(), x.size) then
      fail(("func: gradient %d is [%s], its input [%s]"):format(place[k], table.concat(g:size(), ","), table.concat(x.size, ",")))
    end
    out[k] = g
  end
  return unpack(out, 1, #inputs)
end

-- The tensors among `list` (n long): themselves, where they stand, and whether one needs a gradient.
local function tensors_of(list, n)
  local found, place, needs, any = {}, {}, {}, false
  for i = 1, n do
    needs[i] = false
    if is_tensor(list[i]) then
      found[#found + 1], place[#place + 1] = list[i], i
      needs[i] = list[i].requires_grad
      any = any or needs[i]
    end
  end
  return found, place, needs, any
end

-- Results of forward: a tensor that was an argument, or has history, goes out as an alias that can take this one's.
local function fresh_results(results, is_input)
  for i = 1, results.n do
    local t = results[i]
    if is_tensor(t) and (is_input[t:id()] or not t:is_leaf() or t.requires_grad) then results[i] = t:detach() end
  end
end

local function call(def, ...)
  local args, n = { ... }, select("#", ...)
  local ctx = setmetatable({}, context_meta)
  local inputs, place, needs, any = tensors_of(args, n)
  ctx.needs_input_grad = needs
  local is_input = {}
  for _, x in ipairs(inputs) do is_input[x:id()] = true end
  local results
  local function pack(...) results = { n = select("#", ...), ... } end
  pack(grad.no_grad(def.forward, ctx, ...))
  if not any or C.ddp_grad_mode() == 0 then return unpack(results, 1, results.n) end
  fresh_results(results, is_input)
  keep_saved(ctx, is_input)
  local outputs = tensors_of(results, results.n)
  local metas, in_metas = {}, {} -- handles on results in here would hold their own graph
  for i, y in ipairs(outputs) do metas[i] = { size = y:size(), dtype = y:dtype(), device = y:device() } end
  for i, x in ipairs(inputs) do in_metas[i] = { size = x:size() } end
  grad.record_host(function(...)
    local grads = { ... }
    for i, m in ipairs(metas) do grads[i] = grads[i] or tensor.zeros(m.size, { dtype = m.dtype, device = m.device }) end
    return check_grads(in_metas, place, n, def.backward(ctx, unpack(grads, 1, #metas)))
  end, inputs, outputs)
  return unpack(results, 1, results.n)
end

-- ddp.func{forward = function(ctx, ...), backward = function(ctx, g1, ...)}: a function of the arguments of forward, which
-- runs without recording. backward gets a gradient a tensor that forward returned (zeros where none came) and returns one an
-- argument, nil where there is none. With create_graph it is recorded, and so differentiable itself.
function M.func(def)
  if type(def) ~= "table" then fail("func: expected {forward =, backward =}, got a " .. type(def)) end
  base.options("func", def, { "forward", "backward" })
  for _, name in ipairs { "forward", "backward" } do
    if type(def[name]) ~= "function" then fail(("func: %s is a %s, expected a function"):format(name, type(def[name]))) end
  end
  return function(...) return call(def, ...) end
end

return M
