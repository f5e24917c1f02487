-- trace.lua -- reads what ddp_trace_start wrote, with the log of the test double in between, and says what a step did: its calls, what each
-- queued on the GPU, which tensor each of that touched. Bytes are counted by launch: of an own kernel the log says which of the addresses among
-- its arguments it reads and writes (tests/cuda/double/probe.c); a library's call touches all operands of its op once. Scratch is not counted.
local M = {}

local PRODUCTS = { matmul = true, linear = true, linear_act = true, conv2d = true, conv2d_grad_input = true, conv2d_grad_weight = true, conv_bn_act = true }
local ONLY_WRITES = { copy_ = true, fill_ = true }
-- One pass, element by element, beside the scalar functions of kernels/elementwise.def.
local ELEMENTWISE = { cast = true, clone = true, copy_ = true, fill_ = true, full = true, where = true, clamp = true, dropout = true, dropout_grad = true }
do
  local file = assert(io.open("kernels/elementwise.def"))
  for op in file:read "*a":gmatch "\nDDP_[A-Z_0-9]+%(([%l%d_]+)," do ELEMENTWISE[op] = true end
  file:close()
end

-- ---- reading ----

local function operand(line)
  local role, name, device, storage, offset, bytes, dtype, sizes = line:match "^@(%l+) (%S+) (%S+) (%x+) (%-?%d+) (%d+) (%S+) (%S+)$"
  return { role = role, name = name, gpu = device ~= "cpu", storage = storage, at = tonumber(storage, 16) + tonumber(offset), bytes = tonumber(bytes),
    dtype = dtype, sizes = sizes }
end

-- What a line of the double's log is: nil, where it is nothing that a GPU would do.
local function queued(line)
  local name = line:match "^launch (%S+)"
  if name then
    local memory = {}
    for how, p in (line:match ", memory(.*)$" or ""):gmatch " ([rwb])(%x+)" do memory[#memory + 1] = { at = tonumber(p, 16), reads = how ~= "w", writes = how ~= "r" } end
    return { name = name, own = true, memory = memory, line = line }
  end
  name = line:match "^(cudaMem[cs]%w+)"
  if name then return { name = name, copy = true, bytes = tonumber(line:match "(%d+) bytes"), line = line } end
  if line:find "^cublas" or line:find "^nccl" then return { name = line:match "^%S+", library = true, line = line } end
  if line:find "^cudnn" then return { name = line:gsub(" workspace.*", ""), library = true, line = line } end
end

-- {calls = {{op, kernel, flops, bytes, operands, launches, seconds}}, outside = {what was queued by no call}, allocations = n}
function M.read(path)
  local trace, open, on = { calls = {}, outside = {}, allocations = 0 }, {}, false
  for line in io.lines(path) do
    local call = open[#open]
    if line == "@trace" or line == "@stop" or not on then on = line == "@trace"
    elseif line:find "^@call" then
      local op, kernel, flops, bytes = line:match "^@call (%S+) (%S+) (%S+) (%S+)$"
      open[#open + 1] = { op = op, kernel = kernel, flops = tonumber(flops), bytes = tonumber(bytes), operands = {}, launches = {} }
      trace.calls[#trace.calls + 1] = open[#open]
    elseif line:find "^@end" then
      call.seconds = tonumber(line:match "^@end (%S+)")
      open[#open] = nil
    elseif line:find "^@run" then call.running = true
    elseif line:find "^@" then call.operands[#call.operands + 1] = operand(line)
    elseif line:find "^cudaMalloc" or line:find "^cudaHostAlloc" then trace.allocations = trace.allocations + 1
    else
      local list, what = call and call.launches or trace.outside, queued(line)
      if what then list[#list + 1] = what end
    end
  end
  if #trace.calls == 0 then error(path .. ": no call was traced", 0) end
  for i, call in ipairs(trace.calls) do call.number = i end
  return trace
end

-- ---- tensors ----

-- Gives every operand its tensor {producer = call or nil, writer = the last one, bytes, sizes, dtype, readers = {call}}, and `after`, the call
-- that wrote it before: what a call makes is new, unless it lies where an operand of the call lies. Storages are reused, tensors are not.
local function find_tensors(trace)
  local live = {}
  trace.tensors = {}
  local function new(o, producer)
    local t = { producer = producer, bytes = o.bytes, sizes = o.sizes, dtype = o.dtype, gpu = o.gpu, readers = {}, reads = 0, writes = 0 }
    live[o.storage] = t
    trace.tensors[#trace.tensors + 1] = t
    return t
  end
  for _, call in ipairs(trace.calls) do
    local mine = {}
    for _, o in ipairs(call.operands) do
      if o.role ~= "out" then
        o.tensor = live[o.storage] or new(o)
        o.after, mine[o.storage] = o.tensor.writer, true
        if not (ONLY_WRITES[call.op] and o.name == call.operands[1].name) then o.tensor.readers[#o.tensor.readers + 1] = call end
      end
    end
    for _, o in ipairs(call.operands) do
      if o.role == "out" then
        o.in_place = mine[o.storage]
        o.tensor = o.in_place and live[o.storage] or new(o, call)
      end
      if o.role ~= "in" then o.tensor.writer = call end
    end
  end
end

-- An activation is made by a call of the step, or is the input, and has the batch in front; parameters and their gradients are known by
-- their sizes.
local function mark_activations(trace, batch, parameters)
  local not_one = {}
  for _, sizes in ipairs(parameters) do not_one[sizes] = true end
  for _, t in ipairs(trace.tensors) do
    t.activation = t.gpu and not not_one[t.sizes] and t.sizes:match "^(%d+)x" == tostring(batch)
  end
end

-- ---- passes ----

-- How often a launch reads and writes an operand: a library's call as the op says, an own kernel where its arguments point to.
local function touches(launch, o, shared, target)
  if not launch.own then
    local writes = o.role == "out" or o.role == "both" or shared
    return (o.role == "out" or target) and 0 or 1, writes and 1 or 0
  end
  for _, m in ipairs(launch.memory) do
    if m.at >= o.at and m.at < o.at + math.max(o.bytes, 1) then return m.reads and 1 or 0, m.writes and 1 or 0 end
  end
  return 0, 0
end

-- Counts what each launch reads and writes: call.moved bytes, tensor.reads and writes. A call of which nothing is known is one launch.
local function count_passes(call)
  local launches, in_place = {}, {}
  for _, l in ipairs(call.launches) do if not l.copy then launches[#launches + 1] = l end end
  if #launches == 0 then launches[1] = {} end
  for _, o in ipairs(call.operands) do if o.in_place then in_place[o.storage] = true end end
  call.moved, call.once, call.again = 0, 0, {} -- once: each operand once each way
  for i, o in ipairs(call.operands) do
    if o.gpu and not o.in_place then
      local reads, writes = 0, 0
      for _, l in ipairs(launches) do
        local r, w = touches(l, o, in_place[o.storage], i == 1 and ONLY_WRITES[call.op])
        reads, writes = reads + r, writes + w
      end
      call.once = call.once + (math.min(reads, 1) + math.min(writes, 1)) * o.bytes
      if reads > 1 then call.again[#call.again + 1] = { operand = o, reads = reads } end
      o.tensor.reads, o.tensor.writes = o.tensor.reads + reads, o.tensor.writes + writes
      call.moved = call.moved + (reads + writes) * o.bytes
    end
  end
end

-- The same tensor given twice is one operand.
local function drop_twins(call)
  local seen, list = {}, {}
  for _, o in ipairs(call.operands) do
    local key = ("%s %s %d"):format(o.role, o.storage, o.at)
    if not seen[key] then list[#list + 1] = o end
    seen[key] = true
  end
  call.operands = list
end

-- ---- what could have been fused ----

local function name_of(call) return call and ("%s #%d"):format(call.kernel, call.number) or "nothing in the step" end

-- An elementwise call's largest activation that it reads, and its result.
local function ends_of(call)
  local largest, out
  for _, o in ipairs(call.operands) do
    if o.role == "out" then out = out or o
    elseif o.tensor.activation and not (largest and largest.bytes >= o.bytes) then largest = o end
  end
  return largest, out
end

-- Bytes that need not move if f's call were done by the one before it: reading what that made, and writing it where none else reads it.
-- Without one before, by the only one behind it: writing and reading what f's call made. Each tensor is counted once.
local function saved_bytes(f, out)
  local o = f.operand
  if f.after then
    local alone = #o.tensor.readers == 1
    o.tensor.saved = o.tensor.saved or alone
    return o.bytes * (alone and 2 or 1)
  end
  return #f.before == 1 and not out.tensor.saved and 2 * out.bytes or 0
end

-- The elementwise passes over activations that a neighbour in the step could have done: {call, operand, after = call or nil,
-- before = {calls}, bytes = what would not have moved}.
local function find_fusable(trace)
  local list = {}
  for _, call in ipairs(trace.calls) do
    local largest, out = ends_of(call)
    if ELEMENTWISE[call.op] and out and out.tensor.activation then
      local f = { call = call, operand = largest or out, after = largest and largest.after, before = {}, out = out }
      for _, reader in ipairs(out.tensor.readers) do if reader.number > call.number then f.before[#f.before + 1] = reader end end
      if f.after or #f.before > 0 then list[#list + 1] = f end
    end
  end
  for _, f in ipairs(list) do if f.after then f.bytes = saved_bytes(f, f.out) end end
  for _, f in ipairs(list) do f.bytes = f.bytes or saved_bytes(f, f.out) end
  return list
end

-- "relu.cuda #3 over 4x8x6x6 f32: after add.cuda #2, before conv2d.cudnn #4"
function M.describe(fusable)
  local before = {}
  for i, c in ipairs(fusable.before) do before[i] = name_of(c) end
  local o = fusable.operand
  return ("%s over %s %s: after %s, before %s"):format(name_of(fusable.call), o.sizes, o.dtype, name_of(fusable.after),
    #before > 0 and table.concat(before, " and ") or "nothing in the step")
end

-- ---- rows ----

local function sized(o) return (o.dtype == "f32" and "" or o.dtype .. " ") .. o.sizes end

-- "64x64x32x32 w 64x64x3x3 -> 64x64x30x30": the first operand, others of two dims and more where they differ, the result.
local function shape_of(call)
  local first, parts, lists, elements = call.operands[1], {}, 0, 0
  for _, o in ipairs(call.operands) do if o.name == first.name and o.role ~= "out" then lists, elements = lists + 1, elements + o.bytes end end
  if lists > 1 then return ("%d tensors, %.0f MB"):format(lists, elements / 1e6) end
  if first.role ~= "out" then parts[1] = sized(first) end
  for i = 2, #call.operands do
    local o = call.operands[i]
    if o.role ~= "out" and o.sizes:find "x" and o.sizes ~= first.sizes then parts[#parts + 1] = o.name .. " " .. sized(o) end
  end
  for _, o in ipairs(call.operands) do
    if o.role == "out" and o.name == "0" and sized(o) ~= sized(first) then parts[#parts + 1] = "-> " .. sized(o) end
  end
  return table.concat(parts, " ")
end

-- The unit that does the call's operations, and its peak in TFLOP/s.
local function unit_of(call, device, tf32)
  local o = call.operands[1]
  local dtype = o and o.dtype or "f32"
  if dtype == "f64" then return "f64", device.f64 end
  if not PRODUCTS[call.op] then return "FMA", device.f32 end
  if dtype == "bf16" or dtype == "f16" then return dtype .. " tensor cores", device.half end
  if tf32 and dtype == "f32" then return "TF32 tensor cores", device.tf32 end
  return "FMA", device.f32
end

-- Seconds that the device needs at least for a call, and what bounds them.
function M.limit(call, device, tf32)
  local unit, peak = unit_of(call, device, tf32)
  local compute, memory = call.flops / (peak * 1e12), call.moved / (device.gb_per_s * 1e9)
  if compute > memory then return compute, unit end
  return memory, "memory"
end

local function rows_of(trace, device, tf32)
  local rows, by_key = {}, {}
  for _, call in ipairs(trace.calls) do
    local seconds, by = M.limit(call, device, tf32)
    local key = call.kernel .. " " .. shape_of(call)
    local row = by_key[key]
    if not row then
      row = { kernel = call.kernel, shape = shape_of(call), calls = 0, launches = 0, flops = 0, moved = 0, seconds = 0, by = by, queued = {} }
      for _, l in ipairs(call.launches) do row.queued[#row.queued + 1] = l.name end
      by_key[key], rows[#rows + 1] = row, row
    end
    row.calls, row.launches = row.calls + 1, row.launches + #call.launches
    row.flops, row.moved, row.seconds = row.flops + call.flops, row.moved + call.moved, row.seconds + seconds
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  return rows
end

-- What a step is: `path` the trace, `device` of devices.lua, opts {batch, parameters = {"64x3x3x3", ...}, tf32}. Returns the trace with
--   rows       {kernel, shape, calls, launches, flops, moved, seconds, by, queued = names of what one call queues} each, the longest first
--   tensors    each with activation, bytes, reads, writes, producer, readers
--   fusable    find_fusable's list
--   again      {call, operand, reads}: what one op reads more than once
--   own, library, copies    how many of each were queued; flops, moved, seconds: sums
--   least      bytes if every op read and wrote each operand once and nothing fusable was left
function M.analyse(path, device, opts)
  local trace = M.read(path)
  for _, call in ipairs(trace.calls) do drop_twins(call) end
  find_tensors(trace)
  mark_activations(trace, opts.batch, opts.parameters)
  trace.own, trace.calls_out, trace.copies, trace.flops, trace.moved, trace.least, trace.seconds, trace.again = 0, 0, 0, 0, 0, 0, 0, {}
  local function count(list)
    for _, l in ipairs(list) do
      local kind = l.own and "own" or l.copy and "copies" or "calls_out"
      trace[kind] = trace[kind] + 1
    end
  end
  count(trace.outside)
  for _, call in ipairs(trace.calls) do
    count_passes(call)
    count(call.launches)
    for _, a in ipairs(call.again) do if a.operand.tensor.activation then trace.again[#trace.again + 1] = { call = call, operand = a.operand, reads = a.reads } end end
    trace.flops, trace.moved, trace.least = trace.flops + call.flops, trace.moved + call.moved, trace.least + call.once
  end
  trace.fusable = find_fusable(trace)
  for _, f in ipairs(trace.fusable) do trace.least = trace.least - f.bytes end
  trace.rows = rows_of(trace, device, opts.tf32)
  for _, r in ipairs(trace.rows) do trace.seconds = trace.seconds + r.seconds end
  return trace
end

return M
