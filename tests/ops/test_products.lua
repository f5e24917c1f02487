-- test_products.lua -- matmul and linear in bf16 and in f32 of precision "high", every layout of the operands, against reference
-- kernels in f64; and which kernel ran. tests/run.sh runs it with AMX emulated too.
-- With an argument: prints a digest of the results, for runs with other numbers of threads to compare.
local t = require "harness"
local ddp = require "ddp"
local ops = require "ddp.ops"
local checks = require "op_checks"
local base = require "ddp.ffi"
local C = base.C

local function with_high(...) return checks.with_precision("high", ...) end

-- Rows side by side, columns side by side, or neither.
local LAYOUTS = {
  rows = function(m, n, dtype) return ddp.randn(m, n):to(dtype) end,
  columns = function(m, n, dtype) return ddp.randn(n, m):to(dtype):t() end,
  strided = function(m, n, dtype) return ddp.randn(m, n, 2):to(dtype):select(3, 1) end,
}
local NAMES = { "rows", "columns", "strided" }
local SIZES = { { 96, 64, 256 }, { 130, 70, 161 }, { 33, 1031, 47 }, { 7, 500, 400 }, { 1, 4096, 300 } } -- M, N, K
local LIMIT = { high = 1e-5, bf16 = 2 ^ -8 } -- of the largest value

-- ---- a digest ----------------------------------------------------------------------------------------------------------
if arg[1] == "digest" then
  for _, dtype in ipairs { "high", "bf16" } do
    for _, a in ipairs { "rows", "columns" } do
      ddp.manual_seed(5)
      local kind = dtype == "high" and "f32" or dtype
      local x, w = LAYOUTS[a](300, 1500, kind), LAYOUTS.rows(1500, 170, kind)
      local y = ddp.no_grad(with_high, ops.matmul, x, w):float()
      local bits, sum = require "ffi".cast("uint32_t *", y:data()), 0
      for k = 0, y:numel() - 1 do sum = (sum * 31 + tonumber(bits[k])) % 4294967291 end
      print(dtype, a, sum)
    end
  end
  os.exit(0)
end

-- ---- values ------------------------------------------------------------------------------------------------------------

local function kind_of(dtype) return dtype == "high" and "f32" or dtype end
local function compare(dtype, fn, ...)
  local wide, args = {}, { ... }
  for i = 1, #args do wide[i] = args[i]:to "f64" end
  local y = with_high(fn, ...)
  local kernel = checks.last_kernel()
  base.check(C.ddp__kernels_only "ref")
  local ok, want = pcall(fn, unpack(wide))
  C.ddp__kernels_only(nil)
  t.ok(ok, want)
  t.eq({ y:dtype(), y:size() }, { kind_of(dtype), want:size() })
  local share = (y:to "f64" - want):abs():max():item() / want:abs():max():item()
  t.ok(share <= LIMIT[dtype], ("%s is off by %.2g of the largest value"):format(kernel, share))
  return kernel
end

for _, dtype in ipairs { "high", "bf16" } do
  for _, size in ipairs(SIZES) do
    t.test(("%dx%d by %dx%d in %s, whatever the layouts, equals the reference"):format(size[1], size[3], size[3], size[2], dtype), function()
      ddp.manual_seed(2)
      for _, a in ipairs(NAMES) do
        for _, b in ipairs(NAMES) do
          ddp.no_grad(compare, dtype, ops.matmul, LAYOUTS[a](size[1], size[3], kind_of(dtype)), LAYOUTS[b](size[3], size[2], kind_of(dtype)))
        end
      end
    end)
  end
  t.test("a linear layer with bias, and of three dims, in " .. dtype, function()
    local kind = kind_of(dtype)
    local w, bias = ddp.randn(130, 257):to(kind), ddp.randn(130):to(kind)
    ddp.no_grad(compare, dtype, ops.linear, ddp.randn(50, 257):to(kind), w, bias)
    ddp.no_grad(compare, dtype, ops.linear, ddp.randn(4, 11, 257):to(kind), w, bias)
    ddp.no_grad(compare, dtype, ops.linear, LAYOUTS.columns(50, 257, kind), LAYOUTS.strided(130, 257, kind), ddp.randn(130, 2):to(kind):select(2, 1))
  end)
  t.test("batches, one of them broadcast, in " .. dtype, function()
    local kind = kind_of(dtype)
    local a, b = ddp.randn(3, 1, 60, 90):to(kind), ddp.randn(4, 90, 65):to(kind)
    ddp.no_grad(compare, dtype, ops.matmul, a, b)
    ddp.no_grad(compare, dtype, ops.matmul, a, b:transpose(2, 3):contiguous():transpose(2, 3))
    ddp.no_grad(compare, dtype, ops.matmul, a:transpose(3, 4):contiguous():transpose(3, 4), b)
  end)
end

-- ---- the choice ---------------------------------------------------------------------------------------------------------

local function flags()
  for line in io.lines "/proc/cpuinfo" do if line:match "^flags" then return line .. " " end end
  return ""
end
local cap = os.getenv "DDP_ISA"
local has_amx = os.getenv "DDP_AMX" == "emulate" or (flags():find " amx_bf16 " and flags():find " amx_tile ")
local amx = has_amx and flags():find " avx512_bf16 " and (cap == nil or cap == "amx")
local function kernel_of(fn, ...)
  ddp.no_grad(fn, ...)
  return checks.last_kernel()
end
local a, b, w = ddp.randn(128, 128), ddp.randn(128, 128), ddp.randn(64, 128)

t.test("with AMX products of high precision are its, but for the smallest", function()
  if not amx then t.skip "no AMX" end
  t.eq(with_high(kernel_of, ops.matmul, a, b), "matmul.amx.v4")
  t.eq(with_high(kernel_of, ops.matmul, a:t(), b), "matmul.amx.v4")
  t.eq(with_high(kernel_of, ops.linear, a, w), "linear.amx.v4")
  t.eq(with_high(kernel_of, ops.matmul, ddp.randn(8, 128, 64), ddp.randn(8, 64, 128)), "matmul.amx.v4")
  t.eq(with_high(kernel_of, ops.linear, ddp.randn(32, 10), ddp.randn(100, 10)), "linear.cpu.v4")
  t.eq(kernel_of(ops.matmul, a:to "bf16", b:to "bf16"), "matmul.amx.v4")
  t.eq(kernel_of(ops.linear, a:to "bf16", w:to "bf16"), "linear.amx.v4")
end)
t.test("other precisions, and f16, are not", function()
  for _, precision in ipairs { "exact", "highest" } do
    local kernel = checks.with_precision(precision, kernel_of, ops.matmul, a, b)
    t.ok(not kernel:find "amx", kernel)
  end
  t.ok(not with_high(kernel_of, ops.matmul, a:to "f16", b:to "f16"):find "amx")
end)
t.test("without AMX high precision is f32's, to the bit", function()
  if amx then t.skip "AMX is there" end
  local y = ddp.no_grad(ops.matmul, a, b)
  local kernel = checks.last_kernel()
  t.eq((ddp.no_grad(with_high, ops.matmul, a, b) - y):abs():max():item(), 0)
  t.eq(with_high(kernel_of, ops.matmul, a, b), kernel)
end)
t.test("the gradients of a linear layer in high precision are near those in f64", function()
  ddp.manual_seed(4)
  local function grads(dtype)
    local x, v = ddp.randn({ 200, 96 }, { dtype = "f32" }):to(dtype), ddp.randn({ 80, 96 }, { dtype = "f32" }):to(dtype)
    local bias = ddp.randn(80):to(dtype)
    for _, p in ipairs { x, v, bias } do p:requires_grad_() end
    local up = ddp.randn(200, 80):to(dtype)
    ops.linear(x, v, bias):backward(up)
    return { x.grad, v.grad, bias.grad }
  end
  local got = with_high(grads, "f32")
  ddp.manual_seed(4)
  for i, want in ipairs(grads "f64") do
    local share = (got[i]:to "f64" - want):abs():max():item() / want:abs():max():item()
    t.ok(share <= LIMIT.high, ("gradient %d is off by %.2g"):format(i, share))
  end
end)
t.test("an Inf in high precision reaches its row as NaN and no other", function()
  if not amx then t.skip "no AMX" end
  local x = ddp.randn(128, 128)
  x[5]:narrow(1, 9, 1):fill_(math.huge)
  local y = ddp.no_grad(with_high, ops.matmul, x, b)
  t.eq((y[5]:ne(y[5])):float():sum():item(), 128)
  t.eq((y:ne(y)):float():sum():item(), 128)
end)
t.test("M6 one, two and three threads give the same bits", function()
  if not amx then t.skip "f32 is oneDNN's, which shares sums out by threads" end
  local function digest(threads) return checks.digest("tests/ops/test_products.lua", threads) end
  local one = digest(1)
  t.eq(select(2, one:gsub("\n", "")), 4)
  t.eq(digest(2), one)
  t.eq(digest(3), one)
end)
t.done()
