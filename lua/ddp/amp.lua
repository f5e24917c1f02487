-- amp.lua -- mixed precision: ddp.autocast, and loss scaling for f16 with PyTorch's rules (ddp.amp.GradScaler).
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local parallel = require "ddp.parallel"
local optim = require "ddp.optim"
local follow = require "ddp.follow"
local C, fail = base.C, base.error

local M = {}

-- ---- autocast -------------------------------------------------------------------------------------------------------------

local DTYPES = { bf16 = C.DDP_BF16, f16 = C.DDP_F16, [false] = C.DDP_AUTOCAST_OFF }
local mode_out = ffi.new "int[1]"

local function leave(before, ok, ...)
  C.ddp_autocast_end(before)
  if not ok then error((...), 0) end
  return ...
end

-- ddp.autocast("bf16"|"f16"|false, fn, ...): fn(...) with matmul, linear and conv2d in that dtype, and what needs it in f32;
-- false switches it off inside a region. Results come back; the mode before comes back, also on an error. For forwards and
-- losses: backward runs in the dtypes they were recorded in, wherever it is called.
function M.autocast(name, fn, ...)
  local dtype = DTYPES[name]
  if not dtype then
    local near = type(name) == "string" and base.suggest(name, { "bf16", "f16" })
    fail(("autocast: no dtype \"%s\"%s; known: bf16, f16, or false for none"):format(tostring(name), near and ", did you mean \"" .. near .. "\"?" or ""))
  end
  if fn == nil then fail "autocast: the function to call is missing" end
  base.check(C.ddp_autocast_begin(dtype, mode_out))
  return leave(mode_out[0], pcall(fn, ...))
end

-- ---- GradScaler -----------------------------------------------------------------------------------------------------------

local Scaler = {}
Scaler.__index = Scaler

local DEFAULTS = { init_scale = 65536, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000 }
local OPTIONS = { "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled" }

-- As PyTorch keeps it: the scale is an f32 number.
local function f32(v) return tonumber(ffi.cast("float", v)) end

-- GradScaler{init_scale = 65536, growth_factor = 2, backoff_factor = .5, growth_interval = 2000, enabled = true}
function M.GradScaler(opts)
  opts = base.options("GradScaler", opts, OPTIONS)
  local self = setmetatable({ enabled = opts.enabled ~= false, growth_tracker = 0, optimizers = {}, scaled = false }, Scaler)
  for name, default in pairs(DEFAULTS) do
    local v = opts[name] == nil and default or opts[name]
    if type(v) ~= "number" or not (v > 0) then fail(("GradScaler: %s is %s, expected a number above 0"):format(name, tostring(v))) end
    self[name] = v
  end
  if self.growth_factor <= 1 then fail(("GradScaler: growth_factor is %g, expected more than 1"):format(self.growth_factor)) end
  if self.backoff_factor >= 1 then fail(("GradScaler: backoff_factor is %g, expected less than 1"):format(self.backoff_factor)) end
  self.value = f32(self.init_scale)
  return follow.add(self, "GradScaler")
end

function Scaler:is_enabled() return self.enabled end
function Scaler:get_scale() return self.enabled and self.value or 1 end

-- loss times the scale, in f32 or wider. A list of tensors gives a list.
function Scaler:scale(loss)
  if not self.enabled then return loss end
  if type(loss) == "table" then
    local out = {}
    for i, x in ipairs(loss) do out[i] = self:scale(x) end
    return out
  end
  if not tensor.is_tensor(loss) then fail("scale: expected a tensor, got a " .. type(loss)) end
  self.scaled = true
  local factor = tensor.full({}, self.value, { device = loss:device() })
  local scaled = ops.mul(loss, factor)
  base.free(factor)
  return scaled
end

-- This rank takes part in a step without a loss of its own.
function Scaler:join() self.scaled = true end

-- What happened to an optimizer since the last update: nil, "unscaled" or "stepped".
local function stage_of(self, what, opt)
  if type(opt) ~= "table" or type(opt.param_groups) ~= "table" then fail(("%s: expected an optimizer, got a %s"):format(what, type(opt))) end
  if not self.scaled then fail(what .. ": no loss went through scaler:scale since the last update, so there is nothing to unscale") end
  local entry = self.optimizers[opt] or {}
  self.optimizers[opt] = entry
  return entry
end

-- Notes what was found: whether a gradient was NaN or infinite on any rank. Collective, but where a wrapped model has reduced
-- all gradients: they are the same on all ranks.
local function note_found(opt, entry, stage, found)
  if parallel.world_size() > 1 and not optim.all_reduced(opt) then parallel.all_reduce(found, "max", { name = "found_inf" }) end
  entry.stage, entry.found = stage, found
end

local function no_gradients(what)
  if parallel.world_size() == 1 then fail(what .. ": the optimizer's parameters have no gradients; was backward called?") end
end

-- Divides the gradients of opt by the scale, and notes what it found in them.
local function unscale(self, what, opt, entry)
  local grads = {}
  local device
  for _, group in ipairs(opt.param_groups) do
    for _, p in ipairs(group.params) do
      device = device or p:device()
      grads[#grads + 1] = p.grad
    end
  end
  local found
  if #grads > 0 then found = ops.grad_unscale_(grads, f32(1 / self.value))
  else
    no_gradients(what)
    found = tensor.zeros({}, { device = device }) -- other ranks may have some, and wait
  end
  note_found(opt, entry, "unscaled", found)
end

-- The same for the step alone: gradients are looked at once, and unscaled by the step as it reads them. Returns their norm,
-- unscaled, a 0-dim tensor.
local function look(self, what, opt, entry)
  if not optim.has_grads(opt) then no_gradients(what) end
  entry.by = f32(1 / self.value)
  local norm, found = optim.grad_norm(opt, entry.by)
  note_found(opt, entry, "looked", found)
  return norm
end

-- Only here the host waits for the number.
local function found_inf(entry)
  if tensor.is_tensor(entry.found) then
    local found = entry.found
    entry.found = found:item() > 0
    base.free(found)
  end
  return entry.found
end

-- For those who look at gradients before the step, as clipping does; step does it otherwise.
function Scaler:unscale_(opt)
  if not self.enabled then return end
  local entry = stage_of(self, "unscale_", opt)
  if entry.stage == "unscaled" then fail "unscale_: called twice for this optimizer since the last update" end
  if entry.stage == "stepped" then fail "unscale_: called after step; it comes before, and update comes after" end
  grad.no_grad(unscale, self, "unscale_", opt, entry)
end

-- What step does without unscale_ before it, for the stepper: returns the gradients' norm as unscale_ would leave them.
-- step then takes what to multiply them by besides.
function M.look(self, opt)
  local entry = stage_of(self, "step", opt)
  if entry.stage ~= nil then fail("step: the optimizer was " .. entry.stage .. " since the last update") end
  return look(self, "step", opt, entry)
end
function M.is_plain(self) return getmetatable(self) == Scaler end

-- Steps opt unless a gradient was NaN or infinite on some rank. Returns whether it did. Collective. Gradients that were not
-- unscaled before are by the step as it reads them; p.grad gives them unscaled afterwards, whether it stepped or not.
function Scaler:step(opt, clip_factor)
  if not self.enabled then
    opt:step()
    return true
  end
  local entry = stage_of(self, "step", opt)
  if entry.stage == "stepped" then fail "step: called twice for this optimizer since the last update" end
  if entry.stage == nil then
    if optim.is_plain(opt) then base.free(look(self, "step", opt, entry))
    else grad.no_grad(unscale, self, "step", opt, entry) end
  end
  local by = entry.stage == "looked" and entry.by * (clip_factor or 1) or 1
  entry.stage = "stepped"
  local found = found_inf(entry)
  if found then
    if by ~= 1 then optim.scale_grads(opt, by) end
    opt:skip_step()
  elseif by ~= 1 then optim.apply_scaled(opt, by)
  else opt:step() end
  return not found
end

-- Once after the steps: the scale falls when a step was skipped, and grows after growth_interval steps that were not.
-- update(new_scale) sets it instead.
function Scaler:update(new_scale)
  if not self.enabled then return end
  if new_scale ~= nil then
    if type(new_scale) ~= "number" or not (new_scale > 0) then fail(("update: new_scale is %s, expected a number above 0"):format(tostring(new_scale))) end
    self.value, self.optimizers, self.scaled = f32(new_scale), {}, false
    return
  end
  local any, found = false, false
  for _, entry in pairs(self.optimizers) do
    if entry.stage then any, found = true, found or found_inf(entry) end
  end
  if not any then fail "update: no optimizer was stepped or unscaled since the last update" end
  follow.used(self)
  if found then
    self.value, self.growth_tracker = f32(self.value * self.backoff_factor), 0
  else
    self.growth_tracker = self.growth_tracker + 1
    if self.growth_tracker == self.growth_interval then
      local grown = f32(self.value * self.growth_factor)
      if grown < math.huge then self.value = grown end
      self.growth_tracker = 0
    end
  end
  self.optimizers, self.scaled = {}, false
end

-- Plain numbers under PyTorch's names; empty when not enabled.
local STATE = { scale = "value", growth_factor = "growth_factor", backoff_factor = "backoff_factor", growth_interval = "growth_interval",
  _growth_tracker = "growth_tracker" }

function Scaler:state_dict()
  local state = {}
  if self.enabled then for name, field in pairs(STATE) do state[name] = self[field] end end
  return state
end

function Scaler:check_state_dict(state)
  if not self.enabled then return end
  if type(state) ~= "table" then fail("GradScaler.load_state_dict: expected a table, got a " .. type(state)) end
  if next(state) == nil then fail "GradScaler.load_state_dict: the state is empty; was it saved by a scaler that was not enabled?" end
  for name in pairs(STATE) do
    if type(state[name]) ~= "number" then fail(("GradScaler.load_state_dict: \"%s\" is missing: not a scaler's state"):format(name)) end
  end
  for name in pairs(state) do
    if not STATE[name] then fail(("GradScaler.load_state_dict: unknown \"%s\": not a scaler's state"):format(tostring(name))) end
  end
end
function Scaler:load_state_dict(state)
  self:check_state_dict(state)
  if not self.enabled then return end
  for name, field in pairs(STATE) do self[field] = state[name] end
end

return M
