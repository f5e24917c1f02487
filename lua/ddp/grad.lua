-- grad.lua -- backward, gradients on demand, hooks, grad modes, checkpoint, gradcheck.
local bit = require "bit"
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local C, own, check, fail, raise = base.C, base.own, base.check, base.error, base.raise
local T = tensor.methods

local M = {}

-- ---- running a backward ------------------------------------------------------------------------------------------

-- Host functions by number: {fn =, node = true} of a node in the graph, {fn =, leaf =, tensor =} of a hook, {again = fn} of a
-- stretch to run again.
local hooks = {}
local first_id = tonumber(C.ddp_host_ids())
local next_id = first_id

-- A new number. What no graph can ask for any more is let go here, and after each backward.
local function new_id()
  local gone = tonumber(C.ddp_host_dead(first_id))
  while gone >= 0 do
    hooks[gone] = nil
    gone = tonumber(C.ddp_host_dead(first_id))
  end
  next_id = next_id + 1
  return next_id
end

-- What C stopped for: a host function gets the gradients that came in; its results, where tensors, are the gradients
-- that go on (a hook's replaces the one it got).
local function run_host(state, flags)
  local id = tonumber(C.ddp_backward_host_id(state))
  local hook = hooks[id]
  if not hook then return end
  if hook.comm then return hook.comm() end
  if hook.again then
    hook.again(state)
    hooks[id] = nil -- what it needed is in the graph now
    return
  end
  local function give(...)
    for i = 1, hook.leaf and 0 or select("#", ...) do
      local result = select(i, ...)
      if result ~= nil then
        if not tensor.is_tensor(result) then fail("hook: the result is a " .. type(result) .. ", expected a tensor or nothing") end
        check(C.ddp_backward_host_result(state, i - 1, result))
      end
    end
  end
  if hook.leaf then return give(hook.fn(hook.tensor)) end
  local grads, n = {}, C.ddp_backward_host_n(state)
  for i = 1, n do
    local g = C.ddp_backward_host_grad(state, i - 1)
    if g ~= nil then grads[i] = own(C.ddp_retain(g)) end
  end
  if not hook.node then return give(hook.fn(unpack(grads, 1, n))) end
  local before = C.ddp_set_grad_mode(bit.band(flags, C.DDP_CREATE_GRAPH) ~= 0 and 1 or 0)
  local function finish(ok, ...)
    C.ddp_set_grad_mode(before)
    if not ok then error((...), 0) end
    give(...)
  end
  finish(pcall(hook.fn, unpack(grads, 1, n)))
  if flags == 0 then hooks[id] = nil end -- the graph is used up
end

-- A function that exchanges gradients of a wrapped model, by number: C asks for it inside a backward, or elsewhere where
-- gradients are reduced (run_comm).
function M.add_comm(fn)
  local id = new_id()
  hooks[id] = { comm = fn }
  return id
end
function M.drop_comm(id) hooks[id] = nil end

-- Calls step() as long as it returns 1, and the function that C asks for in between; returns the last status.
function M.run_comm(step)
  local status = step()
  while status == 1 do
    hooks[tonumber(C.ddp_reduction_host_id())].comm()
    status = step()
  end
  return status
end

-- Goes on until the end, or the first error.
local function walk(state, flags)
  local status = C.ddp_backward_next(state)
  while status == 1 do
    local part = C.ddp_stats_enter(C.DDP_PART_BACKWARD)
    local ok, err = pcall(run_host, state, flags)
    C.ddp_stats_enter(part)
    if not ok then
      C.ddp_backward_free(state)
      error(err, 0)
    end
    status = C.ddp_backward_next(state)
  end
  return status
end

-- Records fn as the gradient of outputs with respect to inputs: it gets their gradients and returns those of the inputs.
function M.record_host(fn, inputs, outputs)
  local id = new_id()
  local ins, outs = ffi.new("ddp_tensor *[?]", math.max(#inputs, 1)), ffi.new("ddp_tensor *[?]", math.max(#outputs, 1))
  for i, x in ipairs(inputs) do ins[i - 1] = x end
  for i, y in ipairs(outputs) do outs[i - 1] = y end
  check(C.ddp_record_host(id, #inputs, ins, #outputs, outs))
  if C.ddp_segment_open() ~= 1 then hooks[id] = { fn = fn, node = true } end -- else the second run gives its own
  return id
end

-- Host functions, too, run with autocast off.
local mode_out = ffi.new "int[1]"
local function run(state, flags)
  if C.ddp_autocast_dtype() == C.DDP_AUTOCAST_OFF then return walk(state, flags) end
  check(C.ddp_autocast_begin(C.DDP_AUTOCAST_OFF, mode_out))
  local mode = mode_out[0]
  local ok, status = pcall(walk, state, flags)
  C.ddp_autocast_end(mode)
  if not ok then error(status, 0) end
  return status
end

local one_out, one_grad = ffi.new "ddp_tensor *[1]", ffi.new "ddp_tensor *[1]"

-- For those who communicate in backward: M.weighted, whether a reduction weighs its ranks, and M.factor, what this rank's
-- gradients will be multiplied by then: the weight given to backward, unless M.next_factor was set before.
M.weighted, M.factor = false, 1

-- t:backward(grad, {retain_graph=, create_graph=, weight=}), or t:backward{...}.
function T.backward(t, grad, opts)
  if opts == nil and grad ~= nil and base.is_options(grad) then grad, opts = nil, grad end
  local flags, weight = 0, 1
  if opts then
    opts = base.options("backward", opts, { "retain_graph", "create_graph", "weight" })
    flags = (opts.retain_graph and C.DDP_RETAIN_GRAPH or 0) + (opts.create_graph and C.DDP_CREATE_GRAPH or 0)
    weight = opts.weight or 1
  end
  M.factor, M.next_factor = M.next_factor or weight, nil
  one_out[0], one_grad[0] = t, grad
  C.ddp_set_where(M.where and M.where() or "")
  local state = C.ddp_backward_begin(1, one_out, one_grad, 0, nil, flags, weight)
  if state == nil then raise() end
  local status = run(state, flags)
  C.ddp_backward_free(state)
  if status < 0 then raise() end
end

local function pointers(list, what)
  if tensor.is_tensor(list) then list = { list } end
  if type(list) ~= "table" then fail(("grad: %s is a %s, expected a list of tensors"):format(what, type(list))) end
  local buf = ffi.new("ddp_tensor *[?]", math.max(#list, 1))
  for i = 1, #list do buf[i - 1] = list[i] end
  return buf, #list
end

-- ddp.grad({out}, {inputs}, {create_graph=, retain_graph=, grad_outputs=, allow_unused=}) -> table
function M.grad(outputs, inputs, opts)
  opts = base.options("grad", opts, { "create_graph", "retain_graph", "grad_outputs", "allow_unused" })
  local outs, n_out = pointers(outputs, "outputs")
  local ins, n_in = pointers(inputs, "inputs")
  local given = opts.grad_outputs and pointers(opts.grad_outputs, "grad_outputs") or nil
  local flags = (opts.create_graph and C.DDP_CREATE_GRAPH or 0) + (opts.retain_graph and C.DDP_RETAIN_GRAPH or 0)
  M.factor = 1
  local state = C.ddp_backward_begin(n_out, outs, given, n_in, ins, flags, 1)
  if state == nil then raise() end
  local status = run(state, flags)
  local grads, missing = {}, nil
  for i = 1, status == 0 and n_in or 0 do
    local g = C.ddp_backward_input_grad(state, i - 1)
    if g ~= nil then grads[i] = own(g) elseif not opts.allow_unused then missing = missing or i end
  end
  C.ddp_backward_free(state)
  if status < 0 then raise() end
  if missing then fail(("grad: input %d is not used by the outputs; pass allow_unused to get nil for it"):format(missing)) end
  return grads
end

-- ---- hooks -----------------------------------------------------------------------------------------------------------

local function add_hook(t, fn, after)
  if type(fn) ~= "function" then fail("register_hook: expected a function, got a " .. type(fn)) end
  local id = new_id()
  check(C.ddp_tensor_add_hook(t, id, after and 1 or 0))
  hooks[id] = { fn = fn, leaf = after, tensor = after and t or nil }
  return { remove = function()
    hooks[id] = nil
    C.ddp_tensor_remove_hook(t, id)
  end }
end
function T.register_hook(t, fn) return add_hook(t, fn, false) end
function T.register_post_accumulate_grad_hook(t, fn) return add_hook(t, fn, true) end

-- ---- modes -----------------------------------------------------------------------------------------------------------

local function finish_mode(before, ok, ...)
  C.ddp_set_grad_mode(before)
  if not ok then error((...), 0) end
  return ...
end
-- Arguments are passed on and results back; the mode before comes back, also on an error.
function M.no_grad(fn, ...) return finish_mode(C.ddp_set_grad_mode(0), pcall(fn, ...)) end
function M.enable_grad(fn, ...) return finish_mode(C.ddp_set_grad_mode(1), pcall(fn, ...)) end

-- What code runs under besides its arguments and the grad mode: {get = its state, enter = put that state in force and return
-- what leave needs to undo it}. A part of the library with such a state adds itself here; a stretch that is run again gets
-- them as they were.
local function generator_state()
  local state = ffi.new "uint64_t[3]"
  C.ddp_generator_state(nil, state)
  return state
end
M.modes = {
  { -- the default generator
    get = generator_state,
    enter = function(state)
      local before = generator_state()
      C.ddp_generator_set_state(nil, state)
      return before
    end,
    leave = function(before) C.ddp_generator_set_state(nil, before) end,
  },
  { -- autocast
    get = function() return C.ddp_autocast_dtype() end,
    enter = function(dtype)
      check(C.ddp_autocast_begin(dtype, mode_out))
      return mode_out[0]
    end,
    leave = function(before) C.ddp_autocast_end(before) end,
  },
}
function M.snapshot()
  local states = {}
  for i, mode in ipairs(M.modes) do states[i] = { mode, mode.get() } end
  return states
end
-- Returns what M.leave needs.
function M.enter(states)
  local before = {}
  for i, s in ipairs(states) do before[i] = { s[1], s[1].enter(s[2]) } end
  return before
end
function M.leave(before) for i = #before, 1, -1 do before[i][1].leave(before[i][2]) end end

-- ---- checkpoint ------------------------------------------------------------------------------------------------------

local again = false
-- True while a checkpoint runs its function for the second time: what a forward counts (running statistics) was counted.
function M.runs_again() return again end

local function versions(args, n)
  local v = {}
  for i = 1, n do if tensor.is_tensor(args[i]) then v[i] = C.ddp_version_of(args[i]) end end
  return v
end
local function expect_unchanged(before, args, n, when)
  local now = versions(args, n)
  for i = 1, n do
    if before[i] ~= now[i] then fail(("checkpoint: argument %d was changed in place %s; the function can't run on it again"):format(i, when)) end
  end
end

-- The second run, asked for by a backward: same arguments, same modes, gradients on.
local function second_run(fn, args, n, states, before)
  return function(state)
    expect_unchanged(before, args, n, "before its backward")
    check(C.ddp_segment_again(state))
    local outside, mode, was_again = M.enter(states), C.ddp_set_grad_mode(1), again
    again = true
    local function finish(ok, ...)
      again = was_again
      C.ddp_set_grad_mode(mode)
      M.leave(outside)
      local status = C.ddp_segment_filled(state, ok and 1 or 0)
      if not ok then error((...), 0) end
      check(status)
    end
    finish(pcall(fn, unpack(args, 1, n)))
  end
end

-- fn(...), keeping nothing for backward but the arguments: backward runs fn again, with the same random draws and modes, and
-- goes on from there. fn must do the same both times; what it draws from generators of its own is not put back.
-- Parameters used inside get their gradients as always. Checkpoints nest.
function M.checkpoint(fn, ...)
  if C.ddp_grad_mode() == 0 then return fn(...) end
  local id, args, n = new_id(), { ... }, select("#", ...)
  local outermost = C.ddp_segment_open() ~= 1 -- else the one around it gives a new function when it runs again
  local states, before = outermost and M.snapshot(), versions(args, n)
  check(C.ddp_segment_begin(id))
  local function finish(ok, ...)
    local held = C.ddp_segment_end()
    if not ok then error((...), 0) end
    check(held)
    if held > 0 then expect_unchanged(before, args, n, "by its function") end
    if held > 0 and outermost then hooks[id] = { again = second_run(fn, args, n, states, before) } end
    return ...
  end
  return finish(pcall(fn, ...))
end

-- ---- gradcheck -------------------------------------------------------------------------------------------------------

-- Compares the gradients of fn(inputs...) with central differences, in f64. Raises naming the first element that differs.
function M.gradcheck(fn, inputs, opts)
  opts = base.options("gradcheck", opts, { "eps", "atol", "rtol" })
  local eps, atol, rtol = opts.eps or 1e-6, opts.atol or 1e-5, opts.rtol or 1e-3
  for i, x in ipairs(inputs) do
    if x:dtype() ~= "f64" then fail(("gradcheck: input %d is %s, expected f64"):format(i, x:dtype())) end
  end
  local function total(w)
    local y = fn(unpack(inputs))
    return ops.sum(ops.mul(y, w))
  end
  local y = M.no_grad(fn, unpack(inputs))
  local w = tensor.rand(y:size(), { dtype = "f64" })
  local grads = M.grad({ total(w) }, inputs, { allow_unused = true })
  for i, x in ipairs(inputs) do
    local values = x:data()
    local analytic = grads[i] and ops.clone(grads[i]) or tensor.zeros_like(x)
    local g = analytic:data()
    for k = 0, x:numel() - 1 do
      local keep = values[k]
      values[k] = keep + eps
      local up = M.no_grad(total, w):item()
      values[k] = keep - eps
      local down = M.no_grad(total, w):item()
      values[k] = keep
      local numeric = (up - down) / (2 * eps)
      local close = math.abs(numeric - g[k]) <= atol + rtol * math.abs(numeric)
      if not close then fail(("gradcheck: input %d, element %d: %g by rule, %g by difference"):format(i, k, g[k], numeric)) end
    end
  end
  return true
end

return M
