-- parallel.lua -- the job's ranks: joining, collectives, objects, and DistributedDataParallel.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local module = require "ddp.nn.module"
local plain = require "ddp.plain"
local wrap = require "ddp.wrap"
local groups = require "ddp.groups"
local C, check, fail = base.C, base.check, base.error

local M = {}

-- The user's line joins what ranks show each other; looking it up costs half a microsecond, so only where ranks wait.
local function mark_line()
  if C.ddp_world_size() > 1 then C.ddp_set_where(base.user_line() or "") end
end

-- ---- the job -----------------------------------------------------------------------------------------------------

function M.init(opts)
  opts = base.options("init", opts, { "timeout", "engine" })
  local c = ffi.new("ddp_init_opts", { size = ffi.sizeof "ddp_init_opts", timeout = opts.timeout or 0, engine = opts.engine })
  check(C.ddp_init(c))
end
function M.rank() return C.ddp_rank() end
function M.world_size() return C.ddp_world_size() end
function M.local_rank() return C.ddp_local_rank() end
function M.local_world_size() return C.ddp_local_world_size() end
function M.node_rank() return C.ddp_node_rank() end
function M.num_nodes() return C.ddp_num_nodes() end
-- Whether a rank got SIGTERM or SIGINT since the first call: the same answer on all. Collective: once a step, say.
function M.stop_requested()
  mark_line()
  return check(C.ddp_stop_requested()) == 1
end
function M.finish()
  local join = package.loaded["ddp.join"]
  if join then join.list_unused() end
  C.ddp_finish()
end

-- ---- collectives on tensors ----------------------------------------------------------------------------------------

local OP = { sum = 0, mean = 1, min = 2, max = 3 }
local function op_code(what, op)
  local code = OP[op or "sum"]
  if not code then fail(("%s: op is \"%s\", expected sum, mean, min or max"):format(what, tostring(op))) end
  return code
end

local work_out = ffi.new "ddp_work *[1]"
local function need_tensor(what, t)
  if not tensor.is_tensor(t) then fail(("%s: expected a tensor, got a %s"):format(what, type(t))) end
end
local function collective_options(what, opts, more)
  local known = { "async", "name", "group" }
  for _, k in ipairs(more or {}) do known[#known + 1] = k end
  opts = base.options(what, opts, known)
  groups.check(what, opts.group)
  mark_line()
  return opts
end

-- Starts call(a, b, name, work) in the group that opts name, and waits for it if it is not to be asynchronous; the result is t.
local function run(opts, t, call, a, b)
  local g = opts.group
  local before = g and C.ddp_group_use(g.handle)
  local status = call(a, b, opts.name, opts.async and work_out or nil) -- raises nothing
  if g then C.ddp_group_use(before) end
  check(status)
  return opts.async and groups.handle(work_out[0], t, g) or t
end

-- all_reduce(t, "sum"|"mean"|"min"|"max", {async =, name =, group =}): in place.
function M.all_reduce(t, op, opts)
  need_tensor("all_reduce", t)
  if type(op) == "table" then op, opts = op.op, op end
  opts = collective_options("all_reduce", opts, { "op" })
  return run(opts, t, C.ddp_all_reduce, t, op_code("all_reduce", op))
end
-- root is a rank of the job, also in a group.
function M.broadcast(t, root, opts)
  need_tensor("broadcast", t)
  opts = collective_options("broadcast", opts)
  return run(opts, t, C.ddp_broadcast, t, root or (opts.group and opts.group.members[1] or 0))
end
function M.all_gather(t, opts)
  need_tensor("all_gather", t)
  opts = collective_options("all_gather", opts)
  local shape = { opts.group and opts.group:size() or C.ddp_world_size(), unpack(t:size()) }
  if #shape > C.DDP_MAX_DIM then fail(("all_gather: t has %d dimensions, the result one more than there can be"):format(#shape - 1)) end
  local out = groups.empty(shape, t:dtype(), t:device())
  return run(opts, out, C.ddp_all_gather_into, out, t)
end
function M.reduce_scatter(t, op, opts)
  need_tensor("reduce_scatter", t)
  if type(op) == "table" then op, opts = op.op, op end
  opts = collective_options("reduce_scatter", opts, { "op" })
  local shape, n = t:size(), opts.group and opts.group:size() or C.ddp_world_size()
  if #shape == 0 or shape[1] % n ~= 0 then
    fail(("reduce_scatter: t is [%s]: its first size must divide into %d ranks"):format(table.concat(shape, ","), n))
  end
  shape[1] = shape[1] / n
  local out = groups.empty(shape, t:dtype(), t:device())
  local code = op_code("reduce_scatter", op)
  return run(opts, out, function(y, x, name, work) return C.ddp_reduce_scatter_into(y, x, code, name, work) end, out, t)
end
function M.barrier(opts)
  opts = base.options("barrier", opts, { "group" })
  mark_line()
  groups.within(groups.check("barrier", opts.group), function() check(C.ddp_barrier()) end)
end

-- ---- objects ---------------------------------------------------------------------------------------------------------

local data_out, n_out = ffi.new "void *[1]", ffi.new "int64_t[1]"

local function broadcast_text(text, root, patient)
  local mine = C.ddp_rank() == root
  local keep = text
  data_out[0] = mine and ffi.cast("void *", ffi.cast("const char *", keep)) or nil
  n_out[0] = mine and #keep or 0
  local f = patient and C.ddp_broadcast_bytes_patient or C.ddp_broadcast_bytes
  check(f(data_out, n_out, root))
  if mine then return text end
  local got = ffi.string(data_out[0], n_out[0])
  C.ddp_bytes_free(data_out[0])
  return got
end

function M.broadcast_object(v, root, opts)
  opts = base.options("broadcast_object", opts, { "group" })
  local g = groups.check("broadcast_object", opts.group)
  mark_line()
  root = root or (g and g.members[1] or 0)
  return plain.decode(groups.within(g, broadcast_text, C.ddp_rank() == root and plain.encode(v, "broadcast_object") or "", root))
end

local function gather_objects(v, size)
  local text = plain.encode(v, "all_gather_object")
  local lens = ffi.new("int64_t[?]", size)
  check(C.ddp_all_gather_bytes(text, #text, data_out, lens))
  local all, at = {}, ffi.cast("const char *", data_out[0])
  for r = 0, size - 1 do
    all[r + 1] = plain.decode(ffi.string(at, lens[r]))
    at = at + lens[r]
  end
  C.ddp_bytes_free(data_out[0])
  return all
end
function M.all_gather_object(v, opts)
  opts = base.options("all_gather_object", opts, { "group" })
  local g = groups.check("all_gather_object", opts.group)
  mark_line()
  return groups.within(g, gather_objects, v, g and g:size() or math.max(C.ddp_world_size(), 1))
end

-- Runs fn on rank 0 while the others wait, however long; its plain values come back on all ranks, and so does an error.
function M.rank0(fn, ...)
  check(C.ddp_init(nil))
  if C.ddp_world_size() == 1 then return fn(...) end
  mark_line()
  local text = ""
  if C.ddp_rank() == 0 then
    C.ddp_set_solo(1)
    local result = { n = 0 }
    local function pack(ok, ...) result = { ok = ok, n = select("#", ...), ... } end
    pack(pcall(fn, ...))
    C.ddp_set_solo(0)
    if not result.ok then result = { ok = false, n = 1, tostring(result[1]) } end
    local ok, encoded = pcall(plain.encode, result, "rank0")
    if not ok then encoded = plain.encode({ ok = false, n = 1, encoded }, "rank0") end
    text = encoded
  end
  local r = plain.decode(broadcast_text(text, 0, true))
  if not r.ok then error(C.ddp_rank() == 0 and r[1] or "on rank 0: " .. r[1], 0) end
  return unpack(r, 1, r.n)
end

-- Runs fn on rank 0, then on the others: the first prepares what the others find. Each gets the results of its own call; an
-- error of rank 0 reaches all, before the others begin. A file is best written through ddp.replace_file.
function M.rank0_first(fn, ...)
  check(C.ddp_init(nil))
  if C.ddp_world_size() == 1 then return fn(...) end
  local args, n = { ... }, select("#", ...)
  local results
  local function pack(...) results = { n = select("#", ...), ... } end
  M.rank0(function() pack(fn(unpack(args, 1, n))) end)
  if C.ddp_rank() ~= 0 then return fn(...) end
  return unpack(results, 1, results.n)
end

-- fn(name) writes a file of that name, which then takes the place of `path`, whole and on the disk; when fn fails, or the process
-- is killed, what stood there stays. Returns what fn returns. On this rank alone.
function M.replace_file(path, fn)
  if type(path) ~= "string" or path == "" then fail("replace_file: expected the name of a file, got a " .. type(path)) end
  local out = ffi.new "ddp_file_draft *[1]"
  check(C.ddp_file_draft_new(path, out))
  local draft = ffi.gc(out[0], C.ddp_file_draft_free)
  local function finish(ok, ...)
    local status = ok and C.ddp_file_draft_commit(draft) or 0
    C.ddp_file_draft_free(ffi.gc(draft, nil))
    if not ok then error((...), 0) end
    check(status)
    return ...
  end
  return finish(pcall(fn, ffi.string(C.ddp_file_draft_name(draft))))
end

local function sorted_keys(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys)
  return keys
end

-- This rank's metrics as plain numbers, {name = {sum, count}}.
local function plain_metrics(metrics)
  if type(metrics) ~= "table" then fail("reduce_metrics: expected { name = { sum, count } }, got a " .. type(metrics)) end
  local mine = {}
  for k, v in pairs(metrics) do
    local sum, count = type(v) == "table" and v[1], type(v) == "table" and v[2]
    if tensor.is_tensor(sum) then sum = sum:item() end
    if tensor.is_tensor(count) then count = count:item() end
    if type(k) ~= "string" or type(sum) ~= "number" or type(count) ~= "number" then
      fail(("reduce_metrics: \"%s\": expected { sum, count }"):format(tostring(k)))
    end
    mine[k] = { sum, count }
  end
  return mine
end

-- {loss = {sum, count}} -> {loss = sum/count} over all ranks, the same bits on all. Ranks with other keys are an error on all.
function M.reduce_metrics(metrics)
  mark_line()
  local ok, mine = pcall(plain_metrics, metrics)
  local all, out = M.all_gather_object(ok and { metrics = mine } or { error = tostring(mine) }), {}
  if not ok then error(mine, 0) end
  for r, theirs in ipairs(all) do
    if theirs.error then fail(("reduce_metrics: on rank %d: %s"):format(r - 1, theirs.error)) end
  end
  local first = all[1].metrics
  for r, theirs in ipairs(all) do
    for _, k in ipairs(sorted_keys(first)) do
      if theirs.metrics[k] == nil then fail(("reduce_metrics: rank 0 has \"%s\", rank %d has not"):format(k, r - 1)) end
    end
    for _, k in ipairs(sorted_keys(theirs.metrics)) do
      if first[k] == nil then fail(("reduce_metrics: rank %d has \"%s\", rank 0 has not"):format(r - 1, k)) end
    end
  end
  for k in pairs(first) do
    local sum, count = 0, 0
    for _, theirs in ipairs(all) do sum, count = sum + theirs.metrics[k][1], count + theirs.metrics[k][2] end
    out[k] = sum / count
  end
  return out
end

M.new_group, M.send, M.recv, M.all_to_all = groups.new_group, groups.send, groups.recv, groups.all_to_all
function M.print(...) if C.ddp_rank() == 0 then print(...) end end

-- ---- DistributedDataParallel ---------------------------------------------------------------------------------------------

local DDP = {}

local function field(self, key)
  local own_method = DDP[key]
  if own_method ~= nil then return own_method end
  local m = rawget(self, "module")
  local v = m[key]
  if type(v) ~= "function" then return v end
  -- A method of the module: called on the module.
  return function(first, ...)
    if first == self then return v(m, ...) end
    return v(first, ...)
  end
end
local meta = {
  __index = field,
  __newindex = function(self, key, value) rawget(self, "module")[key] = value end,
  __call = function(self, ...)
    local state = rawget(self, "_ddp")
    if state.frozen[1] then wrap.refresh(state) end
    return rawget(self, "module")(...)
  end,
  __tostring = function(self) return "DistributedDataParallel(" .. tostring(rawget(self, "module")) .. ")" end,
}

local function average_buffers(m)
  if C.ddp_world_size() == 1 then return end
  grad.no_grad(function()
    for _, b in m:named_buffers() do
      if b:dtype() == "f32" or b:dtype() == "f64" then check(C.ddp_all_reduce(b, C.DDP_MEAN, "buffers", nil)) end
    end
  end)
end

-- A rank whose model is on the cpu while others' are on GPUs waits for them in vain, or holds them up: it is refused, by name.
local wrapped = 0
local function compare_devices(model)
  if C.ddp_world_size() == 1 or C.ddp_is_initialized() == 0 then return end
  wrapped = wrapped + 1
  local first = model:parameters()[1]
  local on_gpu = first ~= nil and first:device() ~= "cpu"
  check(C.ddp_job_compare("device of model " .. wrapped, on_gpu and "its model on a GPU" or "its model on the cpu",
    "DistributedDataParallel: all ranks need a GPU, or DDP_DEVICE=cpu keeps all on the cpu (ddprun doctor says what is missing)"))
end

-- Wraps a model: rank 0's parameters and buffers go to all, gradients are reduced while backward runs. Parameters may be frozen
-- and unfrozen between steps, on all ranks alike.
-- {bucket_mb = 25 (over several hosts 8), reduce = "mean"|"sum"|"weighted", compression = "none"|"bf16"|"f16", error_feedback =}: gradients of f32
-- parameters may travel in 16 bits; with error_feedback what a rank rounds off goes with its next gradient. PyTorch's
-- find_unused_parameters, static_graph, gradient_as_bucket_view and broadcast_buffers are taken, and not needed.
function M.DistributedDataParallel(model, opts)
  if not module.is_module(model) then fail("DistributedDataParallel: expected a module, got a " .. type(model)) end
  opts = wrap.options(opts)
  mark_line()
  compare_devices(model)
  local state = wrap.new(model, opts)
  if opts.reduce == "weighted" then grad.weighted = true end
  if C.ddp_world_size() > 1 then
    grad.no_grad(function() for _, b in model:named_buffers() do check(C.ddp_broadcast(b, 0, "buffers", nil)) end end)
  end
  require("ddp.join").add_model(state)
  return setmetatable({ module = model, _ddp = state }, meta)
end

-- Gradients of backwards inside fn stay on this rank; the next one outside reduces the sum.
function DDP:no_sync(fn, ...)
  local state = rawget(self, "_ddp")
  check(C.ddp_reducer_set_sync(state.reducer, 0))
  local function finish(ok, ...)
    C.ddp_reducer_set_sync(state.reducer, 1)
    if not ok then error((...), 0) end
    return ...
  end
  return finish(pcall(fn, ...))
end

-- Joins a step of the others with weight 0.
function DDP:skip()
  mark_line()
  wrap.refresh(rawget(self, "_ddp"))
  wrap.reduce(rawget(self, "_ddp"), 0)
end
-- Reduces what no_sync left; weight: this rank's, where the reduction is "weighted".
function DDP:reduce_gradients(weight)
  mark_line()
  wrap.reduce(rawget(self, "_ddp"), weight or 1)
end
-- Makes a mean a weighted one from now on, on all ranks alike: what a stepper does when it is given weights.
function DDP:weigh()
  wrap.weigh(rawget(self, "_ddp"))
  grad.weighted = true
end

-- fn(bucket) exchanges the gradients itself, on all ranks alike: bucket.tensor (1-D, a view; what it holds in the end is the
-- gradient, the same on all ranks), bucket.index (from 1), bucket.name, bucket.is_last. It returns nothing, or a handle with wait() as
-- all_reduce with {async = true} gives one, waited for at the backward's end. Called as buckets are ready, in their order; on a
-- rank that skips or whose data has ended the tensor is 0. There are no buckets in a world of one.
function DDP:register_comm_hook(fn) wrap.register_hook(rawget(self, "_ddp"), fn) end

-- Running statistics are averaged over the ranks before evaluation: collective.
function DDP:eval()
  mark_line()
  local m = rawget(self, "module")
  if m.training then average_buffers(m) end
  m:eval()
  return self
end
function DDP:train(on)
  rawget(self, "module"):train(on)
  return self
end
function DDP:type() return "DistributedDataParallel" end

-- The line of a backward joins the signatures of its buckets.
grad.where = function() return C.ddp_world_size() > 1 and (base.user_line() or "") or "" end

return M
