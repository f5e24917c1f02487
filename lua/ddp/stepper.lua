-- stepper.lua -- ddp.stepper: backward, accumulation over a window of micro-batches, reduction, unscaling, clipping, the
-- step, the scaler's update and the schedule, as one call a micro-batch.
--
-- Divisors. A micro-batch i of weight w_i (its number of samples; 1 when none is given) has a mean loss and its gradient
-- g_i. The window's gradient on this rank is sum(w_i g_i) / W with W = sum(w_i), whatever the sizes and however short the
-- last window; over the ranks it is the mean of these, weighted by each rank's W. W is known at the window's end only. So each
-- backward starts from w_i / R, where R = accumulate * w_1 is what W will be when all are alike (it also keeps f16
-- gradients where a plain mean has them); when W comes out otherwise, what is summed up is multiplied by R / W before it is
-- reduced. The last backward of a full window reduces while it runs; a window that is cut short, or ends with a skipped
-- micro-batch, is reduced after it.
--
-- Unscaling and clipping. One pass over the gradients takes their norm and sees whether all are finite; the step multiplies
-- each by one factor as it reads it. They are written only for those who look: p.grad after step(loss) is unscaled and
-- clipped, as after the sequence of calls that this stands for, and so is a handle of it that was taken before. An
-- optimizer or scaler of the script's own gets that sequence itself.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local module = require "ddp.nn.module"
local optim = require "ddp.optim"
local parallel = require "ddp.parallel"
local amp = require "ddp.amp"
local join = require "ddp.join"
local fail = base.error

local Stepper = {}
Stepper.__index = Stepper

local function parameters(self)
  local list = {}
  for _, g in ipairs(self.optimizer.param_groups) do
    for _, p in ipairs(g.params) do list[#list + 1] = p end
  end
  return list
end

local function gradients(self)
  local list = {}
  for _, p in ipairs(parameters(self)) do list[#list + 1] = p.grad end
  return list
end

local function any_gradient(self)
  if self.plain then return optim.has_grads(self.optimizer) end
  for _, g in ipairs(self.optimizer.param_groups) do
    for _, p in ipairs(g.params) do if p.grad ~= nil then return true end end
  end
  return false
end

-- ---- inside a window ----------------------------------------------------------------------------------------------------

-- sum so far * R / W, when W is not R.
local function rescale(self)
  if self.total == self.expected or self.total == 0 then return end
  local grads = self.plain and {} or gradients(self)
  if self.plain then optim.scale_grads(self.optimizer, self.expected / self.total)
  elseif #grads > 0 then base.free(grad.no_grad(ops.grad_unscale_, grads, self.expected / self.total)) end
  self.expected = self.total
end

local function open_window(self, weight)
  if self.wrapped then join.stepped(self) end
  self.at_end = nil
  if self.seen == 0 then
    self.optimizer:zero_grad() -- a loss that ran before never leaks in
    self.total, self.expected = 0, 0
  end
  self.seen = self.seen + 1
  if self.total == 0 then self.expected = self.accumulate * weight end
  self.total = self.total + weight
end

-- loss:backward() that starts from `share` of the loss; `reduce`: the gradients are whole then.
local function backward(self, loss, share, reduce)
  local from = self.scaler and self.scaler:scale(loss) or loss
  local seed = share ~= 1 and tensor.full(from:size(), share, { dtype = from:dtype(), device = from:device() }) or nil
  local opts = { weight = self.total }
  grad.next_factor = self.expected -- share, then R / W, then W: what comes of this micro-batch in the end is its share times R
  if not self.wrapped or reduce then from:backward(seed, opts)
  else self.model:no_sync(function() from:backward(seed, opts) end) end
end

-- ---- the window's end ---------------------------------------------------------------------------------------------------

local function rate(self) return self.optimizer.param_groups[1].lr end

-- The calls in their order, each with its pass over the gradients. Returns whether the step was made, and their norm.
local function step_by_calls(self)
  if self.scaler then self.scaler:unscale_(self.optimizer) end
  local norm = self.clip and optim.clip_grad_norm_(parameters(self), self.clip)
  local applied = true
  if self.scaler then applied = self.scaler:step(self.optimizer)
  else self.optimizer:step() end
  return applied, norm
end

-- On a GPU the norm stays there: the host would wait for the whole step to read it.
local function clip_on_device(self)
  local norm = optim.clip_grad_norm_(parameters(self), self.clip)
  optim.apply_scaled(self.optimizer, 1)
  return true, norm
end

local function step_at_once(self)
  if self.clip and not self.scaler and self.on_device then return clip_on_device(self) end
  local scaler, norm = self.scaler and self.scaler:is_enabled() and self.scaler, nil
  if scaler then norm = amp.look(scaler, self.optimizer)
  elseif self.clip then norm = optim.grad_norm(self.optimizer, 1) end
  local factor = self.clip and optim.clip_factor(norm:item(), self.clip) or 1
  local applied = true
  if scaler then applied = scaler:step(self.optimizer, factor)
  else optim.apply_scaled(self.optimizer, factor) end
  return applied, norm
end

-- info.grad_norm of a step on a GPU: read when it is asked for.
local on_demand = { __index = function(info, key)
  if key ~= "grad_norm" then return nil end
  local value = info.norm:item()
  rawset(info, "grad_norm", value)
  return value
end }
local function lazily(info, norm)
  info.norm = norm
  setmetatable(info, on_demand)
end

-- Gradients are whole and the same on all ranks. Returns applied, info.
local function close_window(self)
  local info = { window_end = true, skipped = false, lr = rate(self) }
  self.seen = 0
  if not any_gradient(self) and (self.wrapped or parallel.world_size() == 1) then -- every rank skipped every micro-batch
    info.skipped = true
    return false, info
  end
  local applied, norm = (self.plain and step_at_once or step_by_calls)(self)
  if self.scaler then self.scaler:update() end
  if applied and self.schedule then self.schedule:step() end
  info.skipped = not applied
  if norm and self.on_device then
    if self.clip then lazily(info, norm) end
  elseif norm then
    if self.clip then info.grad_norm = norm:item() end
    base.free(norm)
  end
  return applied, info
end

-- After the last backward, where none reduced.
local function reduce_rest(self)
  rescale(self)
  if self.wrapped then self.model:reduce_gradients(self.total) end
end

local function check_weight(self, weight)
  if weight == nil then return 1 end
  if type(weight) ~= "number" or not (weight >= 0 and weight < math.huge) then
    fail(("stepper: weight is %s, expected a number from 0"):format(type(weight) == "number" and weight or "a " .. type(weight)))
  end
  if self.wrapped and not self.weighs then
    self.model:weigh()
    self.weighs = true
  end
  return weight
end

-- One micro-batch: its plain mean loss, and its weight (the number of samples) where they differ. A weight of 0 is skip.
function Stepper:__call(loss, weight)
  weight = check_weight(self, weight)
  if not tensor.is_tensor(loss) then fail("stepper: expected a loss, got a " .. type(loss)) end
  if loss:numel() ~= 1 then fail(("stepper: the loss is [%s], expected one number: the mean over the micro-batch"):format(table.concat(loss:size(), ","))) end
  if weight == 0 then return self:skip() end
  open_window(self, weight)
  local last = self.seen == self.accumulate
  if last then rescale(self) end
  backward(self, loss, weight / self.expected, last)
  if not last then return false, { window_end = false, skipped = false, lr = rate(self) } end
  return close_window(self)
end

-- A micro-batch that this rank does not have: the others' count alone.
function Stepper:skip()
  open_window(self, 0)
  if self.scaler then self.scaler:join() end
  if self.seen < self.accumulate then return false, { window_end = false, skipped = false, lr = rate(self) } end
  reduce_rest(self)
  return close_window(self)
end

-- Ends a window that is cut short, as the last of an epoch may be; without one it does nothing. The end of a loader's loop
-- does so by itself.
function Stepper:flush()
  if self.seen == 0 then
    local at_end = self.at_end
    self.at_end = nil
    if at_end then return at_end.applied, at_end.info end
    return false, { window_end = false, skipped = false, lr = rate(self) }
  end
  reduce_rest(self)
  return close_window(self)
end

-- The loop over the data has ended: an open window is cut short now, before this rank only answers the others'. A flush that
-- follows says how it went.
function Stepper:end_of_data()
  if self.seen == 0 then return end
  local applied, info = self:flush()
  self.at_end = { applied = applied, info = info }
end

-- ---- making one ------------------------------------------------------------------------------------------------------------

local function need(cond, name, what, value)
  if not cond then fail(("stepper: %s is %s, expected %s"):format(name, value == nil and "missing" or type(value) == "number" and value or "a " .. type(value), what)) end
end

-- ddp.stepper{model = net, optimizer = opt, accumulate = 1, clip = max_norm, scaler = GradScaler, schedule = s}. Called with a
-- loss and a weight it returns applied, info: applied only at a window's end, when the step was made; info has window_end,
-- skipped (the step was not made), grad_norm (before clipping, with clip) and lr (that of the step). Collective at a window's end.
return function(opts)
  opts = base.options("stepper", opts, { "model", "optimizer", "accumulate", "clip", "scaler", "schedule" })
  local m = opts.model
  local wrapped = type(m) == "table" and rawget(m, "_ddp") ~= nil
  need(wrapped or module.is_module(m), "model", "a module, wrapped or not", m)
  need(type(opts.optimizer) == "table" and opts.optimizer.param_groups, "optimizer", "an optimizer", opts.optimizer)
  local n = opts.accumulate == nil and 1 or opts.accumulate
  need(type(n) == "number" and n >= 1 and n % 1 == 0, "accumulate", "a whole number from 1", n)
  need(opts.clip == nil or type(opts.clip) == "number" and opts.clip > 0, "clip", "a number above 0", opts.clip)
  need(opts.scaler == nil or type(opts.scaler) == "table" and opts.scaler.unscale_, "scaler", "a GradScaler", opts.scaler)
  need(opts.schedule == nil or type(opts.schedule) == "table" and opts.schedule.get_last_lr, "schedule", "a schedule", opts.schedule)
  if wrapped and n > 1 then m:weigh() end -- ranks whose windows hold fewer micro-batches count less
  local first = opts.optimizer.param_groups[1].params[1]
  local on_device = first ~= nil and first:device() ~= "cpu"
  local self = setmetatable({ model = m, on_device = on_device, wrapped = wrapped, weighs = wrapped and n > 1, optimizer = opts.optimizer,
    accumulate = n, clip = opts.clip, scaler = opts.scaler,
    schedule = opts.schedule, plain = optim.is_plain(opts.optimizer) and (opts.scaler == nil or amp.is_plain(opts.scaler)), seen = 0, total = 0, expected = 0 }, Stepper)
  if wrapped then join.add_stepper(self) end
  return self
end
