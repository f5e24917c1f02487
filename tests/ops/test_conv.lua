-- test_conv.lua -- the convolutions of kernels/cpu at odd shapes, in each dtype, against reference kernels in f64; and which
-- kernel ran. tests/run.sh runs it under every cap of the instruction set that the machine has.
-- With an argument: prints a digest of the results, for runs with other numbers of threads to compare.
local t = require "harness"
local ddp = require "ddp"
local ops = require "ddp.ops"
local checks = require "op_checks"
local cases = require "conv_cases"
local base = require "ddp.ffi"
local C = base.C
local case, depthwise = cases.case, cases.depthwise

local CASES = {
  case(1, 1, 1, 1, 1, 1), case(1, 512, 1, 1, 64, 1), case(33, 17, 7, 7, 64, 1), case(2, 64, 7, 7, 32, 1, 2), case(2, 33, 7, 7, 15, 1, 2, 1),
  case(2, 3, 7, 7, 16, 3, 1, 1), case(33, 16, 7, 7, 16, 3, 1, 1), case(2, 17, 31, 31, 33, 3, 1, 1), case(6, 33, 3, 3, 17, 3, 1, 1),
  case(1, 33, 3, 3, 17, 3, 1, 1), case(2, 64, 7, 9, 96, 3),
  case(7, 16, 1, 1, 32, 3, 1, 1), case(2, 32, 5, 6, 32, 3, 1, 2), case(6, 160, 4, 4, 48, 3, 1, 1), case(2, 15, 7, 7, 3, 3, 1, 1),
  case(2, 17, 31, 31, 33, 3, 2, 1), case(33, 15, 7, 7, 17, 3, 2), case(2, 8, 9, 9, 40, 3, { 2, 1 }, { 1, 0 }), case(3, 32, 8, 8, 32, 3, 3, 1),
  case(25, 16, 9, 9, 16, 3, 2), case(24, 160, 8, 8, 48, 3, 2, 1), case(13, 17, 6, 7, 33, 3, 2, 2),
  case(7, 32, 10, 31, 16, 3, 2, { 0, 1 }), case(12, 16, 17, 3, 40, 3, 2, { 2, 1 }),
  case(1, 3, 31, 31, 16, 7, 2, 3), case(2, 15, 7, 7, 33, 5, 1, 2), case(2, 33, 7, 7, 15, 5, 2, 1), case(2, 16, 7, 7, 16, { 1, 7 }, 1, { 0, 3 }),
  case(2, 16, 9, 9, 16, 3, 1, 2, { dilation = { 2, 2 } }), case(2, 17, 9, 9, 16, 3, 2, 2, { dilation = { 2, 2 } }),
  case(1, 16, 5, 5, 16, 1, 1000000), case(2, 16, 5, 3, 16, { 2, 1 }, { 7, 4 }, { 1, 2 }), -- strides beyond the image
  depthwise(2, 17, 7, 7, 3, 1, 1), depthwise(1, 33, 31, 31, 5, 2, 2), depthwise(3, 64, 5, 5, 3, 2, 1),
}
local LARGE = { case(33, 16, 31, 31, 16, 3, 1, 1), case(33, 32, 15, 15, 64, 3, 2, 1), case(40, 64, 16, 16, 64, 1) } -- several chunks and blocks

-- "high" is f32 with products in two parts where there is AMX, "exact" f32 without Winograd.
local function with_precision(dtype, ...) return checks.with_precision((dtype == "high" or dtype == "exact") and dtype or "highest", ...) end
local function inputs(v, dtype, seed)
  if dtype == "high" or dtype == "exact" then dtype = "f32" end
  ddp.manual_seed(seed or 3)
  local function activations(...) return ddp.randn(...):permute(1, 4, 2, 3):to(dtype) end
  return { x = activations(v.n, v.h, v.w, v.c), g = activations(v.n, v.ho, v.wo, v.k), w = ddp.randn(v.k, v.c / v.groups, v.r, v.s):to(dtype), bias = ddp.randn(v.k):to(dtype) }
end
local PASSES = {
  conv2d = function(v, i) return ops.conv2d(i.x, i.w, i.bias, v.stride, v.padding, v.dilation, v.groups) end,
  conv2d_grad_input = function(v, i) return ops.conv2d_grad_input(i.g, i.w, i.x:size(), v.stride, v.padding, v.dilation, v.groups) end,
  conv2d_grad_weight = function(v, i) return ops.conv2d_grad_weight(i.g, i.x, i.w:size(), v.stride, v.padding, v.dilation, v.groups) end,
}
local NAMES = { "conv2d", "conv2d_grad_input", "conv2d_grad_weight" }

-- ---- a digest, for other numbers of threads ---------------------------------------------------------------------------
if arg[1] == "digest" then
  ddp.deterministic(true)
  for _, v in ipairs { LARGE[1], LARGE[2], CASES[3], CASES[8], CASES[#CASES - 1] } do
    for _, dtype in ipairs { "f32", "bf16", "high" } do
      local i = inputs(v, dtype)
      for _, name in ipairs(NAMES) do
        local y, sum = with_precision(dtype, PASSES[name], v, i):float():contiguous(), 0
        local n, bits = y:numel(), require "ffi".cast("uint32_t *", y:data())
        for k = 0, n - 1 do sum = (sum * 31 + tonumber(bits[k])) % 4294967291 end
        print(name, dtype, sum)
      end
    end
  end
  os.exit(0)
end

-- ---- values ------------------------------------------------------------------------------------------------------------

-- Of the largest value: Winograd in f32; what two parts leave out; a rounding of the result.
local LIMIT = { f32 = 1e-5, exact = 2e-6, high = 1e-5, bf16 = 2 ^ -8, f16 = 2 ^ -10 }
local function against_reference(v, dtype)
  local i, wide = inputs(v, dtype), {}
  for key, x in pairs(i) do wide[key] = x:to "f64" end
  for _, name in ipairs(NAMES) do
    local y = with_precision(dtype, PASSES[name], v, i)
    local kernel = checks.last_kernel()
    base.check(C.ddp__kernels_only "ref")
    local ok, want = pcall(PASSES[name], v, wide)
    C.ddp__kernels_only(nil)
    t.ok(ok, want)
    t.eq(y:dtype(), i.x:dtype())
    local worst, largest = (y:to "f64" - want):abs():max():item(), math.max(want:abs():max():item(), 1e-30)
    t.ok(worst / largest <= LIMIT[dtype], ("%s by %s is off by %.2g of the largest value"):format(name, kernel, worst / largest))
  end
end

for _, v in ipairs(CASES) do
  for _, dtype in ipairs { "f32", "exact", "high", "bf16", "f16" } do
    t.test(("%s in %s equals the reference"):format(v.name, dtype), function() ddp.no_grad(against_reference, v, dtype) end)
  end
end
for _, v in ipairs(LARGE) do
  for _, dtype in ipairs { "f32", "exact", "high", "bf16" } do
    t.test(("%s in %s equals the reference"):format(v.name, dtype), function() ddp.no_grad(against_reference, v, dtype) end)
  end
end

-- ---- the choice ---------------------------------------------------------------------------------------------------------

local isa, amx, pairs_of_bf16 = cases.isa, cases.amx, cases.pairs_of_bf16

-- Without AVX2 Winograd and gathered rows are left to others.
local function runs(v, way, dtype)
  for _, name in ipairs(NAMES) do
    local i = inputs(v, dtype or "f32")
    if dtype == "high" then with_precision(dtype, PASSES[name], v, i) else PASSES[name](v, i) end
    local kernel = checks.last_kernel()
    if isa == "v2" and way ~= "depthwise" then t.ok(kernel == name .. ".onednn" or kernel == name .. ".ref", kernel)
    else
      local own = amx and (dtype == "bf16" or dtype == "high") and way ~= "depthwise"
      t.eq(kernel, ("%s.%s.%s"):format(name, own and "amx" or way, isa))
    end
  end
end
t.test("the kernels of kernels/cpu run where they were measured faster", function()
  ddp.no_grad(function()
    for _, dtype in ipairs { "f32", "high", "bf16", "f16" } do
      runs(case(2, 64, 8, 8, 64, 3, 1, 1), "wino", dtype)
      runs(case(24, 64, 8, 8, 64, 3, 2, 1), dtype == "bf16" and pairs_of_bf16 and "direct" or "wino_s2", dtype)
      runs(case(2, 64, 8, 8, 64, 1), "direct", dtype)
      runs(case(2, 3, 8, 8, 64, 3, 1, 1), "direct", dtype)
      runs(case(2, 64, 4, 4, 64, 3, 1, 1), "direct", dtype) -- two tiles read four times the weights
      runs(case(3, 64, 8, 8, 64, 3, 2, 1), "direct", dtype)
    end
  end)
end)
t.test("depthwise windows have kernels of their own", function()
  ddp.no_grad(function() for _, dtype in ipairs { "f32", "high", "bf16", "f16" } do runs(depthwise(2, 64, 8, 8, 3, 1, 1), "depthwise", dtype) end end)
end)
t.test("exact precision makes each product: no Winograd in f32", function()
  checks.with_precision("exact", ddp.no_grad, function()
    runs(case(2, 64, 8, 8, 64, 3, 1, 1), "direct")
    runs(case(24, 64, 8, 8, 64, 3, 2, 1), "direct")
    runs(case(2, 64, 8, 8, 64, 3, 1, 1), "wino", "bf16")
  end)
end)
t.test("without AMX high precision is f32's, to the bit", function()
  if amx then t.skip "AMX is there" end
  ddp.no_grad(function()
    for _, v in ipairs { case(2, 64, 8, 8, 64, 3, 1, 1), case(2, 33, 7, 7, 15, 5, 2, 1) } do
      for _, name in ipairs(NAMES) do
        local i = inputs(v, "f32")
        t.eq((with_precision("high", PASSES[name], v, i) - PASSES[name](v, i)):abs():max():item(), 0)
      end
    end
  end)
end)
t.test("an unknown precision is refused with what is known", function()
  t.fails(function() ddp.set_float32_matmul_precision "higest" end, "did you mean \"highest\"?")
  t.fails(function() ddp.deterministic(1) end, "expected true or false")
end)
t.test("several groups fall to oneDNN, or to the reference", function()
  ddp.no_grad(function()
    local v = case(4, 64, 16, 16, 64, 3, 1, 1, { groups = 2 })
    PASSES.conv2d(v, inputs(v, "f32"))
    local kernel = checks.last_kernel()
    t.ok(kernel == "conv2d.onednn" or kernel == "conv2d.ref", kernel)
  end)
end)

-- ---- NaN, Inf, threads ----------------------------------------------------------------------------------------------------

for _, bad in ipairs { 0 / 0, math.huge } do
  t.test(("%s in x reaches every result it belongs to, and none two tiles away"):format(tostring(bad)), function()
    ddp.no_grad(function()
      for _, stride in ipairs { 1, 2 } do
        local v = case(1, 32, 16, 16, 32, 3, stride, 1)
        local i = inputs(v, "f32")
        i.x[1]:select(1, 5):select(1, 6):narrow(1, 6, 1):fill_(bad)
        local y = PASSES.conv2d(v, i)
        local finite = (y - y):eq(0)
        local function all_finite(h, w) return finite[1]:select(2, h):select(2, w):float():sum():item() end
        t.eq(all_finite(math.ceil(6 / stride), math.ceil(6 / stride)), 0)
        t.eq(all_finite(16 / stride, 16 / stride), 32)
      end
    end)
  end)
end
t.test("M6 deterministic mode leaves oneDNN out: it shares sums out by threads", function()
  local v = case(4, 64, 16, 16, 64, 3, 1, 1, { groups = 2 })
  local i, a, b = inputs(v, "f32"), ddp.randn(200, 300), ddp.randn(300, 200)
  local function kernels()
    return ddp.no_grad(function()
      ops.matmul(a, b)
      local product = checks.last_kernel()
      PASSES.conv2d(v, i)
      return product .. " " .. checks.last_kernel()
    end)
  end
  ddp.deterministic(true)
  local ok, names = pcall(kernels)
  ddp.deterministic(false)
  t.ok(ok and not names:find "onednn", names)
end)
t.test("M6 one, two and three threads give the same bits in deterministic mode", function()
  local function digest(threads) return checks.digest("tests/ops/test_conv.lua", threads) end
  local one = digest(1)
  t.ok(select(2, one:gsub("\n", "")) == 45, "the digest has " .. select(2, one:gsub("\n", "")) .. " lines")
  t.eq(digest(2), one)
  t.eq(digest(3), one)
end)
t.done()
