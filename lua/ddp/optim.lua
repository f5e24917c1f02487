-- optim.lua -- optimizers: groups of parameters over the C optimizers.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
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
    local self = setmetatable({ param_groups = {}, name = what }, Optimizer)
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
    return self
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

function Optimizer:step()
  for i = 1, #self.param_groups do
    local g = self.param_groups[i]
    C.ddp_optim_set_lr(g.handle, g.lr)
    check(C.ddp_optim_apply(g.handle))
  end
  C.ddp_stats_step()
  if M.on_step then M.on_step() end
end

function Optimizer:zero_grad()
  for i = 1, #self.param_groups do check(C.ddp_optim_zero_grad(self.param_groups[i].handle)) end
end

-- Scales gradients so that their total norm is at most max_norm; returns the norm before, a 0-dim tensor.
function M.clip_grad_norm_(params, max_norm)
  local grad = require "ddp.grad"
  return grad.no_grad(function()
    local total
    for _, p in ipairs(params) do
      local g = p.grad
      if g ~= nil then
        local square = (g * g):sum()
        total = total and total + square or square
      end
    end
    if not total then return tensor.zeros {} end
    local norm = total:sqrt()
    local scale = max_norm / (norm:item() + 1e-6)
    if scale < 1 then
      for _, p in ipairs(params) do
        local g = p.grad
        if g ~= nil then g:mul_(scale) end
      end
    end
    return norm
  end)
end

return M
