-- ffi.lua -- the C library as Lua sees it: declarations, errors at the user's line, ownership, options.
local ffi = require "ffi"
ffi.cdef(require "ddp.cdef")

local M = {}

-- The library lies where DDP_LIB says (ddprun sets it), else where the loader finds it.
local function load_library()
  local dir = os.getenv "DDP_LIB"
  if dir and dir ~= "" then return ffi.load(dir .. "/libddp.so") end
  return ffi.load "ddp"
end
local C = load_library()
M.C = C
assert(C.ddp_abi_version() == C.DDP_ABI, "ddp: the library and its Lua side are of different versions")

-- ---- errors ----------------------------------------------------------------------------------------------------

local here = debug.getinfo(1, "S").source:match "^@(.*)ffi%.lua$" or "?"

-- "file:line" of the innermost function outside this library.
local function user_line()
  for level = 3, 64 do
    local info = debug.getinfo(level, "Sl")
    if not info then break end
    if info.what ~= "C" and info.currentline > 0 and info.source:sub(1, #here + 1) ~= "@" .. here then
      return info.short_src .. ":" .. info.currentline
    end
  end
end
M.user_line = user_line

-- Raises `text` at the user's line.
local function fail(text)
  local line = user_line()
  error(line and line .. ": " .. text or text, 0)
end
M.error = fail

local text_out = ffi.new "const char *[1]"

-- What the memory is in, and what to try, in that order. text: the failure, which names the GPU when it is one.
local function memory_report(text)
  local live, gpu = ffi.new "ddp_live[10]", text:match "on cuda:(%d+)"
  local n = C.ddp_memory_largest(gpu and gpu + 1 or C.DDP_CPU, live, 10)
  local lines = {}
  for i = 0, n - 1 do
    local l, size = live[i], {}
    for d = 0, l.ndim - 1 do size[d + 1] = tonumber(l.size[d]) end
    local by, where = l.op ~= nil and " by " .. ffi.string(l.op) or "", ffi.string(l.where)
    lines[i + 1] = ("%10.1f MB  %s [%s]%s%s"):format(tonumber(l.bytes) / 2 ^ 20, ffi.string(C.ddp_dtype_name(l.dtype)),
      table.concat(size, ","), by, where ~= "" and " at " .. where or ", inside the library")
  end
  return (n > 0 and "\nthe largest live tensors:\n" .. table.concat(lines, "\n") or "")
    .. "\nto try, in this order: gradient accumulation (ddp.stepper { accumulate = n }, n smaller batches a step), bf16 (ddp.autocast), "
    .. "recomputation (ddp.checkpoint), a smaller batch"
end

-- Takes the pending error of C and raises it. Text of peers keeps its mark, so that the first cause is told from echoes.
local function raise()
  local status = C.ddp_error_take(text_out)
  local text = ffi.string(text_out[0])
  if status == 0 then text = "an unknown failure" end
  if status == C.DDP_ENOMEM then text = text .. memory_report(text) end
  fail(text)
end
M.raise = raise

-- A negative status raises; others are returned.
function M.check(status)
  if status < 0 then raise() end
  return status
end

-- ---- ownership --------------------------------------------------------------------------------------------------

local gc, cast, release = ffi.gc, ffi.cast, C.ddp_release
local reference = ffi.typeof "ddp_tensor &" -- a pointer would take t[1] for an array's element
local LIMIT = tonumber(C.DDP_GC_BYTES) -- native bytes between collections, at least
local limit = LIMIT
local look = LIMIT -- the same in all that was made, of which a GPU's bytes count for less

-- Native memory drives the collector, which sees 16 bytes where there may be megabytes. A full collection costs in
-- proportion to the live Lua data, so what may pile up before the next one grows with that.
local function collect()
  collectgarbage "collect"
  C.ddp_memory_gc_done()
  limit = math.max(LIMIT, math.min(collectgarbage "count" * 1024 * .5, 2 * LIMIT))
  look = limit
end

-- So many bytes were made: collects when they press enough, and says so.
local function due(made)
  local left = limit - tonumber(C.ddp_memory_pressure())
  look = made + left
  if left < 0 then collect() end
  return left < 0
end

-- The line that makes a tensor of 1 MB or more is kept for the out-of-memory error. Looking it up costs half a microsecond,
-- so it is done only where that many bytes were taken since the last look.
local BIG, looked = 2 ^ 20, 0
local function note_line(t)
  if C.ddp_wants_origin(t) == 1 then C.ddp_set_origin(t, user_line()) end
end
M.note_line = note_line

-- Takes ownership of a new reference from C, or raises what is pending.
local function own(t)
  if t == nil then return raise() end
  local made = tonumber(C.ddp_live_bytes_since_gc())
  if made < looked then look = limit end -- another state of this process has collected
  if made - looked >= BIG or made < looked then note_line(t) end
  looked = made
  if made > look and due(made) then looked = 0 end
  return gc(cast(reference, t), release)
end
M.own = own

-- Drops a tensor at once instead of when the collector comes: for temporaries of the library.
function M.free(t)
  if t ~= nil then release(gc(t, nil)) end
end

-- True when the failure was a lack of memory and a collection may have helped: the call is worth one more try.
function M.out_of_memory()
  local status = C.ddp_error_take(text_out)
  if status == C.DDP_ENOMEM then
    collectgarbage "collect"
    collectgarbage "collect"
    C.ddp_memory_empty_cache()
    return true
  end
  C.ddp_error_set(status, text_out[0])
  return false
end

local tensor_type, istype = ffi.typeof "ddp_tensor", ffi.istype
function M.is_tensor(x) return type(x) == "cdata" and istype(tensor_type, x) end

-- t itself; under autocast a 16-bit t in f32: for losses and norms that consist of several ops.
function M.summand(t)
  if C.ddp_autocast_dtype() == C.DDP_AUTOCAST_OFF then return t end
  local d = C.ddp_dtype_of(t)
  if d ~= C.DDP_F16 and d ~= C.DDP_BF16 then return t end
  return own(C.ddp_cast(t, C.DDP_F32))
end

-- ---- options ------------------------------------------------------------------------------------------------------

-- The edit distance of two words, for suggestions.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local cost = a:byte(i) == b:byte(j) and 0 or 1
      local best = math.min(row[j] + 1, row[j - 1] + 1, diagonal + cost)
      diagonal, row[j] = row[j], best
    end
  end
  return row[#b]
end

-- The known name nearest to `word`, or nil when none is near.
function M.suggest(word, known)
  local best, name = math.max(2, math.floor(#word / 3)) + 1, nil
  for _, k in ipairs(known) do
    local d = distance(word, k)
    if d < best then best, name = d, k end
  end
  return name
end

-- Checks an options table against known names (an array); nil is an empty one. Unknown names raise, with a suggestion.
function M.options(what, opts, known)
  if opts == nil then return {} end
  if type(opts) ~= "table" then fail(what .. ": options are a table, got a " .. type(opts)) end
  for k in pairs(opts) do
    local found = false
    for _, name in ipairs(known) do found = found or name == k end
    if not found then
      local near = type(k) == "string" and M.suggest(k, known)
      fail(("%s: no option \"%s\"%s; known: %s"):format(what, tostring(k), near and (", did you mean \"" .. near .. "\"?") or "",
        table.concat(known, ", ")))
    end
  end
  return opts
end

-- A table that holds named options, not a list.
function M.is_options(t)
  if type(t) ~= "table" then return false end
  return type(next(t)) == "string"
end

M.dtypes = {}
for i = 0, tonumber(C.DDP_DTYPES) - 1 do M.dtypes[ffi.string(C.ddp_dtype_name(i))] = i end

function M.dtype(name, what)
  local d = M.dtypes[name]
  if d then return d end
  local known = {}
  for k in pairs(M.dtypes) do known[#known + 1] = k end
  table.sort(known)
  fail(("%s: no dtype \"%s\"; known: %s"):format(what, tostring(name), table.concat(known, ", ")))
end

-- The number of a device: "cpu", "cuda" (this rank's GPU), "cuda:1"; nil is the default for new tensors. One that is not there
-- is refused when it is used, with the reason.
M.default_device = C.DDP_CPU
function M.device(name, what)
  if name == nil then return M.default_device end
  if name == "cpu" then return C.DDP_CPU end
  if name == "cuda" then
    local mine = C.ddp_local_device()
    if mine < 0 then M.raise() end
    return mine == C.DDP_CPU and 1 or mine
  end
  local i = type(name) == "string" and name:match "^cuda:(%d+)$"
  if i then return tonumber(i) + 1 end
  fail(("%s: no device \"%s\"; known: \"cpu\", \"cuda\", \"cuda:0\" and so on"):format(what, tostring(name)))
end
function M.device_name(device) return device == 0 and "cpu" or "cuda:" .. device - 1 end
function M.is_device(name) return type(name) == "string" and (name == "cpu" or name:match "^cuda" ~= nil) end

return M
