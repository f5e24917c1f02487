-- op_checks.lua -- what every op must satisfy, as functions of a callable and its sample. A check raises when it does not
-- hold; tests/harness/test_known_bad.lua shows that each of them can fail.
local ffi = require "ffi"
local ddp = require "ddp"
local base = require "ddp.ffi"
local ops = require "ddp.ops"
local C = base.C

ffi.cdef [[
int ddp__kernels_only(const char *list);
const char *ddp__last_kernel(void);
]]

local M = {}

-- With DDP_TEST_DEVICE=cuda everything but the reference runs on the GPU.
M.device = os.getenv "DDP_TEST_DEVICE"
local function placed(x)
  if not M.device then return x end
  if ddp.is_tensor(x) then return x:to(M.device) end
  if type(x) ~= "table" then return x end
  local out = {}
  for k, v in pairs(x) do out[k] = placed(v) end
  return out
end

-- ---- inputs ------------------------------------------------------------------------------------------------------

local HALF = { f16 = true, bf16 = true }

-- A description of an input: {2, 3} normal numbers; {2, 3, kind = "positive"|"tied"|"int"|"bool"|"label", n =, dtype =}.
-- wide: f32 where the others are f16 or bf16 (statistics).
local function make(d, dtype)
  if type(d) ~= "table" or d.value then return d and d.value end
  if d.list then
    local out = {}
    for i, x in ipairs(d.list) do out[i] = make(x, dtype) end
    return out
  end
  local size = {}
  for i, s in ipairs(d) do size[i] = s end
  if d.kind == "int" then return ddp.randint(d.lo or -9, d.n or 10, size, { dtype = d.dtype or "i64" }) end
  if d.kind == "label" then return ddp.randint(0, d.n, size) end
  if d.kind == "bool" then return ddp.randint(0, 2, size):bool() end
  local t = ddp.randn(size, { dtype = "f64" })
  if d.kind == "positive" then t = t:abs() + 0.5 end
  if d.kind == "distinct" then t = (ddp.randperm(math.max(t:numel(), 1)):to "f64" * 0.37):slice(1, 1, math.max(t:numel(), 1)):reshape(size) end
  if d.kind == "tied" then t = ddp.randint(-3, 4, size):to "f64" end -- many of the same
  if d.kind == "away" then t = t + t:sign() * 0.3 end -- from 0, where there is a kink
  return t:to(d.dtype or d.wide and HALF[dtype] and "f32" or dtype)
end

-- Inputs of a sample, the same values in every dtype: drawn in f64 from one seed.
function M.inputs(sample, dtype, seed)
  ddp.manual_seed(seed or 7)
  local out = { n = sample.inputs and #sample.inputs or 0 }
  for i = 1, out.n do out[i] = make(sample.inputs[i], dtype) or nil end
  return out
end

local function args_of(sample, inputs)
  local a = { unpack(inputs, 1, inputs.n) }
  local n = inputs.n
  for i = 1, sample.n_args or (sample.args and #sample.args or 0) do
    n = n + 1
    a[n] = sample.args[i]
  end
  return a, n
end

local function tensors(...)
  local out = {}
  for i = 1, select("#", ...) do
    local v = select(i, ...)
    if ddp.is_tensor(v) then out[#out + 1] = v end
  end
  return out
end

-- Runs the op on inputs with the kernels of one list (nil: the usual choice). Returns its tensors.
function M.run(op, sample, inputs, list)
  if list then base.check(C.ddp__kernels_only(list)) end
  if sample.seed then ddp.manual_seed(sample.seed) end
  local a, n = args_of(sample, inputs)
  if M.device and list ~= "ref" then
    for i = 1, inputs.n do a[i] = placed(a[i]) end
    if ddp.device() ~= "cpu" then ddp.set_default_device(M.device) end
  end
  local function pack(ok, ...)
    ddp.set_default_device "cpu"
    C.ddp__kernels_only(nil)
    if not ok then error((...), 0) end
    local results = tensors(...)
    for i = 1, M.device and list ~= "ref" and op ~= ops.to_device and #results or 0 do
      if results[i]:device() == "cpu" then error("it ran on the cpu, not on " .. M.device, 0) end
    end
    return results
  end
  return pack(pcall(op, unpack(a, 1, n)))
end

-- fn(...) with f32 products of that precision ("exact", "highest" or "high").
function M.with_precision(precision, fn, ...)
  ddp.set_float32_matmul_precision(precision)
  local function back(ok, ...)
    ddp.set_float32_matmul_precision "highest"
    if not ok then error((...), 0) end
    return ...
  end
  return back(pcall(fn, ...))
end

-- What `script digest` prints when it has that many threads.
function M.digest(script, threads)
  local pipe = io.popen(("OMP_NUM_THREADS=%d luajit %s digest"):format(threads, script))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

function M.last_kernel() return ffi.string(C.ddp__last_kernel()) end

-- ---- comparing -----------------------------------------------------------------------------------------------------

local function doubles(t)
  local n = t:numel()
  local buf = ffi.new("double[?]", math.max(n, 1))
  base.check(C.ddp_to_doubles(t, buf))
  return buf, n
end

-- Largest difference over the largest value (or least, where that is more), at most tol. NaN fails, unless both have it;
-- comparing nothing fails.
function M.compare(got, want, tol, what, least)
  if #got ~= #want or #got == 0 then error(("%s: %d results, expected %d"):format(what, #got, #want), 0) end
  for k = 1, #got do
    local a, n = doubles(got[k])
    local b, m = doubles(want[k])
    if n ~= m or table.concat(got[k]:size(), ",") ~= table.concat(want[k]:size(), ",") then error(what .. ": shapes differ", 0) end
    local top = least or 1e-30
    for i = 0, n - 1 do if math.abs(b[i]) ~= math.huge then top = math.max(top, b[i] == b[i] and math.abs(b[i]) or 0) end end
    for i = 0, n - 1 do
      local same = a[i] == b[i] or (a[i] ~= a[i] and b[i] ~= b[i]) or math.abs(a[i] - b[i]) <= tol * top
      if not same then error(("%s: element %d of result %d is %.9g, expected %.9g (largest %.3g)"):format(what, i, k, a[i], b[i], top), 0) end
    end
  end
end

-- No NaN and no infinity where the sample's inputs have none.
function M.finite(results, what)
  for _, t in ipairs(results) do
    local a, n = doubles(t)
    for i = 0, n - 1 do if not (math.abs(a[i]) < math.huge) then error(("%s: element %d is %g"):format(what, i, a[i]), 0) end end
  end
end

-- ---- the checks -------------------------------------------------------------------------------------------------------

local TOL = { f32 = 2e-5, f64 = 1e-11 }

-- The op in f32, by these kernels, against reference kernels in f64.
function M.against_reference(op, reference, sample, list)
  local dtype = sample.draws and "f32" or "f64" -- draws of f32 and f64 are different numbers
  local want = M.run(reference, sample, M.inputs(sample, dtype), "ref")
  M.finite(want, "reference")
  M.compare(M.run(op, sample, M.inputs(sample, "f32"), list), want, sample.tol or TOL.f32, list or "usual kernels")
end

-- Reference kernels in f64 against plain Lua arithmetic: value(args...) gives the flat elements.
function M.against_value(op, sample, value)
  local inputs = M.inputs(sample, "f64")
  local got = M.run(op, sample, inputs, "ref")
  local want = value(unpack((args_of(sample, inputs))))
  local a, n = doubles(got[1])
  if n ~= #want then error(("value: %d elements, expected %d"):format(n, #want), 0) end
  for i = 1, n do
    local same = math.abs(a[i - 1] - want[i]) <= 1e-10 * math.max(1, math.abs(want[i]))
    if not same then error(("value: element %d is %.12g, expected %.12g"):format(i - 1, a[i - 1], want[i]), 0) end
  end
end

-- The same values laid out otherwise: transposed in memory, as a slice out of a larger tensor, and channels-last.
local function relaid(t, how)
  if not ddp.is_tensor(t) or t:dim() == 0 or t:numel() == 0 then return t end
  t = placed(t)
  local n = t:dim()
  if how == "channels-last" then
    return n == 4 and t:permute(1, 3, 4, 2):contiguous():permute(1, 4, 2, 3) or t
  end
  if how == "transposed" and n >= 2 then return t:transpose(1, n):contiguous():transpose(1, n) end
  local size = t:size()
  size[n] = size[n] * 2 + 1
  local big = ddp.full(size, 77, { dtype = t:dtype() == "bool" and "u8" or t:dtype(), device = t:device() }):to(t:dtype())
  local part = big:slice(n, 2, 2 * t:size(n), 2)
  part:copy_(t)
  return part
end

function M.layouts_agree(op, sample, list, dtype)
  dtype = dtype or "f32"
  local plain = M.run(op, sample, M.inputs(sample, dtype), list)
  for _, how in ipairs { "transposed", "sliced", "channels-last" } do
    local inputs = M.inputs(sample, dtype)
    for i = 1, inputs.n do
      if type(inputs[i]) == "table" then for k, x in ipairs(inputs[i]) do inputs[i][k] = relaid(x, how) end
      else inputs[i] = relaid(inputs[i], how) end
    end
    local compare = HALF[dtype] and M.compare_rounded or M.compare
    compare(M.run(op, sample, inputs, list), plain, HALF[dtype] and M.half_tol(sample, dtype) or sample.tol or TOL.f32, how, HALF[dtype])
  end
end

function M.twice_the_same(op, sample)
  local a = M.run(op, sample, M.inputs(sample, "f32"))
  local b = M.run(op, sample, M.inputs(sample, "f32"))
  M.compare(a, b, 0, "a second run")
end

-- In place writes the same values, into the first input, and nothing beside it.
function M.in_place_agrees(op, op_, sample, dtype)
  local want = M.run(op, sample, M.inputs(sample, dtype or "f32"))
  local inputs = M.inputs(sample, dtype or "f32")
  local x = inputs[1]
  if table.concat(want[1]:size(), ",") ~= table.concat(x:size(), ",") or want[1]:dtype() ~= x:dtype() then return end
  local n = x:numel()
  x = placed(x)
  local guarded = placed(ddp.full({ n + 32 }, 12352):to(x:dtype())) -- a number of every dtype
  local inner = guarded:narrow(1, 17, n)
  if n > 0 then inner:copy_(x:reshape{ n }) end
  inputs[1] = inner:view(x:size())
  M.run(op_, sample, inputs)
  if n > 0 then M.compare({ inputs[1] }, want, 0, "in place") end
  for i = 1, 16 do
    if guarded[i]:item() ~= 12352 or guarded[16 + n + i]:item() ~= 12352 then error("in place: wrote outside its tensor", 0) end
  end
end

-- Which inputs are differentiated: floating tensors, lists opened.
local function leaves(inputs, dtype)
  local list = {}
  local function visit(t)
    if ddp.is_tensor(t) and t:dtype() == dtype then
      t:requires_grad_(true)
      list[#list + 1] = t
    end
  end
  for i = 1, inputs.n do
    if type(inputs[i]) == "table" then for _, t in ipairs(inputs[i]) do visit(t) end else visit(inputs[i]) end
  end
  return list
end

local function weighted_sum(results, weights)
  local total
  for k, y in ipairs(results) do
    if weights[k] and y.requires_grad then
      local s = (y * weights[k]):sum()
      total = total and total + s or s
    end
  end
  return total
end

local function weights_for(results)
  ddp.manual_seed(99)
  local w = {}
  for k, y in ipairs(results) do if y:dtype() == "f64" then w[k] = ddp.rand(y:size(), { dtype = "f64" }) + 0.5 end end
  return w
end

-- Central differences of total() over every element of each leaf against `grads`.
local function differences(list, grads, total, what)
  local eps, compared = 1e-6, 0
  for i, x in ipairs(list) do
    local v = x:data()
    local g = grads[i] and grads[i]:contiguous():clone()
    local gv = g and doubles(g)
    for k = 0, x:numel() - 1 do
      local keep = v[k]
      v[k] = keep + eps
      local up = ddp.no_grad(total)
      v[k] = keep - eps
      local down = ddp.no_grad(total)
      v[k] = keep
      local numeric, analytic = (up - down) / (2 * eps), gv and gv[k] or 0
      local close = math.abs(numeric - analytic) <= 2e-5 + 1e-4 * math.abs(numeric)
      if not close then error(("%s: input %d, element %d: %.9g by rule, %.9g by difference"):format(what, i, k, analytic, numeric), 0) end
      compared = compared + 1
    end
  end
  if compared == 0 and #list > 0 then return end
end

function M.gradients(op, sample)
  local inputs = M.inputs(sample, "f64")
  for i = 1, inputs.n do
    if ddp.is_tensor(inputs[i]) and inputs[i]:dtype() == "f64" and (sample.constant or {})[i] then inputs[i] = inputs[i]:detach() end
  end
  local list = leaves(inputs, "f64")
  for i = 1, inputs.n do if (sample.constant or {})[i] and ddp.is_tensor(inputs[i]) then inputs[i]:requires_grad_(false) end end
  local kept = {}
  for _, t in ipairs(list) do if t.requires_grad then kept[#kept + 1] = t end end
  list = kept
  local y = M.run(op, sample, inputs, "ref")
  local w = weights_for(y)
  local total = weighted_sum(y, w)
  if not total then error("gradients: no result depends on an input", 0) end
  local grads = ddp.grad({ total }, list, { allow_unused = true })
  differences(list, grads, function()
    local s = 0
    for k, t in ipairs(M.run(op, sample, inputs, "ref")) do if w[k] and y[k].requires_grad then s = s + (t * w[k]):sum():item() end end
    return s
  end, "gradient")
end

-- The gradient, differentiated again.
function M.second_gradients(op, sample)
  local inputs = M.inputs(sample, "f64")
  local list = {}
  for _, t in ipairs(leaves(inputs, "f64")) do list[#list + 1] = t end
  for i = 1, inputs.n do if (sample.constant or {})[i] and ddp.is_tensor(inputs[i]) then inputs[i]:requires_grad_(false) end end
  local kept = {}
  for _, t in ipairs(list) do if t.requires_grad then kept[#kept + 1] = t end end
  list = kept
  local w, u = nil, {}
  local function first_grads(create)
    local y = M.run(op, sample, inputs, "ref")
    w = w or weights_for(y)
    -- Not linear in y, so that the second gradient does not vanish for linear ops.
    local total
    for k, t in ipairs(y) do
      if w[k] and t.requires_grad then
        local s = (t * t * w[k]):sum()
        total = total and total + s or s
      end
    end
    return ddp.grad({ total }, list, { allow_unused = true, create_graph = create })
  end
  local g1 = first_grads(true)
  ddp.manual_seed(5)
  for i = 1, #list do if g1[i] then u[i] = ddp.rand(list[i]:size(), { dtype = "f64" }) + 0.5 end end
  local total
  for i = 1, #list do
    if g1[i] and g1[i].requires_grad then
      local s = (g1[i] * u[i]):sum()
      total = total and total + s or s
    end
  end
  if not total then return end
  local g2 = ddp.grad({ total }, list, { allow_unused = true })
  differences(list, g2, function()
    return ddp.enable_grad(function()
      local s, g = 0, first_grads(false)
      for i = 1, #list do if g[i] and u[i] then s = s + (g[i] * u[i]):sum():item() end end
      return s
    end)
  end, "second gradient")
end

-- ---- f16 and bf16 ----------------------------------------------------------------------------------------------------

local FORMAT = {
  f16 = { bits = 10, least = 2 ^ -24, overflow = 65520, nan = 0x7e00, inf = 0x7c00 },
  bf16 = { bits = 7, least = 2 ^ -133, overflow = 2 ^ 128 * (1 - 2 ^ -9), nan = 0x7fc0, inf = 0x7f80 },
}

-- Half the distance of neighbours at v, with a hair for what was rounded before; 0 for other dtypes.
local function rounding(format, v)
  if not format then return 0 end
  local _, e = math.frexp(math.abs(v))
  return 0.502 * math.max(2 ^ (e - 1 - format.bits), format.least)
end

-- On a device an op that is fused where it can be (stepwise in its sample) may round in between, as its chain does.
function M.half_tol(sample, dtype)
  if M.device and sample.stepwise then return 2 ^ -FORMAT[dtype].bits end
  return sample.tol or TOL.f32
end

-- As compare, where results of 16 bits may also be off by their rounding (or by both, where want was rounded too), and
-- those of f16 overflow.
function M.compare_rounded(got, want, tol, what, both)
  if #got ~= #want or #got == 0 then error(("%s: %d results, expected %d"):format(what, #got, #want), 0) end
  for k = 1, #got do
    local a, n = doubles(got[k])
    local b, m = doubles(want[k])
    if n ~= m or table.concat(got[k]:size(), ",") ~= table.concat(want[k]:size(), ",") then error(what .. ": shapes differ", 0) end
    local top, format = 1e-30, FORMAT[got[k]:dtype()]
    for i = 0, n - 1 do if math.abs(b[i]) < math.huge then top = math.max(top, math.abs(b[i])) end end
    for i = 0, n - 1 do
      local same = a[i] == b[i] or (a[i] ~= a[i] and b[i] ~= b[i]) or math.abs(a[i] - b[i]) <= tol * top + rounding(format, b[i]) * (both and 2 or 1)
      if format and math.abs(a[i]) == math.huge then same = a[i] * b[i] > 0 and math.abs(b[i]) * (1 + tol) >= format.overflow end
      if not same then error(("%s: element %d of result %d is %.9g, expected %.9g (largest %.3g)"):format(what, i, k, a[i], b[i], top), 0) end
    end
  end
end

local function mapped(inputs, fn)
  local out = { n = inputs.n }
  for i = 1, inputs.n do
    local v = inputs[i]
    if type(v) == "table" then
      out[i] = {}
      for k, x in ipairs(v) do out[i][k] = fn(x) end
    else out[i] = ddp.is_tensor(v) and fn(v) or v end
  end
  return out
end

local FLOATS = { f16 = true, bf16 = true, f32 = true, f64 = true }
local function in_f64(inputs) return mapped(inputs, function(t) return FLOATS[t:dtype()] and t:to "f64" or t end) end

-- The first element of the first input of this dtype becomes NaN or infinite. False when there is none.
local function poison(inputs, dtype, with)
  local done = false
  mapped(inputs, function(t)
    if not done and t:dtype() == dtype and t:numel() > 0 then
      t:data()[0] = FORMAT[dtype][with]
      done = true
    end
    return t
  end)
  return done
end

-- The op in f16 or bf16 against reference kernels in f64 on the same, rounded, values: one rounding apart, and what f32
-- adds up to. with: "nan" or "inf" in the inputs. False when no input has the dtype.
function M.half_against_reference(op, reference, sample, dtype, list, with)
  local function inputs()
    local t = M.inputs(sample, dtype)
    local has = not with
    mapped(t, function(x) has = has or x:dtype() == dtype return x end)
    if with then has = poison(t, dtype, with) end
    return has and t
  end
  local x = inputs()
  if not x then return false end
  local want = M.run(reference, sample, sample.draws and x or in_f64(x), "ref")
  if not with then M.finite(want, "reference") end
  M.compare_rounded(M.run(op, sample, inputs(), list), want, M.half_tol(sample, dtype), dtype .. " " .. (with or "") .. " " .. (list or "usual kernels"))
  return true
end

-- The gradient in f16 or bf16 against the one in f64 at the same values, a few roundings apart: of the largest element, or
-- of 1, for what the rule reads (a result near 1, say) was rounded too.
function M.half_gradients(op, sample, dtype)
  local function grads(inputs)
    local list, total = {}, nil
    for i = 1, inputs.n do
      if not (sample.constant or {})[i] then
        inputs[i] = mapped({ n = 1, inputs[i] }, function(t)
          if not FLOATS[t:dtype()] then return t end
          list[#list + 1] = t:detach():requires_grad_(true)
          return list[#list]
        end)[1]
      end
    end
    local y = M.run(op, sample, inputs)
    ddp.manual_seed(99)
    for _, t in ipairs(y) do
      local w = (ddp.rand(t:size(), { dtype = "f64" }) + 0.5):to(dtype):to "f64":to(t:device())
      if t.requires_grad then
        local s = (t:to "f64" * w):sum()
        total = total and total + s or s
      end
    end
    if not total then error("gradients: no result depends on an input", 0) end
    return ddp.grad({ total }, list, { allow_unused = true }), #list
  end
  local inputs = M.inputs(sample, dtype)
  local want = grads(in_f64(inputs))
  local got, n = grads(inputs)
  for i = 1, n do
    if (got[i] == nil) ~= (want[i] == nil) then error("gradients: one is missing", 0) end
    if got[i] then M.compare({ got[i] }, { want[i] }, 6 * 2 ^ -(FORMAT[dtype].bits + 1), dtype .. " gradient " .. i, 1) end
  end
end

-- The op must refuse with this text.
function M.must_fail(op, sample)
  local ok, err = pcall(function()
    for _, t in ipairs(M.run(op, sample, M.inputs(sample, sample.dtype or "f32"))) do doubles(t) end -- a device tells when it is waited for
  end)
  if ok then error("was accepted; expected \"" .. sample.text .. "\"", 0) end
  if not tostring(err):find(sample.text, 1, true) then error(("said \"%s\", expected \"%s\""):format(tostring(err), sample.text), 0) end
end

return M
