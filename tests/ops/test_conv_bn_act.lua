-- test_conv_bn_act.lua -- a convolution, batch norm by running statistics, residual and relu as one op: the kernels of kernels/cpu
-- at odd shapes, in each dtype, against the chain of the four by reference kernels in f64; and which kernel ran.
-- With an argument: prints a digest of the results, for runs with other numbers of threads to compare.
local t = require "harness"
local ddp = require "ddp"
local ops = require "ddp.ops"
local checks = require "op_checks"
local cases = require "conv_cases"
local base = require "ddp.ffi"
local C = base.C
local case, depthwise, isa, amx = cases.case, cases.depthwise, cases.isa, cases.amx

local CASES = {
  case(1, 1, 1, 1, 1, 1), case(2, 1, 3, 3, 3, 3, 1, 1), case(33, 3, 7, 7, 15, 1), case(2, 3, 31, 31, 17, 3, 1, 1), case(1, 3, 31, 31, 33, 7, 2, 3),
  case(2, 15, 7, 7, 33, 3, 2, 1), case(1, 33, 3, 3, 17, 3, 1, 1), case(2, 33, 7, 7, 15, 5, 2, 1), case(33, 17, 7, 7, 33, 1, 2), -- gathered rows
  case(2, 17, 31, 31, 33, 3, 1, 1), case(33, 33, 7, 7, 17, 3, 1, 1), case(1, 17, 31, 3, 33, 3, 1, { 2, 0 }), case(33, 64, 3, 3, 64, 3, 1, 1), -- stride 1
  case(2, 17, 31, 31, 33, 3, 2, 1), case(33, 33, 7, 7, 17, 3, 2), case(33, 64, 7, 7, 96, 3, 2, { 2, 1 }), case(1, 17, 31, 31, 17, 3, 2), -- stride 2
  depthwise(2, 3, 3, 3, 3, 1, 1), depthwise(33, 15, 7, 7, 3, 2, 1), depthwise(1, 33, 31, 31, 5, 1, 2), depthwise(2, 17, 7, 7, { 1, 3 }, 1, { 0, 1 }),
  case(2, 34, 7, 7, 32, 3, 1, 1, { groups = 2 }), case(2, 3, 15, 15, 17, 12, 1, 1), -- no kernel of its own
}

local function with_precision(dtype, ...) return checks.with_precision((dtype == "high" or dtype == "exact") and dtype or "highest", ...) end
-- wide: vectors in f32. As call() wants them.
local function inputs(v, dtype, wide)
  if dtype == "high" or dtype == "exact" then dtype = "f32" end
  ddp.manual_seed(3)
  local function activations(...) return ddp.randn(...):permute(1, 4, 2, 3):to(dtype) end
  local function vector() return ddp.randn(v.k):to(wide and "f32" or dtype) end
  return { x = activations(v.n, v.h, v.w, v.c), w = ddp.randn(v.k, v.c / v.groups, v.r, v.s):to(dtype), conv_bias = vector(), weight = vector(), bias = vector(),
    mean = ddp.randn(v.k), var = ddp.rand(v.k) + 0.5, residual = activations(v.n, v.ho, v.wo, v.k) }
end
local function call(v, i, relu)
  return ops.conv_bn_act(i.x, i.w, i.conv_bias, i.weight, i.bias, i.mean, i.var, i.residual, v.stride, v.padding, v.dilation, v.groups, 1e-3, relu)
end
local function apart(v, i, relu)
  local y = ops.conv2d(i.x, i.w, i.conv_bias, v.stride, v.padding, v.dilation, v.groups)
  y = ops.batch_norm(y, i.weight, i.bias, i.mean, i.var, false, 0.1, 1e-3)
  if i.residual then y = y + i.residual end
  return relu and ops.relu(y) or y
end

if arg[1] == "digest" then
  ddp.deterministic(true)
  for _, v in ipairs { case(33, 16, 31, 31, 33, 3, 1, 1), case(33, 32, 15, 15, 64, 3, 2, 1), case(40, 64, 16, 16, 64, 1), depthwise(33, 64, 31, 31, 3, 1, 1),
    case(33, 34, 15, 15, 32, 3, 1, 1, { groups = 2 }) } do
    for _, dtype in ipairs { "f32", "bf16", "high" } do
      local y, sum = ddp.no_grad(with_precision, dtype, call, v, inputs(v, dtype), true):float():contiguous(), 0
      local n, bits = y:numel(), require "ffi".cast("uint32_t *", y:data())
      for k = 0, n - 1 do sum = (sum * 31 + tonumber(bits[k])) % 4294967291 end
      print(v.name, dtype, sum)
    end
  end
  os.exit(0)
end

-- ---- values ------------------------------------------------------------------------------------------------------------

local LIMIT = { f32 = 2e-5, exact = 4e-6, high = 2e-5, bf16 = 2 ^ -8, f16 = 2 ^ -10 } -- of the largest value
local function in_f64(i)
  local wide = {}
  for key, x in pairs(i) do wide[key] = x:to "f64" end
  return wide
end
local function by_reference(...)
  base.check(C.ddp__kernels_only "ref")
  local ok, y = pcall(apart, ...)
  C.ddp__kernels_only(nil)
  t.ok(ok, y)
  return y
end
local function equals_chain(v, dtype, i, relu)
  local y = with_precision(dtype, call, v, i, relu)
  local kernel = checks.last_kernel()
  local want = by_reference(v, in_f64(i), relu)
  t.eq({ y:dtype(), y:size() }, { i.x:dtype(), want:size() })
  local worst, largest = (y:to "f64" - want):abs():max():item(), math.max(want:abs():max():item(), 1e-30)
  t.ok(worst / largest <= LIMIT[dtype], ("%s is off by %.2g of the largest value"):format(kernel, worst / largest))
end

for _, v in ipairs(CASES) do
  for _, dtype in ipairs { "f32", "exact", "high", "bf16", "f16" } do
    t.test(("%s in %s equals the chain"):format(v.name, dtype), function()
      ddp.no_grad(function()
        local i = inputs(v, dtype)
        equals_chain(v, dtype, i, true)
        local bare = inputs(v, dtype, true)
        bare.residual, bare.conv_bias = nil, nil
        equals_chain(v, dtype, bare, false)
        bare.weight, bare.bias = nil, nil
        equals_chain(v, dtype, bare, true)
      end)
    end)
  end
end

-- ---- the choice ---------------------------------------------------------------------------------------------------------

-- One shape for each kernel; the kernel it has in that dtype.
local SHAPES = { wino = case(2, 32, 16, 16, 48, 3, 1, 1), wino_s2 = case(8, 32, 16, 16, 48, 3, 2, 1),
  direct = case(2, 32, 8, 8, 48, 1), depthwise = depthwise(2, 48, 8, 8, 3, 1, 1) }
local WAYS = { "wino", "wino_s2", "direct", "depthwise" }
local function kernel_of(way, dtype)
  if way == "depthwise" then return "conv_bn_act.depthwise." .. isa end
  if isa == "v2" then return nil end -- without AVX2: conv2d's kernel and a pass
  if amx and (dtype == "bf16" or dtype == "high") then way = "amx"
  elseif way == "wino_s2" and dtype == "bf16" and cases.pairs_of_bf16 then way = "direct" end
  return ("conv_bn_act.%s.%s"):format(way, isa)
end
t.test("each kernel of a convolution takes what follows it too", function()
  ddp.no_grad(function()
    for _, way in ipairs(WAYS) do
      for _, dtype in ipairs { "f32", "high", "bf16", "f16" } do
        with_precision(dtype, call, SHAPES[way], inputs(SHAPES[way], dtype), true)
        local want = kernel_of(way, dtype)
        if want then t.eq(checks.last_kernel(), want) else t.ok(checks.last_kernel():find "^conv2d", checks.last_kernel()) end
      end
    end
  end)
end)
t.test("what none takes (groups, a residual or an image laid out otherwise) is conv2d's, and a pass over it", function()
  ddp.no_grad(function()
    for _, dtype in ipairs { "f32", "bf16", "f16" } do
      local v = SHAPES.wino
      local i = inputs(v, dtype)
      i.residual = i.residual:contiguous()
      equals_chain(v, dtype, i, true)
      call(v, i, true)
      t.ok(checks.last_kernel():find "^conv2d%.", checks.last_kernel())
      i.x = i.x:contiguous()
      equals_chain(v, dtype, i, true)
      i.weight = ddp.randn(v.k, 3):to(dtype):select(2, 2)
      equals_chain(v, dtype, i, false)
    end
  end)
end)

-- ---- NaN, Inf -------------------------------------------------------------------------------------------------------------

local function all(y) return y:float():amin():item() == 1 end
for _, dtype in ipairs { "f32", "bf16" } do
  t.test("NaN and Inf come through in " .. dtype .. ", by every kernel", function()
    ddp.no_grad(function()
      for _, way in ipairs(WAYS) do
        local v = SHAPES[way]
        local i = inputs(v, dtype)
        local clean = call(v, i, true)
        local h, w = math.floor(v.ho / 2), math.floor(v.wo / 2)
        local function at(x) return x:select(4, w):select(3, h) end
        local function same_elsewhere(y, keep)
          local differs = y:ne(clean):float():sum():item()
          t.ok(differs <= keep, way .. ": " .. differs .. " places differ")
        end
        local place = at(i.residual)[1]:narrow(1, 5, 1)
        for _, bad in ipairs { 0 / 0, math.huge, -math.huge } do
          local before = place:clone()
          place:fill_(bad)
          local y = call(v, i, true)
          local got = at(y)[1][5]:item()
          if bad ~= bad then t.ok(got ~= got, way) else t.eq(got, math.max(bad, 0)) end
          same_elsewhere(y, 1)
          place:copy_(before)
        end
        i.var:narrow(1, 3, 1):fill_(0 / 0)
        local y = call(v, i, true)
        t.ok(all(y:select(2, 3):ne(y:select(2, 3))), way .. ": a channel without a variance")
        same_elsewhere(y, v.n * v.ho * v.wo)
        i.var:narrow(1, 3, 1):fill_(1)
        i.x[1]:select(3, v.stride[2] * (w - 1) + 1):select(2, v.stride[1] * (h - 1) + 1):fill_(0 / 0)
        y = at(call(v, i, true))[1]
        t.ok(all(y:ne(y)), way .. ": NaN in x")
      end
    end)
  end)
end
t.test("M6 one, two and three threads give the same bits", function()
  local function digest(threads) return checks.digest("tests/ops/test_conv_bn_act.lua", threads) end
  local one = digest(1)
  t.eq(select(2, one:gsub("\n", "")), 15)
  t.eq(digest(2), one)
  t.eq(digest(3), one)
end)
t.done()
