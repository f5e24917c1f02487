-- parallel.lua -- the job's ranks: joining, collectives, objects, and DistributedDataParallel.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local module = require "ddp.nn.module"
local plain = require "ddp.plain"
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
function M.finish() C.ddp_finish() end

-- ---- collectives on tensors ----------------------------------------------------------------------------------------

local OP = { sum = 0, mean = 1, min = 2, max = 3 }
local function op_code(what, op)
  local code = OP[op or "sum"]
  if not code then fail(("%s: op is \"%s\", expected sum, mean, min or max"):format(what, tostring(op))) end
  return code
end

local work_out = ffi.new "ddp_work *[1]"
-- An asynchronous call's handle: wait() ends it, test() asks.
local function handle(t)
  local w = ffi.gc(work_out[0], C.ddp_work_free)
  return {
    wait = function()
      check(C.ddp_work_wait(w))
      return t
    end,
    test = function() return check(C.ddp_work_test(w)) == 1 end,
  }
end

local function need_tensor(what, t)
  if not tensor.is_tensor(t) then fail(("%s: expected a tensor, got a %s"):format(what, type(t))) end
end
local function collective_options(what, opts, more)
  local known = { "async", "name", "group" }
  for _, k in ipairs(more or {}) do known[#known + 1] = k end
  opts = base.options(what, opts, known)
  if opts.group then fail(what .. ": groups are not built yet") end
  mark_line()
  return opts
end

-- all_reduce(t, "sum"|"mean"|"min"|"max", {async =, name =}): in place.
function M.all_reduce(t, op, opts)
  need_tensor("all_reduce", t)
  if type(op) == "table" then op, opts = op.op, op end
  opts = collective_options("all_reduce", opts, { "op" })
  check(C.ddp_all_reduce(t, op_code("all_reduce", op), opts.name, opts.async and work_out or nil))
  return opts.async and handle(t) or t
end
function M.broadcast(t, root, opts)
  need_tensor("broadcast", t)
  opts = collective_options("broadcast", opts)
  check(C.ddp_broadcast(t, root or 0, opts.name, opts.async and work_out or nil))
  return opts.async and handle(t) or t
end
function M.all_gather(t)
  need_tensor("all_gather", t)
  mark_line()
  return base.own(C.ddp_all_gather(t))
end
function M.reduce_scatter(t, op)
  need_tensor("reduce_scatter", t)
  mark_line()
  return base.own(C.ddp_reduce_scatter(t, op_code("reduce_scatter", op)))
end
function M.barrier()
  mark_line()
  check(C.ddp_barrier())
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

function M.broadcast_object(v, root)
  mark_line()
  root = root or 0
  return plain.decode(broadcast_text(C.ddp_rank() == root and plain.encode(v, "broadcast_object") or "", root))
end

function M.all_gather_object(v)
  mark_line()
  local text = plain.encode(v, "all_gather_object")
  local size = math.max(C.ddp_world_size(), 1)
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
  __call = function(self, ...) return rawget(self, "module")(...) end,
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

-- Wraps a model: rank 0's parameters and buffers go to all, gradients are reduced while backward runs.
-- {bucket_mb = 25, reduce = "mean"|"sum"|"weighted"}
function M.DistributedDataParallel(model, opts)
  opts = base.options("DistributedDataParallel", opts, { "bucket_mb", "reduce", "compression" })
  if not module.is_module(model) then fail("DistributedDataParallel: expected a module, got a " .. type(model)) end
  local reduce = opts.reduce or "mean"
  if reduce ~= "mean" and reduce ~= "sum" and reduce ~= "weighted" then
    fail(("DistributedDataParallel: reduce is \"%s\", expected mean, sum or weighted"):format(tostring(reduce)))
  end
  if opts.compression and opts.compression ~= "none" then fail "DistributedDataParallel: compression is not built yet" end
  local params, names = {}, {}
  for name, p in model:named_parameters() do
    if p.requires_grad then
      params[#params + 1] = p
      names[#names + 1] = name
    end
  end
  if #params == 0 then fail "DistributedDataParallel: the model has no parameters that need gradients" end
  mark_line()
  local list, c_names = ffi.new("ddp_tensor *[?]", #params), ffi.new("const char *[?]", #params)
  for i, p in ipairs(params) do list[i - 1], c_names[i - 1] = p, names[i] end
  local c = ffi.new("ddp_reducer_opts", { size = ffi.sizeof "ddp_reducer_opts", bucket_mb = opts.bucket_mb or 0, sum = reduce == "sum" and 1 or 0,
    weighted = reduce == "weighted" and 1 or 0, names = c_names })
  local out = ffi.new "ddp_reducer *[1]"
  check(C.ddp_reducer_new(list, #params, c, out))
  if reduce == "weighted" then grad.weighted = true end
  if C.ddp_world_size() > 1 then
    grad.no_grad(function() for _, b in model:named_buffers() do check(C.ddp_broadcast(b, 0, "buffers", nil)) end end)
  end
  local net = setmetatable({ module = model, _reducer = ffi.gc(out[0], C.ddp_reducer_free), _names = names }, meta)
  require("ddp.join").add_model(net)
  return net
end

-- Gradients of backwards inside fn stay on this rank; the next one outside reduces the sum.
function DDP:no_sync(fn, ...)
  local r = rawget(self, "_reducer")
  check(C.ddp_reducer_set_sync(r, 0))
  local function finish(ok, ...)
    C.ddp_reducer_set_sync(r, 1)
    if not ok then error((...), 0) end
    return ...
  end
  return finish(pcall(fn, ...))
end

-- Joins a step of the others with weight 0.
function DDP:skip()
  mark_line()
  check(C.ddp_reducer_skip(rawget(self, "_reducer")))
end
-- Reduces what no_sync left; weight: this rank's, where the reduction is "weighted".
function DDP:reduce_gradients(weight)
  mark_line()
  check(C.ddp_reducer_reduce_weighted(rawget(self, "_reducer"), weight or 1))
end
-- Makes a mean a weighted one from now on, on all ranks alike: what a stepper does when it is given weights.
function DDP:weigh()
  check(C.ddp_reducer_set_weighted(rawget(self, "_reducer"), 1))
  grad.weighted = true
end
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
