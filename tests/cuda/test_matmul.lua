-- test_matmul.lua -- products on the GPU, by cuBLAS and by our own kernels, against the reference on the CPU.
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local ddp = require "ddp"
local base = require "ddp.ffi"
local C = base.C

local TOL = { f32 = 2e-5, f64 = 1e-12, f16 = 2e-5, bf16 = 2e-5 }
local MANY = { f32 = true, bf16 = true, i32 = true } -- of these every layout
local lists = { "cuda", "cublas" }

-- The same values on the GPU, laid out otherwise.
local LAYOUTS = {
  plain = function(x) return x:to "cuda" end,
  transposed = function(x)
    local n = x:dim()
    return n < 2 and x:to "cuda" or x:transpose(n - 1, n):contiguous():to("cuda"):transpose(n - 1, n)
  end,
  ["batches inside"] = function(x) -- rows of one batch lie apart: heads of attention
    return x:dim() < 3 and x:to "cuda" or x:transpose(x:dim() - 2, x:dim() - 1):contiguous():to("cuda"):transpose(x:dim() - 2, x:dim() - 1)
  end,
  ["every second"] = function(x) -- no unit stride
    local size, n = x:size(), x:dim()
    size[n] = size[n] * 2 + 1
    local big = ddp.full(size, 77, { dtype = x:dtype() })
    big:slice(n, 2, 2 * x:size(n), 2):copy_(x)
    return big:to("cuda"):slice(n, 2, 2 * x:size(n), 2)
  end,
  ["off by one"] = function(x) -- not aligned
    local size = x:size()
    local big = ddp.full({ x:numel() + 1 }, 77, { dtype = x:dtype() })
    big:slice(1, 2, x:numel() + 1):copy_(x:reshape(x:numel()))
    return big:to("cuda"):slice(1, 2, x:numel() + 1):reshape(size)
  end,
}

local function on(list, fn, ...)
  base.check(C.ddp__kernels_only(list))
  local r = { pcall(fn, ...) }
  local kernel = checks.last_kernel()
  C.ddp__kernels_only(nil)
  if not r[1] then error(r[2], 0) end
  return { unpack(r, 2) }, kernel
end

local function home(results)
  for i, y in ipairs(results) do results[i] = y:to "cpu" end
  return results
end

-- op(inputs..., args...) by one list on the GPU against the reference in f64 on the CPU.
local function agree(list, op, inputs, args, layout, what, tol)
  local there, here = {}, {}
  for i, x in ipairs(inputs) do
    local tensor = ddp.is_tensor(x)
    there[i] = tensor and LAYOUTS[layout](x) or nil
    here[i] = tensor and (TOL[x:dtype()] and x:to "f64" or x) or nil
  end
  local n = #inputs
  for i, a in ipairs(args or {}) do there[n + i], here[n + i] = a, a end
  n = n + #(args or {})
  local want = on("ref", op, unpack(here, 1, n))
  local got, kernel = on(list, op, unpack(there, 1, n))
  t.ok(kernel:find("." .. list, 1, true), kernel .. " ran, expected one of " .. list)
  checks.compare_rounded(home(got), want, tol or TOL[inputs[1]:dtype()] or 0, what .. ", " .. layout)
end

local SHAPES = {
  { { 1, 1 }, { 1, 1 } }, { { 3 }, { 3 } }, { { 3 }, { 3, 5 } }, { { 4, 3 }, { 3 } }, { { 63, 17 }, { 17, 65 } }, { { 64, 16 }, { 16, 64 } }, { { 130, 70 }, { 70, 33 } },
  { { 1, 200 }, { 200, 300 } }, { { 300, 200 }, { 200, 1 } }, { { 5, 4, 3 }, { 3, 8 } }, { { 5, 4, 8 }, { 5, 8, 4 } }, { { 2, 3, 4, 8 }, { 2, 3, 8, 16 } },
  { { 2, 1, 4, 8 }, { 3, 8, 8 } }, { { 3, 8, 8 }, { 2, 1, 8, 8 } }, { { 8, 8 }, { 3, 8, 8 } }, { { 2, 3, 8 }, { 8 } }, { { 8 }, { 2, 8, 4 } },
  { { 2, 1, 3, 5, 8 }, { 4, 1, 8, 6 } },
  { { 2, 0 }, { 0, 3 } }, { { 0, 2 }, { 2, 3 } }, { { 2, 0, 4 }, { 4, 3 } }, { { 2, 3, 0 }, { 2, 0, 2 } },
}
local function text(s) return "[" .. table.concat(s, ",") .. "]" end

local function random(size, dtype)
  if dtype == "i64" or dtype == "i32" then return ddp.randint(-100000, 100000, size):to(dtype) end
  if dtype == "u8" then return ddp.randint(0, 256, size):to(dtype) end
  return ddp.randn(size, { dtype = "f64" }):to(dtype)
end

local function have_cublas()
  local y = ops.matmul(ddp.randn({ 2, 2 }):to "cuda", ddp.randn({ 2, 2 }):to "cuda")
  return y and checks.last_kernel() == "matmul.cublas"
end
local function need(list) if list == "cublas" and not have_cublas() then t.skip "no cuBLAS among these libraries" end end

for _, list in ipairs(lists) do
  for _, dtype in ipairs { "f32", "f64", "f16", "bf16", "i64", "i32", "u8" } do
    local float = TOL[dtype] ~= nil
    if float or list == "cuda" then
      t.test(("matmul by %s in %s: every shape and layout agrees with the reference"):format(list, dtype), function()
        need(list)
        ddp.manual_seed(3)
        for _, s in ipairs(SHAPES) do
          local a, b = random(s[1], dtype), random(s[2], dtype)
          for layout in pairs(LAYOUTS) do
            if layout == "plain" or MANY[dtype] and a:numel() * b:numel() > 0 then agree(list, ops.matmul, { a, b }, nil, layout, text(s[1]) .. " x " .. text(s[2])) end
          end
        end
      end)
    end
    if float then
      t.test(("linear and linear_act by %s in %s: bias, residual, every act, kept sums, rounded once"):format(list, dtype), function()
        need(list)
        ddp.manual_seed(4)
        for _, s in ipairs { { { 4, 3 }, 2 }, { { 3 }, 8 }, { { 2, 5, 16 }, 8 }, { { 70, 40 }, 65 }, { { 33, 24 }, 128 }, { { 3, 0 }, 8 }, { { 0, 3 }, 4 } } do
          local k, size = s[1][#s[1]], { unpack(s[1]) }
          size[#size] = s[2]
          local x, w, bias, residual = random(s[1], dtype), random({ s[2], k }, dtype), random({ s[2] }, dtype), random(size, dtype)
          local inputs = {}
          for i = 0, 3 do inputs[i] = { x, w, i % 2 == 1 and bias, i >= 2 and residual } end
          for i = 0, 3 do
            if i < 2 then agree(list, ops.linear, { x, w, inputs[i][3] }, nil, "plain", "linear " .. text(s[1])) end
            for act = 0, 3 do agree(list, ops.linear_act, inputs[i], { act, true }, "plain", ("linear_act %s act %d"):format(text(s[1]), act)) end
            agree(list, ops.linear_act, inputs[i], { 2, false }, "plain", "linear_act without its sums " .. text(s[1]))
          end
          if x:numel() * w:numel() > 0 then
            for layout in pairs(LAYOUTS) do
              agree(list, ops.linear, { x, w, bias }, nil, layout, "linear " .. text(s[1]))
              agree(list, ops.linear_act, inputs[3], { 3, true }, layout, "linear_act " .. text(s[1]))
            end
          end
        end
      end)
    end
  end

  t.test("by " .. list .. ": NaN and Inf go where the reference has them, and nothing beside a matrix is read", function()
    need(list)
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      local a, b = random({ 5, 7 }, "f32"), random({ 7, 3 }, "f32")
      a:narrow(1, 2, 1):narrow(2, 3, 1):fill_(0 / 0)
      b:narrow(1, 1, 1):narrow(2, 2, 1):fill_(1 / 0)
      a, b = a:to(dtype), b:to(dtype)
      for _, layout in ipairs { "plain", "every second", "transposed" } do agree(list, ops.matmul, { a, b }, nil, layout, dtype) end
      local big = ddp.full({ 7, 9 }, 0 / 0, { dtype = dtype })
      local inside = big:narrow(1, 2, 5):narrow(2, 2, 7)
      inside:copy_(random({ 5, 7 }, dtype))
      local got = on(list, ops.matmul, big:to("cuda"):narrow(1, 2, 5):narrow(2, 2, 7), random({ 7, 4 }, dtype):to "cuda")
      checks.finite(home(got), dtype)
    end
  end)
end

-- What a process of its own prints that runs `script` under these settings; errors too.
local function child(settings, script)
  local pipe = io.popen(("%s luajit -e '%s' 2>&1"):format(settings, script))
  local out = pipe:read "*a"
  pipe:close()
  return out
end
t.test("cuBLAS's errors name the op, cuBLAS's text, dtype and shapes", function()
  need "cublas"
  for _, case in ipairs {
    { "ops.matmul(a, a:transpose(1, 2))", "cublasGemmEx:1:15", "matmul: cublasGemmEx: status 15, CUBLAS_STATUS_NOT_SUPPORTED (f32 of [6,8] and [8,6], result [6,6])" },
    { "ops.linear(a, a)", "cublasGemmEx:1:13", "linear: cublasGemmEx: status 13" },
    { "ops.matmul(a:reshape(2, 3, 8), a:reshape(2, 8, 3))", "cublasGemmStridedBatchedEx:1:14", "matmul: cublasGemmStridedBatchedEx: status 14" },
    { "ops.matmul(a, a:transpose(1, 2))", "cublasCreate_v2:1:1", "matmul: cublasCreate: status 1" },
    { "ops.matmul(a, a:transpose(1, 2))", "cublasSetWorkspace_v2:1:7", "matmul: cublasSetWorkspace: status 7" } } do
    local out = child("DDP_DOUBLE_FAIL=" .. case[2], ('local ddp = require "ddp"; local ops = require "ddp.ops"; local a = ddp.randn({ 6, 8 }):to "cuda"; %s'):format(case[1]))
    t.ok(out:find(case[3], 1, true), out)
  end
end)

t.test("the precision of f32 products is what cuBLAS is asked for", function()
  need "cublas"
  local a, b = ddp.randn({ 64, 256 }), ddp.randn({ 256, 64 })
  local want = ops.matmul(a:to "f64", b:to "f64")
  local function off(precision)
    local y = checks.with_precision(precision, function() return ops.matmul(a:to "cuda", b:to "cuda"):to("cpu"):to("f64") end)
    return (y - want):abs():max():item() / want:abs():max():item()
  end
  t.ok(off "exact" < 2e-6 and off "highest" < 2e-6, "f32 products are off by " .. off "exact" .. " and " .. off "highest")
  t.ok(off "high" > 1e-5 and off "high" < 2e-3, "TF32 products are off by " .. off "high")
end)

t.test("gradients of linear and matmul on the GPU are those of the CPU", function()
  local function grads(device)
    ddp.manual_seed(6)
    local x, w, b = ddp.randn({ 6, 5, 12 }):to(device), ddp.randn({ 8, 12 }):to(device), ddp.randn({ 8 }):to(device)
    for _, p in ipairs { x, w, b } do p:requires_grad_(true) end
    return ddp.grad({ (ops.linear_act(ops.linear(x, w, b), w:transpose(1, 2), nil, x, 2, true) * 0.5):sum() }, { x, w, b })
  end
  local ok, got = pcall(grads, "cuda")
  if not ok and tostring(got):find("no kernel", 1, true) then t.skip(tostring(got)) end
  if not ok then error(got, 0) end
  checks.compare(home(got), grads "cpu", 2e-5, "gradients")
end)

t.done()
