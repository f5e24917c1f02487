-- optim.lua -- optimizers: groups of parameters over the C optimizers.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local follow = require "ddp.follow"
local C, check, fail = base.C, base.check, base.error

local M = {}
local Optimizer = {}
Optimizer.__index = Optimizer

-- One group: its parameters, its options and the C object that steps them.
local function make_group(what, params, opts, new)
  if #params == 0 then fail(what .. ": no parameters") end
  local list = ffi.new("ddp_tensor *[?]", #params)
  for i, p in ipairs(params) do
    if not tensor.is_tensor(p) then fail(("%s: parameter %d is a %s, expected a tensor"):format(what, i, type(p))) end
    list[i - 1] = p
  end
  local out = ffi.new "ddp_optim *[1]"
  check(new(list, #params, opts, out))
  local group = { params = params, handle = ffi.gc(out[0], C.ddp_optim_free) }
  for k, v in pairs(opts) do group[k] = v end
  return group
end

-- params: an array of tensors, or an array of groups {params = {...}, lr = ...}.
local function optimizer(what, known, defaults, new)
  return function(params, opts)
    if type(params) ~= "table" then fail(what .. ": expected a list of parameters, got a " .. type(params)) end
    opts = base.options(what, opts, known)
    local groups = params
    if tensor.is_tensor(params[1]) or params[1] == nil then groups = { { params = params } } end
    local self = setmetatable({ param_groups = {}, name = what, defaults = {}, new = new }, Optimizer)
    for _, k in ipairs(known) do self.defaults[k] = true end
    for i, g in ipairs(groups) do
      local merged = {}
      for _, k in ipairs(known) do
        merged[k] = g[k]
        if merged[k] == nil then merged[k] = opts[k] end
        if merged[k] == nil then merged[k] = defaults[k] end
      end
      if merged.lr == nil then fail(what .. ": lr is missing") end
      if type(merged.lr) ~= "number" or merged.lr < 0 then fail(("%s: lr is %s, expected a number from 0"):format(what, tostring(merged.lr))) end
      self.param_groups[i] = make_group(what, g.params, merged, new)
    end
    return follow.add(self, what)
  end
end

M.SGD = optimizer("SGD", { "lr", "momentum", "dampening", "weight_decay", "nesterov" }, { momentum = 0, dampening = 0, weight_decay = 0, nesterov = false },
  function(list, n, o, out)
    if o.nesterov and (o.momentum <= 0 or o.dampening ~= 0) then fail "SGD: nesterov needs momentum and no dampening" end
    local c = ffi.new("ddp_sgd_opts", { size = ffi.sizeof "ddp_sgd_opts", lr = o.lr, momentum = o.momentum, dampening = o.dampening,
      weight_decay = o.weight_decay, nesterov = o.nesterov and 1 or 0 })
    return C.ddp_optim_sgd(list, n, c, out)
  end)

local function adam(what, decay, decoupled)
  return optimizer(what, { "lr", "betas", "eps", "weight_decay" }, { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = decay },
    function(list, n, o, out)
      local c = ffi.new("ddp_adam_opts", { size = ffi.sizeof "ddp_adam_opts", lr = o.lr, beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps,
        weight_decay = o.weight_decay, decoupled = decoupled })
      return C.ddp_optim_adam(list, n, c, out)
    end)
end
M.Adam = adam("Adam", 0, 0)
M.AdamW = adam("AdamW", 0.01, 1)

local function apply(self, by)
  for i = 1, #self.param_groups do
    local g = self.param_groups[i]
    C.ddp_optim_set_lr(g.handle, g.lr)
    check(C.ddp_optim_apply_scaled(g.handle, by))
  end
  follow.used(self)
  self:skip_step()
end
function Optimizer:step() apply(self, 1) end

-- Closes the step in the run's numbers without moving anything: step does it at its end, a scaler where it skips.
function Optimizer:skip_step() -- luacheck: ignore self
  C.ddp_stats_step()
  if M.on_step then M.on_step() end
end

function Optimizer:zero_grad()
  for i = 1, #self.param_groups do check(C.ddp_optim_zero_grad(self.param_groups[i].handle)) end
end

-- ---- for the scaler and the stepper: gradients by one factor, without a pass of their own ---------------------------------------

-- Does opt step as it was made to? One with a step of its own wants to see its gradients as they are.
function M.is_plain(opt) return getmetatable(opt) == Optimizer and rawget(opt, "step") == nil and rawget(opt, "skip_step") == nil end

-- opt:step() as if each gradient had been multiplied by `by`; p.grad gives it so afterwards.
M.apply_scaled = apply

function M.scale_grads(opt, by)
  for _, g in ipairs(opt.param_groups) do check(C.ddp_optim_scale_grads(g.handle, by)) end
end

function M.has_grads(opt)
  for _, g in ipairs(opt.param_groups) do if C.ddp_optim_count_grads(g.handle) > 0 then return true end end
  return false
end

-- Does a wrapped model reduce the gradients of all its parameters?
function M.all_reduced(opt)
  for _, g in ipairs(opt.param_groups) do
    for _, p in ipairs(g.params) do if C.ddp_is_reduced(p) == 0 then return false end end
  end
  return true
end

-- inv_scale times the norm of all gradients, and whether one is NaN or infinite (1 or 0): 0-dim tensors.
function M.grad_norm(opt, inv_scale)
  local n = #opt.param_groups
  local list, norm, found = ffi.new("ddp_optim *[?]", n), ffi.new "ddp_tensor *[1]", ffi.new "ddp_tensor *[1]"
  for i, g in ipairs(opt.param_groups) do list[i - 1] = g.handle end
  check(C.ddp_optim_grad_norm(list, n, inv_scale, norm, found))
  return base.own(norm[0]), base.own(found[0])
end

-- What clip_grad_norm_ multiplies by: 1, or what takes a norm above max_norm down to it; NaN where the norm is.
function M.clip_factor(norm, max_norm)
  local by = max_norm / (norm + 1e-6)
  return by >= 1 and 1 or by
end

-- ---- state ------------------------------------------------------------------------------------------------------------

-- Names of the tensors that a parameter has in C, in its order there.
local STATE_NAMES = { SGD = { "momentum_buffer" }, Adam = { "exp_avg", "exp_avg_sq" }, AdamW = { "exp_avg", "exp_avg_sq" } }

-- {state = {[i] = {step =, momentum_buffer = ...}}, param_groups = {{lr = ..., params = {i, ...}}}}: parameters by their number
-- over all groups, those that never stepped left out. The tensors are aliases of the optimizer's own.
function Optimizer:state_dict()
  local out, at = { state = {}, param_groups = {} }, 0
  for i, g in ipairs(self.param_groups) do
    local group = { params = {} }
    for k in pairs(self.defaults) do group[k] = type(g[k]) == "table" and { unpack(g[k]) } or g[k] end
    for j = 1, #g.params do
      at = at + 1
      group.params[j] = at
      local steps = tonumber(C.ddp_optim_steps(g.handle, j - 1))
      if steps > 0 then
        local entry = { step = steps }
        for k, name in ipairs(STATE_NAMES[self.name]) do
          local t = C.ddp_optim_state(g.handle, k - 1, j - 1)
          if t ~= nil then entry[name] = base.own(t) end
        end
        out.state[at] = entry
      end
    end
    out.param_groups[i] = group
  end
  return out
end

-- Does the state fit? An error where it does not.
function Optimizer:check_state_dict(sd)
  local what = self.name .. ".load_state_dict"
  if type(sd) ~= "table" or type(sd.state) ~= "table" or type(sd.param_groups) ~= "table" then fail(what .. ": expected {state =, param_groups =}") end
  if #sd.param_groups ~= #self.param_groups then fail(("%s: %d groups in the state, %d here"):format(what, #sd.param_groups, #self.param_groups)) end
  local known, at = { step = true }, 0
  for _, name in ipairs(STATE_NAMES[self.name]) do known[name] = true end
  for i, g in ipairs(self.param_groups) do
    local theirs = sd.param_groups[i]
    if #theirs.params ~= #g.params then fail(("%s: group %d has %d parameters in the state, %d here"):format(what, i, #theirs.params, #g.params)) end
    for k in pairs(self.defaults) do
      if theirs[k] == nil then fail(("%s: group %d has no \"%s\": not a state of %s"):format(what, i, k, self.name)) end
    end
    for _, p in ipairs(g.params) do
      at = at + 1
      for name, v in pairs(sd.state[at] or {}) do
        if not known[name] then fail(("%s: parameter %d has \"%s\": not a state of %s"):format(what, at, tostring(name), self.name)) end
        if name ~= "step" and table.concat(v:size(), ",") ~= table.concat(p:size(), ",") then
          fail(("%s: %s of parameter %d is [%s], the parameter [%s]"):format(what, name, at, table.concat(v:size(), ","), table.concat(p:size(), ",")))
        end
      end
    end
  end
end

-- Takes over options, steps and (copied) tensors. Nothing is changed when the state does not fit. done(t) [OPTIONAL]: called
-- when a tensor has been copied.
function Optimizer:load_state_dict(sd, done)
  self:check_state_dict(sd)
  local at = 0
  for i, g in ipairs(self.param_groups) do
    local opts = {}
    for k in pairs(self.defaults) do opts[k] = sd.param_groups[i][k] end
    local fresh = make_group(self.name, g.params, opts, self.new)
    for j = 1, #g.params do
      at = at + 1
      local entry = sd.state[at]
      if entry then
        check(C.ddp_optim_set_steps(fresh.handle, j - 1, entry.step))
        for k, name in ipairs(STATE_NAMES[self.name]) do
          if entry[name] then
            check(C.ddp_optim_set_state(fresh.handle, k - 1, j - 1, entry[name]))
            if done then done(entry[name]) end
          end
        end
      end
    end
    for k, v in pairs(fresh) do g[k] = v end -- the same table: schedules hold on to it
  end
end

-- ---- clipping -----------------------------------------------------------------------------------------------------------

-- Scales gradients so that their total 2-norm is at most max_norm; returns the norm before, a 0-dim tensor. A norm that is
-- NaN or infinite scales too, as in PyTorch, or is an error with {error_if_nonfinite = true}.
function M.clip_grad_norm_(params, max_norm, opts)
  opts = base.options("clip_grad_norm_", opts, { "error_if_nonfinite", "norm_type" })
  if opts.norm_type and opts.norm_type ~= 2 then fail(("clip_grad_norm_: norm_type is %s, only 2 is built"):format(tostring(opts.norm_type))) end
  if tensor.is_tensor(params) then params = { params } end
  if type(params) ~= "table" then fail("clip_grad_norm_: expected a list of parameters, got a " .. type(params)) end
  local grads = {}
  for _, p in ipairs(params) do grads[#grads + 1] = p.grad end
  if #grads == 0 then return tensor.zeros({}, { device = params[1] and params[1]:device() }) end
  return grad.no_grad(function()
    if opts.error_if_nonfinite then
      local norm = ops.grad_clip_(grads)
      if not (norm:item() < math.huge) then fail(("clip_grad_norm_: the total norm is %g"):format(norm:item())) end
    end
    return ops.grad_clip_(grads, max_norm)
  end)
end

return setmetatable(M, { __index = function(self, name)
  if name ~= "schedule" then return nil end
  rawset(self, name, require "ddp.schedule")
  return self.schedule
end })
