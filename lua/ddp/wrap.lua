-- wrap.lua -- what DistributedDataParallel keeps of a model: the reducer of its parameters, its options, its hook.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local C, check, fail = base.C, base.check, base.error

local M = {}

-- ---- options ---------------------------------------------------------------------------------------------------------------

local REDUCE = { mean = true, sum = true, weighted = true }
local COMPRESSION = { none = C.DDP_COMPRESSION_NONE, bf16 = C.DDP_COMPRESSION_BF16, f16 = C.DDP_COMPRESSION_F16 }
-- PyTorch's options that have nothing to switch here, and why.
local NOT_NEEDED = {
  find_unused_parameters = "parameters that a step leaves out are found by the reduction itself",
  static_graph = "the order of the buckets does not depend on the graph",
  gradient_as_bucket_view = "gradients always are views into the buckets",
  broadcast_buffers = "buffers stay as each rank has them between forward and backward, and running statistics are averaged before evaluation",
}
local OPTIONS = { "bucket_mb", "reduce", "compression", "error_feedback", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers" }
local explained = {}

local function explain(opts)
  for _, name in ipairs(OPTIONS) do
    if NOT_NEEDED[name] and opts[name] ~= nil and not explained[name] then
      explained[name] = true
      if C.ddp_rank() == 0 then C.ddp_log_line(1, ("DistributedDataParallel: %s is not needed: %s"):format(name, NOT_NEEDED[name])) end
    end
  end
end

-- Checks DistributedDataParallel's options; nil is an empty table.
function M.options(opts)
  local what = "DistributedDataParallel"
  opts = base.options(what, opts, OPTIONS)
  local reduce, compression = opts.reduce or "mean", opts.compression or "none"
  if not REDUCE[reduce] then fail(("%s: reduce is \"%s\", expected mean, sum or weighted"):format(what, tostring(reduce))) end
  if not COMPRESSION[compression] then fail(("%s: compression \"%s\" is not built; expected none, bf16 or f16"):format(what, tostring(compression))) end
  if opts.error_feedback and compression == "none" then fail(what .. ": error_feedback comes with a compression") end
  explain(opts)
  return { bucket_mb = opts.bucket_mb or 0, reduce = reduce, compression = COMPRESSION[compression], feedback = opts.error_feedback and 1 or 0 }
end

-- ---- the reducer -----------------------------------------------------------------------------------------------------------

-- Makes the reducer of all parameters that need gradients now. Collective.
local function build(self)
  local params, names, frozen = {}, {}, {}
  for name, p in self.module:named_parameters() do
    if p.requires_grad then
      params[#params + 1] = p
      names[#names + 1] = name
    else frozen[#frozen + 1] = p end
  end
  if #params == 0 then fail "DistributedDataParallel: the model has no parameters that need gradients" end
  local list, c_names = ffi.new("ddp_tensor *[?]", #params), ffi.new("const char *[?]", #params)
  for i, p in ipairs(params) do list[i - 1], c_names[i - 1] = p, names[i] end
  local o = self.opts
  local c = ffi.new("ddp_reducer_opts", { size = ffi.sizeof "ddp_reducer_opts", bucket_mb = o.bucket_mb, sum = o.reduce == "sum" and 1 or 0,
    weighted = o.reduce == "weighted" and 1 or 0, names = c_names, compression = o.compression, error_feedback = o.feedback })
  local out = ffi.new "ddp_reducer *[1]"
  check(C.ddp_reducer_new(list, #params, c, out))
  self.reducer, self.names, self.frozen = ffi.gc(out[0], C.ddp_reducer_free), names, frozen
  if self.hook then check(C.ddp_reducer_set_hook(self.reducer, self.hook)) end
  for _, p in ipairs(params) do if p.grad ~= nil then p.grad = p.grad end end -- into its bucket
end

-- {module =, reducer =, names =, frozen =, opts =, hook =} of a model; opts from M.options.
function M.new(model, opts)
  local self = { module = model, opts = opts, handles = {} }
  build(self)
  return self
end

-- Parameters that were frozen may want gradients now: then the buckets are made anew. On all ranks alike; before a forward.
function M.refresh(self)
  for _, p in ipairs(self.frozen) do
    if p.requires_grad then
      C.ddp_reducer_free(ffi.gc(self.reducer, nil))
      self.unused_listed = nil
      return build(self)
    end
  end
end

-- Makes a mean a weighted one from now on.
function M.weigh(self)
  if self.opts.reduce == "mean" then self.opts.reduce = "weighted" end
  check(C.ddp_reducer_set_weighted(self.reducer, 1))
end

local reduction_out = ffi.new "ddp_reduction *[1]"
-- Reduces what there is, with this rank's weight; 0 contributes nothing. Collective.
function M.reduce(self, weight)
  local st = C.ddp_reduction_begin(self.reducer, weight, reduction_out)
  local d = reduction_out[0]
  local ok, status = true, st
  if st == 0 then ok, status = pcall(grad.run_comm, function() return C.ddp_reduction_next(d) end) end
  C.ddp_reduction_free(d)
  if not ok then error(status, 0) end
  check(status)
end

-- ---- the hook --------------------------------------------------------------------------------------------------------------

-- What C asks for: the exchange of one bucket, or the end of all that were begun.
local function run_hook(self)
  local k = C.ddp_reducer_hook_bucket(self.reducer)
  if k < 0 then
    local handles = self.handles
    self.handles = {}
    for _, h in ipairs(handles) do h:wait() end
    return
  end
  local handle = self.hook_fn { index = k + 1, name = "bucket " .. k, tensor = base.own(C.ddp_reducer_bucket(self.reducer, k)),
    is_last = k == C.ddp_reducer_n_buckets(self.reducer) - 1 }
  if handle == nil or tensor.is_tensor(handle) then return end
  if type(handle) ~= "table" or type(handle.wait) ~= "function" then
    fail(("communication hook: the result is a %s, expected nothing or a handle with wait()"):format(type(handle)))
  end
  self.handles[#self.handles + 1] = handle
end

-- fn(bucket) exchanges the gradients in bucket.tensor instead of the reducer; see DDP:register_comm_hook.
function M.register_hook(self, fn)
  if type(fn) ~= "function" then fail("register_comm_hook: expected a function, got a " .. type(fn)) end
  if self.hook then fail "register_comm_hook: the model has one already" end
  local weak = setmetatable({ self }, { __mode = "v" }) -- the number of the hook lives as long as the script
  local id = grad.add_comm(function() run_hook(weak[1]) end)
  local st = C.ddp_reducer_set_hook(self.reducer, id)
  if st < 0 then grad.drop_comm(id) end
  check(st)
  self.hook, self.hook_fn = id, fn
end

return M
