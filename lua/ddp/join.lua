-- join.lua -- uneven data: what happens where a loop over a loader ends on this rank and goes on elsewhere.
--
-- A loop in which a wrapped model ran backward joins at its end: open windows of steppers are flushed, then the rank answers
-- the others' reductions with weight 0 until all loops have ended (core/comm/round.c), then it takes over what it missed. A
-- loop without such a backward, as in evaluation, does not, nor one that is left by `break`. A loop without a single batch
-- can't tell by its backwards: it does what the loader's pass before did, or, at the first, joins where a wrapped model is
-- training with gradients on.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local data = require "ddp.data"
local follow = require "ddp.follow"
local parallel = require "ddp.parallel"
local C, check, fail = base.C, base.check, base.error

local M = {}
local wrapped = setmetatable({}, { __mode = "v" }) -- by number, alike on all ranks
local steppers = setmetatable({}, { __mode = "v" }) -- the same
local n_wrapped, n_steppers, calls = 0, 0, 0

-- net: {module =, reducer =, names = of its parameters}.
function M.add_model(net)
  n_wrapped = n_wrapped + 1
  wrapped[n_wrapped] = net
end
function M.add_stepper(stepper)
  n_steppers = n_steppers + 1
  steppers[n_steppers] = stepper
end
-- A micro-batch went to stepper.
function M.stepped(stepper)
  calls = calls + 1
  stepper.last_call = calls
end

local function count() return tonumber(C.ddp_join_count()) end

-- ---- what a rank that missed steps takes over ------------------------------------------------------------------------------

-- Tensors of a plain table with tables, in an order that is the same everywhere, each by calling visit(table, key).
local function each_tensor(t, visit)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys, function(a, b)
    if type(a) == type(b) then return a < b end
    return type(a) == "number"
  end)
  for _, k in ipairs(keys) do
    if tensor.is_tensor(t[k]) then visit(t, k)
    elseif type(t[k]) == "table" then each_tensor(t[k], visit) end
  end
end

-- What the source says: {models = {number...}, objects = {{number =, kind =, state =}...}, tensors = {{shape =, numel =, dtype =, on_gpu =}...}}, where
-- a tensor of a state is its place among `tensors`; and these tensors.
local function describe(mark, used)
  local d, tensors = { models = {}, objects = {}, tensors = {} }, {}
  for i = 1, n_wrapped do
    local net = wrapped[i]
    if net and tonumber(C.ddp_reducer_last(net.reducer)) > mark then d.models[#d.models + 1] = i end
  end
  for i, object in ipairs(follow.since(used)) do
    local state = object:state_dict()
    d.objects[i] = { number = object.follow.number, kind = object.follow.kind, state = state }
    each_tensor(state, function(t, k)
      tensors[#tensors + 1] = t[k]
      d.tensors[#tensors] = { shape = t[k]:size(), numel = t[k]:numel(), dtype = t[k]:dtype(), on_gpu = t[k]:device() ~= "cpu" }
      t[k] = { tensor = #tensors }
    end)
  end
  return d, tensors
end

-- t from the source; a rank that missed nothing keeps its own.
local function pass_on(t, source, missed)
  if not missed and C.ddp_rank() ~= source then t = t:clone() end
  check(C.ddp_broadcast(t, source, "uneven data", nil))
end

local function put_tensors(t, tensors)
  for k, v in pairs(t) do
    if type(v) == "table" then
      if v.tensor and tensors[v.tensor] then t[k] = tensors[v.tensor] else put_tensors(v, tensors) end
    end
  end
end

local function take_over(mark, used, source, missed)
  local d, tensors = nil, {}
  if C.ddp_rank() == source then d, tensors = describe(mark, used) end
  d = parallel.broadcast_object(d, source)
  for i, t in ipairs(d.tensors) do -- row by row, however the two ranks lay theirs out
    local flat = tensors[i] and tensors[i]:contiguous():view(-1) or tensor.empty(t.numel, { dtype = t.dtype, device = t.on_gpu and "cuda" or "cpu" })
    check(C.ddp_broadcast(flat, source, "uneven data", nil))
    tensors[i] = tensors[i] or flat:view(t.shape)
  end
  for _, i in ipairs(d.models) do
    local net = wrapped[i]
    if not net then fail(("uneven data: rank %d trained wrapped model %d, which this rank has not"):format(source, i)) end
    for _, p in net.module:named_parameters() do pass_on(p, source, missed) end
    for _, b in net.module:named_buffers() do pass_on(b, source, missed) end
  end
  if not missed then return end
  for _, o in ipairs(d.objects) do
    local mine = follow.find(o.number)
    if not mine or mine.follow.kind ~= o.kind then
      fail(("uneven data: rank %d stepped its %s, the %dth that was made there; here that is %s"):format(source, o.kind, o.number, mine and mine.follow.kind or "nothing"))
    end
    put_tensors(o.state, tensors)
    mine:load_state_dict(o.state)
  end
end

-- ---- loops -------------------------------------------------------------------------------------------------------------------

local Loop = {}
Loop.__index = Loop
local last_said -- the loop that said last that it is in its last batch

-- A loop over loader begins.
function M.begin(loader)
  C.ddp_join_batch(0)
  last_said = nil
  return setmetatable({ loader = loader, mark = count(), used = follow.mark(), calls = calls, batches = 0 }, Loop)
end

-- The next batch begins; last: no more will come, for sure.
function Loop:batch(last)
  self.batches = self.batches + 1
  C.ddp_join_batch(last and 1 or 0)
  last_said = last and self or nil
end

local function any_in_training()
  if C.ddp_grad_mode() == 0 then return false end
  for i = 1, n_wrapped do if wrapped[i] and wrapped[i].module.training then return true end end
  return false
end

local function trains(self)
  if self.batches > 0 then return count() > self.mark end
  if self.loader.trained ~= nil then return self.loader.trained end
  return any_in_training()
end

local source_out, missed_out = ffi.new "int[1]", ffi.new "int[1]"

-- No more batches.
function Loop:finish()
  local joins = trains(self)
  if self.batches > 0 then self.loader.trained = joins end
  for i = 1, n_steppers do
    local stepper = steppers[i]
    if stepper and (stepper.last_call or 0) > self.calls then stepper:end_of_data() end
  end
  if joins and C.ddp_world_size() > 1 then
    C.ddp_set_where(base.user_line() or "")
    local sure = self.batches == 0 and -1 or last_said == self and 1 or 0
    check(grad.run_comm(function() return C.ddp_join(sure, source_out, missed_out) end))
    if source_out[0] >= 0 then grad.no_grad(take_over, self.mark, self.used, source_out[0], missed_out[0] == 1) end
  end
  C.ddp_join_batch(0)
  last_said = nil
  if joins then M.list_unused() end
end

-- ---- parameters that nothing uses --------------------------------------------------------------------------------------------

-- One line on rank 0, once a model: after the first loop that trained it, or when the script is finished.
function M.list_unused()
  if C.ddp_rank() ~= 0 then return end
  for i = 1, n_wrapped do
    local net = wrapped[i]
    if net and not net.unused_listed and C.ddp_reducer_seen(net.reducer) == 1 then
      net.unused_listed = true
      local names = {}
      for k, name in ipairs(net.names) do if C.ddp_reducer_used(net.reducer, k - 1) == 0 then names[#names + 1] = name end end
      if #names > 0 then
        C.ddp_log_line(1, ("no rank has used %d of the model's %d parameters in a step so far: %s"):format(#names, #net.names, table.concat(names, ", ")))
      end
    end
  end
end

data.on_loop = M.begin

return M
