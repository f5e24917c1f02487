-- test_conv.lua -- convolutions on the GPU by cuDNN (its double), against the reference in f64 on the CPU: shapes, dtypes, layouts,
-- attributes, empty batches, and conv_bn_act in all that may be absent. DDP_DOUBLE_PROFILE says which GPU cuDNN is asked for.
local t = require "harness"
local checks = require "op_checks"
local cases = require "conv_cases"
local ddp = require "ddp"
local ops = require "ddp.ops"
local base = require "ddp.ffi"
local C = base.C
local case, depthwise = cases.case, cases.depthwise
local t4 = os.getenv "DDP_DOUBLE_PROFILE" == "t4"

local TOL = { f32 = 2e-5, f64 = 1e-12, f16 = 2 ^ -9, bf16 = 2 ^ -6 } -- of the largest value
local CASES = {
  case(2, 3, 5, 5, 4, 3), case(1, 2, 6, 5, 3, { 3, 2 }, 2, { 1, 0 }), case(1, 4, 5, 5, 6, 2, 1, 1, { groups = 2 }), case(2, 16, 8, 8, 16, 1), case(2, 16, 9, 9, 32, 1, 2),
  case(1, 1, 1, 1, 1, 1), case(1, 3, 18, 20, 8, 7, 2, 3), case(2, 17, 7, 8, 33, 3, 2, 1), case(2, 3, 9, 8, 5, 3, 1, 2, { dilation = { 2, 2 } }), case(2, 16, 8, 8, 16, 3, 1, 1),
  depthwise(2, 8, 6, 6, 3, 1, 1),
}

local function on(list, fn, ...)
  base.check(C.ddp__kernels_only(list))
  local r = { pcall(fn, ...) }
  local kernel = checks.last_kernel()
  C.ddp__kernels_only(nil)
  if not r[1] then error(r[2], 0) end
  return r[2], kernel
end

local LAYOUTS = {
  ["channels-last"] = function(x) return x:dim() == 4 and x:permute(1, 3, 4, 2):contiguous():to("cuda"):permute(1, 4, 2, 3) or x:to "cuda" end,
  ["row-major"] = function(x) return x:contiguous():to "cuda" end,
  ["every second"] = function(x) -- no layout that cuDNN takes
    local size, n = x:size(), x:dim()
    size[n] = size[n] * 2
    local big = ddp.full(size, 77, { dtype = x:dtype() })
    big:slice(n, 1, size[n], 2):copy_(x)
    return big:to("cuda"):slice(n, 1, size[n], 2)
  end,
  ["off by one"] = function(x) -- a pointer that is no multiple of 16
    local big = ddp.full({ x:numel() + 1 }, 77, { dtype = x:dtype() })
    big:slice(1, 2, x:numel() + 1):copy_(x:reshape(x:numel()))
    return big:to("cuda"):slice(1, 2, x:numel() + 1):reshape(x:size())
  end,
}

local function near(got, want, dtype, what)
  local off = (got:to("cpu"):to "f64" - want):abs():max():item()
  local most = TOL[dtype] * math.max(1, want:abs():max():item())
  if not (off <= most) then error(("%s: off by %g, at most %g"):format(what, off, most), 2) end
end

-- op(inputs..., args...) on the GPU against the reference.
local function agree(op, inputs, args, dtype, layout, what)
  local here, there, n = {}, {}, #inputs
  for i = 1, n do
    here[i] = inputs[i] and inputs[i]:to "f64" or nil
    there[i] = inputs[i] and LAYOUTS[layout](inputs[i]) or nil
  end
  for i, a in ipairs(args) do here[n + i], there[n + i] = a, a end
  local want = on("ref", op, unpack(here, 1, n + #args))
  local got, kernel = on("cudnn", op, unpack(there, 1, n + #args))
  t.ok(kernel:find(".cudnn", 1, true), kernel .. " ran")
  near(got, want, dtype, what .. ", " .. layout)
  return kernel
end

local function random(size, dtype) return ddp.randn(size):to(dtype) end
local function window(v) return { v.stride, v.padding, v.dilation, v.groups } end
local function sized(size, v)
  local args = window(v)
  table.insert(args, 1, size)
  return args
end

local function all_layouts(dtype, k, fn)
  for layout in pairs(LAYOUTS) do if layout == "channels-last" or (dtype == "f32" or dtype == "bf16") and k <= 4 then fn(layout) end end
end

for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
  t.test("cuDNN: conv2d and its gradients in " .. dtype .. ": every shape and layout agrees with the reference", function()
    ddp.manual_seed(5)
    for k, v in ipairs(CASES) do
      local x, w = random({ v.n, v.c, v.h, v.w }, dtype), random({ v.k, v.c / v.groups, v.r, v.s }, dtype)
      local g, bias = random({ v.n, v.k, v.ho, v.wo }, dtype), random({ v.k }, dtype)
      all_layouts(dtype, k, function(layout)
        agree(ops.conv2d, { x, w, false }, window(v), dtype, layout, v.name)
        agree(ops.conv2d, { x, w, bias }, window(v), dtype, layout, v.name .. " with a bias")
        agree(ops.conv2d_grad_input, { g, w }, sized(x:size(), v), dtype, layout, v.name .. ", gradient of x")
        agree(ops.conv2d_grad_weight, { g, x }, sized(w:size(), v), dtype, layout, v.name .. ", gradient of w")
      end)
    end
  end)
end

t.test("cuDNN: a gradient that is one number everywhere (strides of 0)", function()
  local x, w = random({ 2, 3, 6, 6 }, "f32"), random({ 4, 3, 3, 3 }, "f32")
  local function grads(device)
    local a, b = x:to(device):detach(), w:to(device):detach()
    a:requires_grad_()
    b:requires_grad_()
    ops.conv2d(a, b):sum():backward()
    return a.grad:to "cpu", b.grad:to "cpu"
  end
  local ax, aw = grads "cuda"
  local bx, bw = grads "cpu"
  near(ax, bx:to "f64", "f32", "x")
  near(aw, bw:to "f64", "f32", "w")
end)

t.test("cuDNN: an empty batch gives an empty result, and zeros for w's gradient", function()
  local x, w = ddp.randn({ 0, 3, 6, 6 }):to "cuda", random({ 4, 3, 3, 3 }, "f32"):to "cuda"
  t.eq(ops.conv2d(x, w):size(), { 0, 4, 4, 4 })
  t.eq(ops.conv2d_grad_input(ddp.randn({ 0, 4, 4, 4 }):to "cuda", w, { 0, 3, 6, 6 }):size(), { 0, 3, 6, 6 })
  local dw = ops.conv2d_grad_weight(ddp.randn({ 0, 4, 4, 4 }):to "cuda", x, { 4, 3, 3, 3 })
  t.eq(dw:abs():sum():item(), 0)
end)

-- ---- conv_bn_act --------------------------------------------------------------------------------------------------------

local function norm_inputs(v, dtype, wide, bare, residual)
  local vector = function() return random({ v.k }, wide and dtype ~= "f64" and "f32" or dtype) end
  local statistics = dtype == "f64" and "f64" or "f32"
  return { random({ v.n, v.c, v.h, v.w }, dtype), random({ v.k, v.c / v.groups, v.r, v.s }, dtype), not bare and vector(), not bare and vector(), not bare and vector(),
    random({ v.k }, statistics), (ddp.rand({ v.k }) + 0.5):to(statistics), residual and random({ v.n, v.k, v.ho, v.wo }, dtype) }
end

local SOME = { CASES[1], CASES[3], CASES[8], CASES[10] }
for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
  t.test("cuDNN: conv_bn_act in " .. dtype .. ": with and without vectors, residual and relu", function()
    ddp.manual_seed(6)
    for k, v in ipairs(SOME) do
      for more = 0, 3 do
        local args = window(v)
        args[5], args[6] = 1e-3, more >= 2
        local inputs = norm_inputs(v, dtype, k % 2 == 0, k == 1 and more == 0, more % 2 == 1)
        local layout = k == 1 and more == 3 and "every second" or k == 3 and "row-major" or "channels-last"
        local kernel = agree(ops.conv_bn_act, inputs, args, dtype, layout, v.name)
        local way = dtype == "f64" and "_steps" or t4 and dtype == "bf16" and "_wide" or ""
        if not (t4 and dtype == "f16") then t.eq(kernel, "conv_bn_act.cudnn" .. way, v.name) end -- a T4 has engines for some of f16
      end
    end
  end)
end

if t4 then
  t.test("cuDNN: bf16 on a GPU without it is computed in f32", function()
    local _, kernel = on("cudnn", ops.conv2d, random({ 1, 8, 6, 6 }, "bf16"):to "cuda", random({ 8, 8, 3, 3 }, "bf16"):to "cuda")
    t.eq(kernel, "conv2d.cudnn_wide")
  end)
end

t.test("cuDNN: f32 is not multiplied as TF32 unless precision is high", function()
  -- 1 + 2^-12 is 1 in TF32: cuDNN's engines are told apart by their notes, and the double computes them all exactly
  local x, w = random({ 2, 16, 8, 8 }, "f32"), random({ 16, 16, 3, 3 }, "f32")
  for _, precision in ipairs { "exact", "highest", "high" } do
    checks.with_precision(precision, function() agree(ops.conv2d, { x, w, false }, { 1, 1, 1, 1 }, "f32", "channels-last", precision) end)
  end
end)

t.done()
