-- schedule.lua -- learning rates over the steps that were applied: ddp.optim.schedule. A schedule scales each parameter
-- group's own rate, the one the group had when the schedule was made. t is the number of applied steps so far.
local base = require "ddp.ffi"
local follow = require "ddp.follow"
local fail = base.error

local M = {}
local Schedule = {}
Schedule.__index = Schedule

-- Sets the rates for the step after t.
local function apply(self)
  for i, g in ipairs(self.optimizer.param_groups) do
    self.last[i] = self.rate(self.base_lrs[i], self.t)
    g.lr = self.last[i]
  end
end

-- rate(base, t): a group's rate after t applied steps.
local function schedule(kind, optimizer, rate)
  if type(optimizer) ~= "table" or type(optimizer.param_groups) ~= "table" then
    fail(("%s: optimizer is %s, expected an optimizer"):format(kind, optimizer == nil and "missing" or "a " .. type(optimizer)))
  end
  local self = setmetatable({ kind = kind, optimizer = optimizer, rate = rate, t = 0, base_lrs = {}, last = {} }, Schedule)
  for i, g in ipairs(optimizer.param_groups) do self.base_lrs[i] = g.lr end
  apply(self)
  return follow.add(self, "schedule " .. kind)
end

-- After an applied step; a stepper calls it.
function Schedule:step()
  follow.used(self)
  self.t = self.t + 1
  apply(self)
end
-- The rate of each group for the next step.
function Schedule:get_last_lr() return { unpack(self.last) } end

function Schedule:state_dict() return { kind = self.kind, step = self.t, base_lrs = { unpack(self.base_lrs) } } end
function Schedule:check_state_dict(state)
  local what = self.kind .. ".load_state_dict"
  if type(state) ~= "table" or type(state.step) ~= "number" or type(state.base_lrs) ~= "table" then fail(what .. ": expected {kind =, step =, base_lrs =}") end
  if state.kind ~= self.kind then fail(("%s: the state is of \"%s\""):format(what, tostring(state.kind))) end
  if #state.base_lrs ~= #self.base_lrs then fail(("%s: %d groups in the state, %d here"):format(what, #state.base_lrs, #self.base_lrs)) end
end
function Schedule:load_state_dict(state)
  self:check_state_dict(state)
  self.t, self.base_lrs = state.step, { unpack(state.base_lrs) }
  apply(self)
end

-- ---- kinds ----------------------------------------------------------------------------------------------------------------

local function number(kind, opts, name, default, least)
  local v = opts[name]
  if v == nil then v = default end
  if type(v) ~= "number" or not (v >= least) then
    fail(("%s: %s is %s, expected a number from %g"):format(kind, name, v == nil and "missing" or tostring(v), least))
  end
  return v
end

-- Up to the base rate in `warmup` equal steps, then along curve(share of the rest) from 1 to 0, down to min_lr at `steps`.
local function warm_then(kind, opts, curve)
  opts = base.options(kind, opts, { "optimizer", "steps", "warmup", "min_lr" })
  local steps, warmup, least = number(kind, opts, "steps", nil, 1), number(kind, opts, "warmup", 0, 0), number(kind, opts, "min_lr", 0, 0)
  if warmup > steps then fail(("%s: warmup is %g, more than the %g steps"):format(kind, warmup, steps)) end
  return schedule(kind, opts.optimizer, function(lr, t)
    if t + 1 < warmup then return lr * (t + 1) / warmup end
    local share = math.min(1, math.max(0, t - warmup) / math.max(1, steps - warmup))
    return least + (lr - least) * curve(share)
  end)
end

local function half_cosine(share) return 0.5 * (1 + math.cos(math.pi * share)) end

-- cosine{optimizer=, steps=, warmup = 0, min_lr = 0}
function M.cosine(opts) return warm_then("cosine", opts, half_cosine) end
-- linear{optimizer=, steps=, warmup = 0, min_lr = 0}
function M.linear(opts) return warm_then("linear", opts, function(share) return 1 - share end) end

-- one_cycle{optimizer=, steps=, pct_start = .3, div_factor = 25, final_div_factor = 1e4, anneal_strategy = "cos"|"linear"}: PyTorch's
-- OneCycleLR without its cycle of momentum; the group's rate is the peak.
function M.one_cycle(opts)
  opts = base.options("one_cycle", opts, { "optimizer", "steps", "pct_start", "div_factor", "final_div_factor", "anneal_strategy" })
  local steps, start = number("one_cycle", opts, "steps", nil, 1), number("one_cycle", opts, "pct_start", 0.3, 0)
  local div, final = number("one_cycle", opts, "div_factor", 25, 1), number("one_cycle", opts, "final_div_factor", 1e4, 1)
  local anneal = opts.anneal_strategy or "cos"
  if anneal ~= "cos" and anneal ~= "linear" then fail(("one_cycle: anneal_strategy is \"%s\", expected cos or linear"):format(tostring(anneal))) end
  if start > 1 then fail(("one_cycle: pct_start is %g, expected at most 1"):format(start)) end
  local curve = anneal == "cos" and half_cosine or function(share) return 1 - share end
  local top, last = start * steps - 1, steps - 1
  return schedule("one_cycle", opts.optimizer, function(lr, t)
    local low = lr / div
    if t <= top then return lr + (low - lr) * curve(t / top) end
    local share = last > top and math.min(1, (t - top) / (last - top)) or 1
    return low / final + (lr - low / final) * curve(share)
  end)
end

-- step{optimizer=, every=, gamma = .1}: times gamma after each `every` steps.
function M.step(opts)
  opts = base.options("step", opts, { "optimizer", "every", "gamma" })
  local every, gamma = number("step", opts, "every", nil, 1), number("step", opts, "gamma", 0.1, 0)
  return schedule("step", opts.optimizer, function(lr, t) return lr * gamma ^ math.floor(t / every) end)
end

-- lambda{optimizer=, fn=}: the rate times fn(t).
function M.lambda(opts)
  opts = base.options("lambda", opts, { "optimizer", "fn" })
  local fn = opts.fn
  if fn == nil then fail "lambda: fn is missing" end
  return schedule("lambda", opts.optimizer, function(lr, t)
    local factor = fn(t)
    if type(factor) ~= "number" then fail(("lambda: fn(%d) is a %s, expected a number"):format(t, type(factor))) end
    return lr * factor
  end)
end

return M
