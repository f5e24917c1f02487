-- tensor.lua -- the tensor as Lua sees it: the C handle (an FFI reference) with a metatype, methods by PyTorch's names.
local ffi = require "ffi"
local base = require "ddp.ffi"
local ops = require "ddp.ops"
local C, own, free, check, fail = base.C, base.own, base.free, base.check, base.error
local tonumber, type = tonumber, type

local M = {}    -- functions of the module: ddp.zeros ...
local T = {}    -- methods
local is_tensor = base.is_tensor
M.is_tensor = is_tensor

-- ---- making ------------------------------------------------------------------------------------------------------

-- Sizes given as numbers, or as one table; then options. Returns the sizes as a table and the options.
local function sizes(what, ...)
  local n = select("#", ...)
  local last = select(n, ...)
  local opts
  if n > 0 and type(last) == "table" and (type(next(last)) == "string" or (next(last) == nil and n > 1)) then
    opts, n = last, n - 1
  end
  local first = ...
  if n == 1 and type(first) == "table" then return first, opts end
  local list = {}
  for i = 1, n do
    local v = select(i, ...)
    if type(v) ~= "number" then fail(("%s: size %d is a %s, expected a number"):format(what, i, type(v))) end
    list[i] = v
  end
  return list, opts
end

local MAKE_OPTIONS = { "dtype", "device", "requires_grad", "generator" }

-- Runs fn with the thread's generator set to g.
local function with_generator(g, fn, ...)
  if not g then return fn(...) end
  C.ddp_generator_use(g.handle)
  local ok, r = pcall(fn, ...)
  C.ddp_generator_use(nil)
  if not ok then error(r, 0) end
  return r
end
M.with_generator = with_generator

local function finish(t, opts)
  if opts and opts.requires_grad then check(C.ddp_set_requires_grad(t, 1)) end
  return t
end

local function maker(name, call)
  M[name] = function(...)
    local size, opts = sizes(name, ...)
    opts = base.options(name, opts, MAKE_OPTIONS)
    return finish(with_generator(opts.generator, call, size, opts), opts)
  end
end
maker("zeros", function(size, o) return ops.full(size, 0, o.dtype, o.device) end)
maker("ones", function(size, o) return ops.full(size, 1, o.dtype, o.device) end)
maker("rand", function(size, o) return ops.rand(size, o.dtype, o.device) end)
maker("randn", function(size, o) return ops.randn(size, o.dtype, o.device) end)
maker("empty", function(size, o)
  local buf = ffi.new("int64_t[8]")
  if #size > 8 then fail(("empty: %d dims, at most 8"):format(#size)) end
  for i = 1, #size do buf[i - 1] = size[i] end
  return own(C.ddp_empty(#size, buf, o.dtype and base.dtype(o.dtype, "empty") or C.DDP_F32, base.device(o.device, "empty")))
end)

function M.full(size, value, opts)
  opts = base.options("full", opts, MAKE_OPTIONS)
  if type(size) == "number" then size = { size } end
  return finish(ops.full(size, value, opts.dtype, opts.device), opts)
end

function M.randint(lo, hi, size, opts)
  opts = base.options("randint", opts, MAKE_OPTIONS)
  if type(size) == "number" then size = { size } end
  return with_generator(opts.generator, ops.randint, lo, hi, size, opts.dtype, opts.device)
end

function M.randperm(n, opts)
  opts = base.options("randperm", opts, MAKE_OPTIONS)
  return with_generator(opts.generator, ops.randperm, n, opts.device)
end

function M.arange(a, b, step, opts)
  if type(b) == "table" then b, opts = nil, b elseif type(step) == "table" then step, opts = nil, step end
  opts = base.options("arange", opts, MAKE_OPTIONS)
  local start, stop = b and a or 0, b or a
  if type(stop) ~= "number" then fail "arange: the end is no number" end
  step = step or 1
  local whole = start % 1 == 0 and stop % 1 == 0 and step % 1 == 0
  return finish(ops.arange(start, stop, step, opts.dtype or (whole and "i64" or "f32"), opts.device), opts)
end

function M.eye(n, opts)
  opts = base.options("eye", opts, { "m", "dtype", "device", "requires_grad" })
  return finish(ops.eye(n, opts.m, opts.dtype, opts.device), opts)
end

local function like(name, fn)
  M[name .. "_like"] = function(t, opts)
    opts = base.options(name .. "_like", opts, MAKE_OPTIONS)
    opts.dtype, opts.device = opts.dtype or t:dtype(), opts.device or t:device()
    return fn(t:size(), opts)
  end
end
for _, name in ipairs { "zeros", "ones", "empty", "rand", "randn" } do like(name, function(size, o) return M[name](size, o) end) end

-- ---- from Lua values ---------------------------------------------------------------------------------------------

-- The shape of nested tables; raises when rows differ.
local function shape_of(v, shape, depth)
  if type(v) ~= "table" then return shape end
  shape[depth] = #v
  if type(v[1]) == "table" then shape_of(v[1], shape, depth + 1) end
  return shape
end

local function flatten(v, shape, depth, out)
  if depth > #shape then
    if type(v) == "boolean" then v = v and 1 or 0 end
    if type(v) ~= "number" then fail(("tensor: an element is a %s, expected a number"):format(type(v))) end
    out[#out + 1] = v
    return
  end
  if type(v) ~= "table" or #v ~= shape[depth] then
    fail(("tensor: rows differ: %s where %d elements stand before"):format(type(v) == "table" and #v or "a " .. type(v), shape[depth]))
  end
  for i = 1, #v do flatten(v[i], shape, depth + 1, out) end
end

-- ddp.tensor{{1,2},{3,4}}: f32 unless dtype says otherwise.
function M.tensor(data, opts)
  opts = base.options("tensor", opts, MAKE_OPTIONS)
  local shape, values = shape_of(data, {}, 1), {}
  flatten(data, shape, 1, values)
  local n = #shape
  local size = ffi.new("int64_t[8]")
  if n > 8 then fail(("tensor: %d dims, at most 8"):format(n)) end
  for i = 1, n do size[i - 1] = shape[i] end
  local dtype = base.dtype(opts.dtype or "f32", "tensor")
  local device = base.device(opts.device, "tensor")
  local buf = ffi.new("double[?]", math.max(#values, 1))
  for i = 1, #values do buf[i - 1] = values[i] end
  local t = own(C.ddp_from_data(buf, n, size, C.DDP_F64, device))
  if dtype ~= C.DDP_F64 then
    local cast = own(C.ddp_cast(t, dtype))
    free(t)
    t = cast
  end
  return finish(t, opts)
end

-- Owners of blobs, each with a handle of our own on the blob. Where that handle is the last one left, nothing needs the
-- owner any more; C can't tell us, so it is asked whenever another blob is made.
local kept_alive = {}
local function let_go()
  local kept = {}
  for _, entry in ipairs(kept_alive) do
    if C.ddp_storage_handles(entry.handle) > 1 then kept[#kept + 1] = entry else free(entry.handle) end
  end
  kept_alive = kept
end

-- A tensor over the caller's memory; `owner` is any value kept alive with it.
function M.from_blob(ptr, shape, opts)
  opts = base.options("from_blob", opts, { "dtype", "strides", "owner", "device" })
  local n = #shape
  local size, strides = ffi.new("int64_t[8]"), nil
  for i = 1, n do size[i - 1] = shape[i] end
  if opts.strides then
    strides = ffi.new("int64_t[8]")
    for i = 1, n do strides[i - 1] = opts.strides[i] end
  end
  local t = own(C.ddp_from_blob(ffi.cast("void *", ptr), n, size, strides, base.dtype(opts.dtype or "f32", "from_blob"),
    base.device(opts.device, "from_blob"), nil, nil))
  let_go()
  kept_alive[#kept_alive + 1] = { handle = own(C.ddp_detach(t)), ptr = ptr, owner = opts.owner }
  return t
end

-- A copy of a string's bytes as a 1-D tensor.
function M.frombuffer(s, opts)
  opts = base.options("frombuffer", opts, { "dtype" })
  local dtype = base.dtype(opts.dtype or "u8", "frombuffer")
  local bytes = tonumber(C.ddp_dtype_size(dtype))
  if #s % bytes ~= 0 then fail(("frombuffer: %d bytes do not divide into %s"):format(#s, opts.dtype)) end
  local size = ffi.new("int64_t[1]", #s / bytes)
  return own(C.ddp_from_data(s, 1, size, dtype, C.DDP_CPU))
end

-- ---- reading ------------------------------------------------------------------------------------------------------

function T.dim(t) return C.ddp_ndim(t) end
function T.numel(t) return tonumber(C.ddp_numel(t)) end
function T.dtype(t) return ffi.string(C.ddp_dtype_name(C.ddp_dtype_of(t))) end
function T.device(t) return base.device_name(C.ddp_device_of(t)) end
function T.id(t) return tonumber(C.ddp_id(t)) end
function T.is_contiguous(t) return C.ddp_is_contiguous(t) == 1 end
function T.is_leaf(t) return C.ddp_is_leaf(t) == 1 end

local function dim_from_one(t, i, what)
  local n = C.ddp_ndim(t)
  if type(i) ~= "number" or i == 0 or i > n or i < -n then fail(("%s: dim %s of a tensor of %d dims, which count from 1"):format(what, tostring(i), n)) end
  return i > 0 and i - 1 or i
end

function T.size(t, i)
  if i then return tonumber(C.ddp_size(t, dim_from_one(t, i, "size"))) end
  local s = {}
  for k = 1, C.ddp_ndim(t) do s[k] = tonumber(C.ddp_size(t, k - 1)) end
  return s
end

function T.stride(t, i)
  if i then return tonumber(C.ddp_stride(t, dim_from_one(t, i, "stride"))) end
  local s = {}
  for k = 1, C.ddp_ndim(t) do s[k] = tonumber(C.ddp_stride(t, k - 1)) end
  return s
end

local number = ffi.new "double[1]"
function T.item(t)
  check(C.ddp_item(t, number))
  if C.ddp_dtype_of(t) == C.DDP_BOOL then return number[0] ~= 0 end
  return number[0]
end

function T.tolist(t)
  local n = T.numel(t)
  local buf = ffi.new("double[?]", math.max(n, 1))
  check(C.ddp_to_doubles(t, buf))
  local bool, size, at = C.ddp_dtype_of(t) == C.DDP_BOOL, T.size(t), 0
  local function build(d)
    if d > #size then
      at = at + 1
      if bool then return buf[at - 1] ~= 0 end
      return buf[at - 1]
    end
    local row = {}
    for i = 1, size[d] do row[i] = build(d + 1) end
    return row
  end
  return build(1)
end

local POINTER = { f32 = "float *", f64 = "double *", f16 = "uint16_t *", bf16 = "uint16_t *", i64 = "int64_t *", i32 = "int32_t *",
  u8 = "uint8_t *", bool = "uint8_t *" }
function T.data(t)
  if not T.is_contiguous(t) then fail "data: the tensor is not contiguous; call contiguous first" end
  if C.ddp_device_of(t) ~= C.DDP_CPU then fail(("data: the tensor is on %s, where Lua cannot read; x:to(\"cpu\"):data()"):format(T.device(t))) end
  return ffi.cast(POINTER[T.dtype(t)], C.ddp_data(t))
end
function T.mark_written(t) C.ddp_mark_written(t) return t end

local function to_text(t)
  local n = tonumber(C.ddp_to_text(t, nil, 0))
  local buf = ffi.new("char[?]", n + 1)
  C.ddp_to_text(t, buf, n + 1)
  return ffi.string(buf, n)
end

-- ---- shapes ---------------------------------------------------------------------------------------------------------

-- Methods whose last arguments are sizes or dims: t:view(2, 3) or t:view{2, 3}.
local function list_of(...)
  local first = ...
  if type(first) == "table" then return first end
  return { ... }
end
function T.view(t, ...) return ops.view(t, list_of(...)) end
function T.expand(t, ...) return ops.expand(t, list_of(...)) end
function T.permute(t, ...) return ops.permute(t, list_of(...)) end
function T.reshape(t, ...)
  local size = list_of(...)
  -- A view where the strides allow it: the last dims of a copy always do.
  local buf = ffi.new "int64_t[8]"
  for i = 1, #size do buf[i - 1] = size[i] end
  local r = C.ddp_view(t, #size, buf)
  if r ~= nil then return own(r) end
  local status = C.ddp_error_take(nil)
  if status ~= C.DDP_ESHAPE then return ops.view(t, size) end
  local copy = ops.clone(t)
  r = ops.view(copy, size)
  free(copy)
  return r
end
function T.flatten(t, first, last)
  local n = C.ddp_ndim(t)
  if n == 0 then return T.reshape(t, 1) end
  first = dim_from_one(t, first or 1, "flatten")
  last = dim_from_one(t, last or -1, "flatten")
  if first < 0 then first = first + n end
  if last < 0 then last = last + n end
  local size, k = {}, 1
  for d = 0, n - 1 do
    local s = tonumber(C.ddp_size(t, d))
    if d > first and d <= last then size[k - 1] = size[k - 1] * s else size[k] = s; k = k + 1 end
  end
  return T.reshape(t, size)
end
function T.t(t)
  if C.ddp_ndim(t) > 2 then fail(("t: the tensor has %d dims, at most 2; use transpose"):format(C.ddp_ndim(t))) end
  if C.ddp_ndim(t) < 2 then return ops.view(t, T.size(t)) end
  return ops.transpose(t, 1, 2)
end
function T.contiguous(t)
  if T.is_contiguous(t) then return t end
  return ops.clone(t)
end
function T.clone(t) return ops.clone(t, true) end

-- narrow(dim, start, length), slice(dim, first, last, step): positions from 1, -1 is the last.
local function position(p, n, what)
  if type(p) ~= "number" or p == 0 then fail(("%s: position %s; positions count from 1"):format(what, tostring(p))) end
  return p > 0 and p or n + p + 1
end
function T.narrow(t, dim, start, length)
  local n = tonumber(C.ddp_size(t, dim_from_one(t, dim, "narrow")))
  if type(length) ~= "number" then fail "narrow: length is missing" end
  local first = position(start, n, "narrow")
  if first < 1 or length < 0 or first + length - 1 > n then fail(("narrow: %d elements from position %d of dim %d, which has %d"):format(length, first, dim, n)) end
  return ops.slice(t, dim, first - 1, first - 1 + length)
end
function T.slice(t, dim, first, last, step)
  local n = tonumber(C.ddp_size(t, dim_from_one(t, dim, "slice")))
  first, last = position(first or 1, n, "slice"), position(last or -1, n, "slice")
  if first < 1 or last > n then fail(("slice: positions %d to %d of dim %d, which has %d"):format(first, last, dim, n)) end
  return ops.slice(t, dim, first - 1, math.max(last, first - 1), step)
end

-- The dim comes first, as in PyTorch.
function T.index_select(t, dim, ids) return ops.index_select(t, ids, dim) end
function T.gather(t, dim, ids) return ops.gather(t, ids, dim) end

function M.cat(list, dim) return ops.cat(list, dim) end
function M.stack(list, dim) return ops.stack(list, dim) end
M.where = function(cond, a, b)
  if type(a) == "number" then a = own(C.ddp_scalar(a)) end
  return ops.where(cond, a, b)
end
local function split_sizes(t, sizes_or_n, dim)
  dim = dim or 1
  local n = T.size(t, dim)
  local list, at = {}, 0
  if type(sizes_or_n) == "number" then
    local step, parts = sizes_or_n, {}
    while at < n do parts[#parts + 1] = math.min(step, n - at); at = at + step end
    sizes_or_n, at = parts, 0
  end
  for i, s in ipairs(sizes_or_n) do
    list[i] = ops.slice(t, dim, at, at + s)
    at = at + s
  end
  return list
end
T.split = split_sizes
function T.chunk(t, n, dim) return split_sizes(t, math.ceil(T.size(t, dim or 1) / n), dim) end
function T.unbind(t, dim)
  local list = {}
  for i = 1, T.size(t, dim or 1) do list[i] = ops.select(t, dim or 1, i) end
  return list
end
function T.masked_fill(t, mask, value) return ops.where(mask, own(C.ddp_scalar(value)), t) end

-- ---- reductions ---------------------------------------------------------------------------------------------------------

-- max() of all, max(dim) -> values, indices, max(other) elementwise: PyTorch's three.
function T.max(t, dim, keepdim)
  if is_tensor(dim) then return ops.maximum(t, dim) end
  if dim == nil then return ops.amax(t) end
  return ops.max_dim(t, dim, keepdim)
end
function T.min(t, dim)
  if is_tensor(dim) then return ops.minimum(t, dim) end
  if dim == nil then return ops.amin(t) end
  return ops.amin(t, dim)
end
function T.argmax(t, dim, keepdim)
  if type(dim) == "table" then dim, keepdim = dim.dim, dim.keepdim end
  if dim == nil then return ops.argmax(t, nil, keepdim, true) end
  return ops.argmax(t, dim, keepdim)
end
function T.norm(t)
  t = base.summand(t)
  local square = ops.mul(t, t)
  local sum = ops.sum(square)
  free(square)
  local r = ops.sqrt(sum)
  free(sum)
  return r
end

-- ---- types ----------------------------------------------------------------------------------------------------------------

local function to_later(t, device)
  local there = C.ddp_to_device_later(t, device)
  if there == nil and base.out_of_memory() then there = C.ddp_to_device_later(t, device) end
  return own(there)
end

-- to("bf16"), to("cuda"), to("cuda", "bf16"), to{device =, dtype =}. non_blocking: from pinned memory the host never waits.
function T.to(t, what, more)
  local opts = type(what) == "table" and what or type(more) == "table" and more or nil
  opts = base.options("to", opts, { "device", "dtype", "non_blocking" })
  local device, dtype = opts.device, opts.dtype
  for _, name in ipairs { type(what) ~= "table" and what or nil, type(more) ~= "table" and more or nil } do
    if base.dtypes[name] then dtype = name else device = name end
  end
  if not device and not dtype then fail "to: a dtype or a device is missing" end
  if device then
    local there = base.device(device, "to")
    if there ~= C.ddp_device_of(t) then
      t = opts.non_blocking and to_later(t, there) or ops.to_device(t, base.device_name(there))
    end
  end
  if not dtype or base.dtype(dtype, "to") == C.ddp_dtype_of(t) then return t end
  return ops.cast(t, dtype)
end
-- A copy in the host's pinned memory, from which a:to("cuda", {non_blocking = true}) does not wait; until ddp.synchronize() the copy must
-- not be written.
function T.pin_memory(t, device) return own(C.ddp_pin_memory(t, base.device(device or "cuda", "pin_memory"))) end
function T.is_pinned(t) return C.ddp_is_pinned(t) == 1 end
for method, dtype in pairs { float = "f32", double = "f64", half = "f16", bfloat16 = "bf16", long = "i64", int = "i32", byte = "u8", bool = "bool" } do
  T[method] = function(t) return T.to(t, dtype) end
end
T.cast = ops.cast

-- ---- comparing -------------------------------------------------------------------------------------------------------------

-- |a - b| <= atol + rtol |b| everywhere; NaN is never close.
function T.allclose(a, b, opts)
  opts = base.options("allclose", opts, { "rtol", "atol" })
  local rtol, atol = opts.rtol or 1e-5, opts.atol or 1e-8
  local sa, sb = T.size(a), T.size(b)
  if #sa ~= #sb then return false end
  for i = 1, #sa do if sa[i] ~= sb[i] then return false end end
  local n = T.numel(a)
  local x, y = ffi.new("double[?]", n + 1), ffi.new("double[?]", n + 1)
  check(C.ddp_to_doubles(a, x))
  check(C.ddp_to_doubles(b, y))
  for i = 0, n - 1 do
    local close = x[i] == y[i] or math.abs(x[i] - y[i]) <= atol + rtol * math.abs(y[i])
    if not close then return false end
  end
  return true
end
function T.equal(a, b) return T.allclose(a, b, { rtol = 0, atol = 0 }) end

-- ---- gradients: fields and methods; the walk is in grad.lua ------------------------------------------------------------------

function T.requires_grad_(t, on)
  check(C.ddp_set_requires_grad(t, on == false and 0 or 1))
  return t
end
function T.detach(t) return own(C.ddp_detach(t)) end

local FIELD = {}
function FIELD.grad(t)
  local g = C.ddp_tensor_grad(t)
  if g == nil then return nil end
  return own(g)
end
function FIELD.requires_grad(t) return C.ddp_requires_grad(t) == 1 end

-- What is no method of its own is the op of that name.
setmetatable(T, { __index = function(self, name)
  local f = ops[name]
  if f then rawset(self, name, f) end
  return f
end })
T.mm, T.sub, T.pow = ops.matmul, ops.sub, ops.pow

-- Random fills take {generator = g}.
for _, name in ipairs { "uniform_", "normal_", "bernoulli_" } do
  T[name] = function(t, a, b, opts)
    if type(a) == "table" then a, opts = nil, a elseif type(b) == "table" then b, opts = nil, b end
    if opts and opts.generator then
      local g = opts.generator
      local rest = {}
      for k, v in pairs(opts) do if k ~= "generator" then rest[k] = v end end
      if next(rest) ~= nil then return with_generator(g, ops[name], t, rest) end
      return with_generator(g, ops[name], t, a, b)
    end
    if opts then return ops[name](t, opts) end
    return ops[name](t, a, b)
  end
end
function T.copy_(t, src) return ops.copy_(t, src) end
function T.zero_(t) return ops.fill_(t, 0) end

-- ---- the metatype -----------------------------------------------------------------------------------------------------------------

local function operand(x)
  if type(x) == "number" then return own(C.ddp_scalar(x)) end
  return x
end
local function binary(name)
  local f = ops[name]
  return function(a, b)
    if type(a) ~= "number" then return f(a, b) end
    local s = C.ddp_scalar(a) -- a temporary: dropped at once
    if s == nil then base.raise() end
    local r = f(s, b)
    C.ddp_release(s)
    return r
  end
end
M.operand = operand

local function no_order(name)
  return function() fail(("tensors have no order; a:%s(b) compares element by element"):format(name)) end
end

ffi.metatype("ddp_tensor", {
  __index = function(t, key)
    local m = T[key]
    if m then return m end
    local field = FIELD[key]
    if field then return field(t) end
    if type(key) == "number" then return ops.select(t, 1, key) end
    fail(("a tensor has no \"%s\""):format(tostring(key)))
  end,
  __newindex = function(t, key, value)
    if key == "grad" then check(C.ddp_tensor_set_grad(t, value))
    elseif key == "requires_grad" then check(C.ddp_set_requires_grad(t, value and 1 or 0))
    elseif type(key) == "number" then
      local row = ops.select(t, 1, key)
      if type(value) == "number" then ops.fill_(row, value) else ops.copy_(row, value) end
      free(row)
    else fail(("a tensor has no field \"%s\" to set"):format(tostring(key))) end
  end,
  __add = binary "add", __sub = binary "sub", __mul = binary "mul", __div = binary "div", __pow = binary "pow",
  __unm = function(t) return ops.neg(t) end,
  __len = function(t)
    if C.ddp_ndim(t) == 0 then fail "a 0-dim tensor has no length" end
    return tonumber(C.ddp_size(t, 0))
  end,
  __tostring = to_text,
  __lt = no_order "lt", __le = no_order "le",
  -- The same handle, not the same values.
  __eq = function(a, b)
    if type(a) ~= "cdata" or type(b) ~= "cdata" then return false end
    return ffi.cast("void *", a) == ffi.cast("void *", b)
  end,
})

M.methods = T
return M
