-- samples.lua -- for every op of ops.def: valid, edge and must-fail inputs. inputs: see op_checks.lua; args follow them.
-- value: plain Lua arithmetic, element by element (elementwise) or over flat lists (list_value).
local S = {}
local inf = math.huge

-- ---- elementwise ----------------------------------------------------------------------------------------------
local function binary(value, kind, more)
  local s = { value = value, samples = {
    { inputs = { { 2, 3, kind = kind }, { 2, 3, kind = kind } } }, { inputs = { { 2, 3, kind = kind }, { 3, kind = kind } } },
    { inputs = { { 2, 1, 4, kind = kind }, { 3, 1, kind = kind } } }, { inputs = { { kind = kind }, { 2, kind = kind } } },
    { inputs = { { 0, 3, kind = kind }, { 3, kind = kind } } }, { inputs = { { 33, kind = kind }, { 33, kind = kind } } } },
    fail = { { inputs = { { 2, 3 }, { 4 } }, text = "shapes do not broadcast" } } }
  for k, v in pairs(more or {}) do s[k] = v end
  return s
end
S.add = binary(function(a, b) return a + b end)
S.sub = binary(function(a, b) return a - b end)
S.mul = binary(function(a, b) return a * b end)
S.div = binary(function(a, b) return a / b end, "positive")
S.pow = binary(function(a, b) return a ^ b end, "positive")
S.maximum = binary(function(a, b) return math.max(a, b) end)
S.minimum = binary(function(a, b) return math.min(a, b) end)
local function truth(f) return binary(function(a, b) return f(a, b) and 1 or 0 end, "int") end
S.eq = truth(function(a, b) return a == b end)
S.ne = truth(function(a, b) return a ~= b end)
S.lt = truth(function(a, b) return a < b end)
S.le = truth(function(a, b) return a <= b end)
S.gt = truth(function(a, b) return a > b end)
S.ge = truth(function(a, b) return a >= b end)
S.where = { value = function(c, a, b) return c ~= 0 and a or b end,
  samples = { { inputs = { { 2, 3, kind = "bool" }, { 2, 3 }, { 3 } } }, { inputs = { { 3, kind = "bool" }, { 2, 3 }, { 2, 1 } } } },
  fail = { { inputs = { { 3 }, { 3 }, { 3 } }, text = "cond is f32, expected bool" } } }

local function unary(value, kind, more)
  local s = { value = value, samples = { { inputs = { { 2, 3, kind = kind } } }, { inputs = { { 2, 3, 4, 5, kind = kind } } },
    { inputs = { { kind = kind } } }, { inputs = { { 0, kind = kind } } }, { inputs = { { 37, kind = kind } } } }, fail = {} }
  for k, v in pairs(more or {}) do s[k] = v end
  return s
end
local no_bool = { { inputs = { { 3, kind = "bool" } }, text = "not defined for bool" } }
S.neg = unary(function(x) return -x end, nil, { fail = no_bool })
S.abs = unary(math.abs, "away", { fail = no_bool })
S.sign = unary(function(x) return x > 0 and 1 or x < 0 and -1 or 0 end, "away", { fail = no_bool })
S.exp = unary(math.exp)
S.log = unary(math.log, "positive")
S.sqrt = unary(math.sqrt, "positive")
S.tanh = unary(math.tanh)
S.sigmoid = unary(function(x) return 1 / (1 + math.exp(-x)) end)
S.relu = unary(function(x) return math.max(x, 0) end, "away", { fail = no_bool })
S.relu_grad = { value = function(g, y) return y > 0 and g or 0 end, samples = { { inputs = { { 2, 3 }, { 2, 3, kind = "away" } }, constant = { [2] = true } } },
  fail = { { inputs = { { 3 }, { 4 } }, text = "g is [3], y [4]" } } }
S.clamp = { value = function(x, lo, hi) return math.min(math.max(x, lo), hi) end,
  samples = { { inputs = { { 3, 4 } }, args = { -0.5, 0.7 } }, { inputs = { { 5 } }, args = { -inf, 0.2 } } },
  fail = { { inputs = { { 3 } }, args = { 0 / 0, 1 }, text = "a bound is NaN" } } }
S.cast = { samples = { { inputs = { { 2, 3 } }, args = { "f64" } }, { inputs = { { 37 } }, args = { "bf16" }, no_grad = true }, { inputs = { { 37 } }, args = { "f16" }, no_grad = true },
  { inputs = { { 37 } }, args = { "i32" }, no_grad = true }, { inputs = { { 37 } }, args = { "bool" }, no_grad = true }, { inputs = { { 2, 3, kind = "int" } }, args = { "f32" }, no_grad = true } },
  fail = { { inputs = { { 3 } }, args = { "f31" }, text = "no dtype \"f31\"" } } }
S.clone = { value = function(x) return x end, samples = { { inputs = { { 16, 17 } }, no_grad = true }, { inputs = { { 33, 15 } }, no_grad = true }, { inputs = { { 1000, 33 } }, no_grad = true },
  { inputs = { { 1, 1000 } }, no_grad = true }, { inputs = { { 2, 17, 5, 33 } }, no_grad = true }, { inputs = { { 40, 37 } }, no_grad = true }, { inputs = { { 2, 3 } } }, { inputs = { { 2, 3, 4, 5 } }, args = { true } } }, fail = {} }
S.copy_ = { samples = { { inputs = { { 2, 3 }, { 3 } }, no_grad = true } }, fail = { { inputs = { { 3 }, { 2, 3 } }, text = "does not broadcast to dst [3]" } } }
S.fill_ = { samples = { { inputs = { { 2, 3 } }, args = { 1.5 }, no_grad = true } }, fail = {} }

-- ---- reductions ---------------------------------------------------------------------------------------------------
local function reduction(kind, empty_text)
  return { samples = { { inputs = { { 2, 3, kind = kind } } }, { inputs = { { 2, 3, 4, kind = kind } }, args = { 2 } },
    { inputs = { { 2, 3, 4, kind = kind } }, args = { { 1, 3 }, true } }, { inputs = { { 5, 7, 2, 3, kind = kind } }, args = { { 1, 3, 4 } } },
    { inputs = { { kind = kind } } }, { inputs = { { 300, 3, kind = kind } }, args = { 1 }, no_grad = true } },
    fail = { { inputs = { { 2, 3 } }, args = { 3 }, text = "dim 2 of a tensor of 2 dims" }, { inputs = { { 2, 3 } }, args = { { 1, 1 } }, text = "named twice" },
      empty_text and { inputs = { { 0 } }, text = empty_text } or nil } }
end
S.sum = reduction()
S.mean = reduction()
S.mean.fail[#S.mean.fail + 1] = { inputs = { { 3, kind = "int" } }, text = "expected a floating dtype" }
S.amax = reduction("distinct", "nothing to compare")
S.amin = reduction("distinct", "nothing to compare")
S.max_dim = { samples = { { inputs = { { 2, 3, kind = "distinct" } }, args = { 2 } }, { inputs = { { 4, 3, 2, kind = "distinct" } }, args = { 1, true } } },
  fail = { { inputs = { { 2, 0 } }, args = { 2 }, text = "is empty" } } }
S.argmax = { samples = { { inputs = { { 2, 5, kind = "distinct" } } }, { inputs = { { 3, 4, kind = "distinct" } }, args = { 1, true } } },
  fail = { { inputs = { { 2, 0 } }, text = "nothing to compare" } } }
-- Around the widths of vectors, on either side, most values several times.
for _, n in ipairs { 1, 15, 16, 17, 33, 1000 } do
  for _, shape in ipairs { { 3, n }, { n, 3 }, { n, 17 }, { 2, n, 33 } } do
    shape.kind = "tied"
    for dim = 1, #shape do
      local along = { inputs = { shape }, args = { dim }, no_grad = true }
      for _, name in ipairs { "sum", "amax", "amin", "max_dim", "argmax" } do table.insert(S[name].samples, along) end
    end
  end
end

-- ---- products --------------------------------------------------------------------------------------------------------
local function product(a, b, m, k, n)
  local x, y, out = a:contiguous():reshape(m * k):tolist(), b:contiguous():reshape(k * n):tolist(), {}
  for i = 0, m - 1 do
    for j = 0, n - 1 do
      local s = 0
      for l = 0, k - 1 do s = s + x[i * k + l + 1] * y[l * n + j + 1] end
      out[#out + 1] = s
    end
  end
  return out
end
S.matmul = { samples = { { inputs = { { 2, 3 }, { 3, 4 } }, list_value = function(a, b) return product(a, b, 2, 3, 4) end }, { inputs = { { 3 }, { 3 } } },
  { inputs = { { 2, 3 }, { 3 } } }, { inputs = { { 3 }, { 3, 2 } } }, { inputs = { { 2, 2, 3 }, { 2, 3, 2 } } }, { inputs = { { 2, 2, 3 }, { 3, 2 } } },
  { inputs = { { 2, 1, 2, 3 }, { 3, 3, 2 } } }, { inputs = { { 2, 0 }, { 0, 3 } }, no_grad = true }, { inputs = { { 65, 33 }, { 33, 47 } }, no_grad = true },
  { inputs = { { 4, 70, 90 }, { 4, 90, 60 } }, no_grad = true }, { inputs = { { 130, 140 }, { 140, 150 } }, no_grad = true } },
  fail = { { inputs = { { 2, 3 }, { 4, 2 } }, text = "inner sizes 3 and 4 differ" }, { inputs = { {}, { 2 } }, text = "at least 1 dim" },
    { inputs = { { 2, 3, kind = "int" }, { 3, 2 } }, text = "a is i64, b f32" } } }
S.linear = { samples = { { inputs = { { 4, 3 }, { 2, 3 }, { 2 } } }, { inputs = { { 2, 4, 3 }, { 2, 3 }, false } }, { inputs = { { 3 }, { 2, 3 }, { 2 } } },
  { inputs = { { 32, 10 }, { 100, 10 }, { 100 } }, no_grad = true }, { inputs = { { 128, 90 }, { 120, 90 }, { 120 } }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 2, 4 }, false }, text = "the last size of x must be 4" }, { inputs = { { 4, 3 }, { 2, 3 }, { 3 } }, text = "bias is [3]" } } }
S.linear_act = { samples = { { inputs = { { 4, 3 }, { 2, 3 }, { 2 }, false } }, { inputs = { { 4, 3 }, { 2, 3 }, { 2 }, { 4, 2 } } }, { inputs = { { 4, 3 }, { 2, 3 }, false, { 4, 2 } }, args = { 1 } },
  { inputs = { { 2, 4, 3 }, { 2, 3 }, false, false }, args = { 1 } }, { inputs = { { 3 }, { 2, 3 }, { 2 }, { 2 } }, args = { 2 } }, { inputs = { { 0, 3 }, { 2, 3 }, { 2 }, false }, args = { 2 } } }, fail = {
  { inputs = { { 4, 3 }, { 2, 4 }, false, false }, text = "linear_act: w is [2,4], x [4,3]: the last size of x must be 4" }, { inputs = { { 4, 3 }, { 2, 3 }, false, { 4, 3 } }, text = "residual is [4,3], the result [4,2]" },
  { inputs = { { 4, 3 }, { 2, 3 }, false, { 4, 2, dtype = "f64" } }, text = "residual is f64, expected f32" }, { inputs = { { 4, 3 }, { 2, 3 }, false, false }, args = { 4 }, text = "act is 4, expected 0 to 3" } } }
for act = 0, 3 do
  for _, save in ipairs { true, false } do
    table.insert(S.linear_act.samples, { inputs = { { 5, 3 }, { 4, 3 }, { 4 }, false }, args = { act, save } })
    table.insert(S.linear_act.samples, { inputs = { { 2, 3, 3 }, { 4, 3 }, { 4 }, { 2, 3, 4 } }, args = { act, save } })
  end
  -- Around the sizes of tiles, on either side; the last with rows and columns for several threads.
  for _, n in ipairs { { 1, 17, 33 }, { 13, 32, 31 }, { 65, 33, 47 }, { 97, 70, 129 }, { 130, 90, 600 } } do
    table.insert(S.linear_act.samples, { inputs = { { n[1], n[2] }, { n[3], n[2] }, { n[3] }, act % 2 == 0 and { n[1], n[3] } or false }, args = { act }, no_grad = true })
  end
end
S.linear_act_grad = { samples = { { inputs = { { 70, 37 }, { 70, 37, kind = "away" } }, args = { 1 }, no_grad = true }, { inputs = { { 3, 1100 }, { 3, 1100 } }, args = { 2 }, no_grad = true }, { inputs = { { 5, 500, 7 }, { 5, 500, 7 } }, args = { 3 }, no_grad = true },
  { inputs = { { 3, 2 }, { 3, 2, kind = "away" } }, args = { 1 }, constant = { [2] = true } }, { inputs = { { 2, 3, 2 }, { 2, 3, 2 } }, args = { 2 } }, { inputs = { { 4 }, { 4 } }, args = { 3 } } },
  fail = { { inputs = { { 3, 2 }, { 2, 3 } }, args = { 1 }, text = "g is [3,2], from [2,3]" }, { inputs = { { 3 }, { 3 } }, args = { 0 }, text = "act is 0, expected 1 to 3" } } }

-- ---- convolution --------------------------------------------------------------------------------------------------------
S.conv2d = { samples = { { inputs = { { 2, 3, 5, 5 }, { 4, 3, 3, 3 }, { 4 } } }, { inputs = { { 1, 2, 6, 5 }, { 3, 2, 3, 2 }, false }, args = { 2, { 1, 0 } } },
  { inputs = { { 1, 4, 5, 5 }, { 6, 2, 2, 2 }, { 6 } }, args = { 1, 1, 1, 2 } }, { inputs = { { 1, 2, 7, 7 }, { 2, 2, 3, 3 }, false }, args = { 1, 2, 2 } },
  { inputs = { { 2, 3, 4, 4 }, { 3, 1, 3, 3 }, false }, args = { 1, 1, 1, 3 } },
  { inputs = { { 4, 16, 16, 16 }, { 32, 16, 3, 3 }, { 32 } }, args = { 1, 1 }, no_grad = true },
  { inputs = { { 4, 17, 15, 16 }, { 32, 17, 3, 3 }, false }, args = { 2, 1 }, no_grad = true },
  { inputs = { { 4, 64, 16, 16 }, { 32, 64, 1, 1 }, false }, args = { 2, 0 }, no_grad = true },
  { inputs = { { 2, 3, 32, 32 }, { 32, 3, 7, 7 }, false }, args = { 2, 3 }, no_grad = true },
  { inputs = { { 2, 32, 16, 16 }, { 32, 8, 3, 3 }, false }, args = { 1, 2, 2, 4 }, no_grad = true } },
  fail = { { inputs = { { 64, 1, 28, 28 }, { 32, 3, 3, 3 }, false }, text = "conv2d: w is [32,3,3,3], x [64,1,28,28] has 1 channel" },
    { inputs = { { 1, 1, 2, 2 }, { 1, 1, 3, 3 }, false }, text = "the window exceeds the padded x" },
    { inputs = { { 1, 1, 4, 4 }, { 1, 1, 3, 3 }, false }, args = { 0 }, text = "stride is 0" },
    { inputs = { { 1, 1, 4, 4 }, { 1, 1, 5, 5 }, false }, args = { 1, 2 ^ 62 }, text = "padding is 4611686018427387904, at most 2147483647" },
    { inputs = { { 1, 1, 4, 4 }, { 1, 1, 5, 5 }, false }, args = { 1, 2, 2 ^ 62 }, text = "dilation is 4611686018427387904, at most 2147483647" },
    { inputs = { { 1, 4, 4 }, { 1, 4, 3, 3 }, false }, text = "expected 4 dims" } } }
S.conv2d_grad_input = { samples = { { inputs = { { 1, 4, 3, 3 }, { 4, 2, 3, 3 } }, args = { { 1, 2, 5, 5 } } }, { inputs = { { 1, 4, 2, 2 }, { 4, 1, 3, 3 } }, args = { { 1, 2, 4, 4 }, 2, 1, 1, 2 } },
  { inputs = { { 4, 32, 16, 16 }, { 32, 16, 3, 3 } }, args = { { 4, 16, 16, 16 }, 1, 1 }, no_grad = true },
  { inputs = { { 4, 32, 8, 8 }, { 32, 17, 3, 3 } }, args = { { 4, 17, 15, 16 }, 2, 1 }, no_grad = true } },
  fail = { { inputs = { { 1, 4, 9, 3 }, { 4, 2, 3, 3 } }, args = { { 1, 2, 5, 5 } }, text = "g is [1,4,9,3], expected [1,4,3,3]" } } }
S.conv2d_grad_weight = { samples = { { inputs = { { 1, 4, 3, 3 }, { 1, 2, 5, 5 } }, args = { { 4, 2, 3, 3 } } }, { inputs = { { 1, 4, 2, 2 }, { 1, 2, 4, 4 } }, args = { { 4, 1, 3, 3 }, 2, 1, 1, 2 } },
  { inputs = { { 4, 32, 16, 16 }, { 4, 16, 16, 16 } }, args = { { 32, 16, 3, 3 }, 1, 1 }, no_grad = true },
  { inputs = { { 4, 32, 8, 8 }, { 4, 17, 15, 16 } }, args = { { 32, 17, 3, 3 }, 2, 1 }, no_grad = true } },
  fail = { { inputs = { { 1, 4, 3, 3 }, { 1, 3, 5, 5 } }, args = { { 4, 2, 3, 3 } }, text = "has 3 channels" } } }

-- ---- normalisation --------------------------------------------------------------------------------------------------------
S.batch_norm = { samples = { { inputs = { { 4, 3, 2, 2 }, { 3 }, { 3 }, false, false } }, { inputs = { { 5, 3 }, { 3 }, { 3 }, false, false } }, { inputs = { { 3, 2, 3, 3 }, false, false, false, false } },
  { inputs = { { 3, 2, 3, 3 }, { 2 }, { 2 }, { 2, wide = true }, { 2, kind = "positive", wide = true } }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 4, 3, 2, 2 }, { 3, wide = true }, { 3, wide = true }, false, false } }, { inputs = { { 8, 17, 6, 6 }, { 17, wide = true }, { 17, wide = true }, { 17, wide = true }, { 17, kind = "positive", wide = true } }, no_grad = true },
  { inputs = { { 8, 17, 6, 6 }, { 17 }, { 17 }, { 17, wide = true }, { 17, kind = "positive", wide = true } }, no_grad = true }, { inputs = { { 16, 64, 12, 12 }, { 64 }, { 64 }, false, false }, no_grad = true } },
  fail = { { inputs = { { 4 }, false, false, false, false }, text = "expected [N, C, ...]" }, { inputs = { { 1, 3 }, false, false, false, false }, text = "no variance to train on" },
    { inputs = { { 4, 3 }, { 2 }, false, false, false }, text = "weight is [2], expected [3]" },
    { dtype = "bf16", inputs = { { 4, 3 }, false, false, { 3 }, { 3 } }, text = "running_mean is bf16, expected f32" } } }
S.batch_norm_grad = { samples = { { inputs = { { 4, 3, 2, 2 }, { 4, 3, 2, 2 }, { 3 }, { 3, wide = true }, { 3, kind = "positive", wide = true } }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 4, 3, 2, 2 }, { 4, 3, 2, 2 }, { 3, wide = true }, { 3, wide = true }, { 3, kind = "positive", wide = true } }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 8, 17, 5, 5 }, { 8, 17, 5, 5 }, { 17 }, { 17, wide = true }, { 17, kind = "positive", wide = true } }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 4, 2 }, false, { 2 }, { 2 } }, text = "g is [4,3], x [4,2]" } } }

local act = "away" -- not near relu's kink
S.batch_norm_act = { samples = { { inputs = { { 4, 3, 2, 2 }, { 3 }, { 3 }, false, false, false } }, { inputs = { { 5, 3 }, { 3 }, { 3 }, false, false, { 5, 3 } } }, { inputs = { { 3, 2, 3, 3 }, false, false, false, false, { 3, 2, 3, 3 } } },
  { inputs = { { 3, 2, 3, 3 }, { 2 }, { 2 }, { 2, wide = true }, { 2, kind = "positive", wide = true }, { 3, 2, 3, 3 } }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 3, 2, 3, 3, kind = act }, false, false, { 2, wide = true }, { 2, kind = "positive", wide = true }, false }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 8, 17, 6, 6 }, { 17 }, { 17 }, { 17, wide = true }, { 17, kind = "positive", wide = true }, { 8, 17, 6, 6 } }, no_grad = true },
  { inputs = { { 16, 64, 12, 12 }, { 64 }, { 64 }, false, false, false }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, false, false, false, false, { 4, 2 } }, text = "residual is [4,2], x [4,3]" }, { inputs = { { 1, 3 }, false, false, false, false, false }, text = "no variance to train on" } } }
-- x, w, conv_bias, weight, bias, the statistics of k channels, residual; conv_bias, weight and bias f32 where `vectors` is "wide".
local function conv_bn(x, w, residual, vectors, bias)
  local k, wide = w[1], vectors == "wide"
  local function vector(more) return { k, wide = wide or more } end
  return { x, w, bias ~= false and vector() or false, vectors ~= "none" and vector() or false, vectors ~= "none" and vector() or false, { k, wide = true },
    { k, kind = "positive", wide = true }, residual or false }
end
local STATISTICS = { [6] = true, [7] = true }
local function no_statistics(k) return { { 1, 2, 3, 3 }, { k, 2, 3, 3 }, false, false, false, { k }, { k, kind = "positive" }, false } end
local function conv_bn_fail(i, with, text, args, dtype)
  local inputs = no_statistics(4)
  inputs[i] = with
  return { inputs = inputs, args = args, text = text, dtype = dtype }
end
S.conv_bn_act = { samples = { { inputs = conv_bn({ 2, 3, 5, 5 }, { 4, 3, 3, 3 }), constant = STATISTICS }, { inputs = conv_bn({ 2, 3, 5, 5 }, { 4, 3, 3, 3 }, { 2, 4, 5, 5 }), args = { 1, 1, 1, 1, 1e-5, true }, constant = STATISTICS },
  { inputs = conv_bn({ 1, 2, 6, 5 }, { 3, 2, 3, 2 }, { 1, 3, 3, 2 }, "wide"), args = { 2, { 1, 0 }, 1, 1, 0.1 }, constant = STATISTICS },
  { inputs = conv_bn({ 1, 4, 5, 5 }, { 6, 2, 2, 2 }, nil, "none"), args = { 1, 1, 1, 2, 1e-3, true }, constant = STATISTICS },
  { inputs = conv_bn({ 2, 3, 4, 4 }, { 3, 1, 3, 3 }, { 2, 3, 4, 4 }, "wide", false), args = { 1, 1, 1, 3, 1e-5, true }, constant = STATISTICS },
  { inputs = conv_bn({ 0, 3, 4, 4 }, { 3, 3, 3, 3 }), no_grad = true }, { inputs = conv_bn({ 1, 1, 1, 1 }, { 1, 1, 1, 1 }), no_grad = true },
  { inputs = conv_bn({ 2, 32, 16, 16 }, { 32, 8, 3, 3 }, { 2, 32, 16, 16 }), args = { 1, 2, 2, 4, 1e-5, true }, no_grad = true },
  { inputs = conv_bn({ 4, 17, 15, 16 }, { 33, 17, 3, 3 }, { 4, 33, 8, 8 }), args = { 2, 1, 1, 1, 1e-5, true }, no_grad = true } },
  fail = { conv_bn_fail(1, { 1, 3, 3, 3 }, "conv_bn_act: w is [4,2,3,3], x [1,3,3,3] has 3 channels"), conv_bn_fail(1, { 2, 3, 3 }, "expected 4 dims"),
    conv_bn_fail(1, { 1, 2, 2, 2 }, "the window exceeds the padded x"), conv_bn_fail(2, { 4, 2, 3, 3, dtype = "f64" }, "w is f64, expected f32"),
    conv_bn_fail(3, { 3 }, "conv_bias is [3], expected [4] for w [4,2,3,3]"), conv_bn_fail(4, { 4, 1 }, "weight is [4,1], expected [4] for w [4,2,3,3]"),
    conv_bn_fail(5, { 4, dtype = "f64" }, "bias is f64, expected f32"), conv_bn_fail(6, { 2 }, "running_mean is [2], expected [4]"),
    conv_bn_fail(6, { 4 }, "running_mean is bf16, expected f32", nil, "bf16"), conv_bn_fail(7, { 4, dtype = "f64" }, "running_var is f64, expected f32"),
    conv_bn_fail(7, false, "running_var is missing"), conv_bn_fail(8, { 1, 4, 2, 1 }, "residual is [1,4,2,1], the result [1,4,1,1]"),
    conv_bn_fail(8, { 1, 4, 1, 1, dtype = "f64" }, "residual is f64, expected f32"), conv_bn_fail(8, false, "eps is -1, at least 0", { 1, 0, 1, 1, -1 }),
    conv_bn_fail(8, false, "stride is 0", { 0 }), conv_bn_fail(8, false, "groups is 0, at least 1", { 1, 0, 1, 0 }) } }
S.batch_norm_act_grad = { samples = { { inputs = { { 4, 3, 2, 2 }, { 4, 3, 2, 2 }, { 3 }, { 3, wide = true }, { 3, kind = "positive", wide = true }, { 3 } }, args = { false }, constant = { [4] = true, [5] = true } },
  { inputs = { { 8, 17, 5, 5 }, { 8, 17, 5, 5 }, { 17 }, { 17, wide = true }, { 17, kind = "positive", wide = true }, false }, no_grad = true },
  { inputs = { { 8, 64, 12, 12 }, { 8, 64, 12, 12 }, { 64 }, { 64, wide = true }, { 64, kind = "positive", wide = true }, { 64 } }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 4, 2 }, false, { 2 }, { 2 }, false }, text = "g is [4,3], x [4,2]" } } }
S.batch_norm_add_act_grad = { samples = { { inputs = { { 4, 3, 2, 2 }, { 4, 3, 2, 2 }, { 3 }, { 3, wide = true }, { 3, kind = "positive", wide = true }, { 4, 3, 2, 2, kind = act } }, args = { false }, constant = { [4] = true, [5] = true, [6] = true } },
  { inputs = { { 9, 3 }, { 9, 3 }, false, { 3, wide = true }, { 3, kind = "positive", wide = true }, { 9, 3, kind = act } }, no_grad = true },
  { inputs = { { 8, 17, 5, 5 }, { 8, 17, 5, 5 }, { 17 }, { 17, wide = true }, { 17, kind = "positive", wide = true }, { 8, 17, 5, 5, kind = act } }, no_grad = true },
  { inputs = { { 8, 64, 12, 12 }, { 8, 64, 12, 12 }, { 64 }, { 64, wide = true }, { 64, kind = "positive", wide = true }, { 8, 64, 12, 12, kind = act } }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 4, 3 }, false, { 3 }, { 3 }, { 4, 2 } }, text = "y is [4,2], x [4,3]" } } }

-- ---- pooling ------------------------------------------------------------------------------------------------------------------
local exceeds = { inputs = { { 1, 1, 2, 2 } }, args = { 3 }, text = "the window exceeds the padded x" }
S.max_pool2d = { samples = { { inputs = { { 2, 3, 4, 4, kind = "distinct" } }, args = { 2 } }, { inputs = { { 1, 2, 5, 6, kind = "distinct" } }, args = { 3, 2, 1 } }, { inputs = { { 2, 16, 9, 9, kind = "distinct" } }, args = { 3, 1, 1 }, no_grad = true },
  { inputs = { { 1, 300, 4, 4, kind = "distinct" } }, args = { 2 }, no_grad = true } },
  fail = { exceeds, { inputs = { { 1, 1, 4, 4 } }, args = { 2, 2, 2 }, text = "at most half the kernel" } } }
S.max_pool2d_grad = { samples = { { inputs = { { 1, 2, 2, 2 }, { 1, 2, 2, 2, kind = "label", n = 16 } }, args = { { 1, 2, 4, 4 } } },
  { inputs = { { 80, 16, 8, 8 }, { 80, 16, 8, 8, kind = "label", n = 256 } }, args = { { 80, 16, 16, 16 } }, no_grad = true } },
  fail = { { inputs = { { 1, 2, 2, 2 }, { 1, 2, 2, 3, kind = "label", n = 16 } }, args = { { 1, 2, 4, 4 } }, text = "g is [1,2,2,2]" } } }
S.avg_pool2d = { samples = { { inputs = { { 1, 300, 4, 4 } }, args = { 2 }, no_grad = true }, { inputs = { { 2, 3, 4, 4 } }, args = { 2 } }, { inputs = { { 1, 2, 5, 6 } }, args = { 3, 2, 1 } }, { inputs = { { 1, 2, 5, 5 } }, args = { 3, 2, 1, false } } }, fail = { exceeds } }
S.avg_pool2d_grad = { samples = { { inputs = { { 80, 16, 8, 8 } }, args = { { 80, 16, 16, 16 }, 2 }, no_grad = true }, { inputs = { { 1, 300, 2, 2 } }, args = { { 1, 300, 4, 4 }, 2 }, no_grad = true }, { inputs = { { 1, 2, 3, 3 } }, args = { { 1, 2, 5, 5 }, 3, 2, 1 } }, { inputs = { { 1, 2, 3, 3 } }, args = { { 1, 2, 5, 5 }, 3, 2, 1, false } } },
  fail = { { inputs = { { 1, 2, 3, 3 } }, args = { { 1, 2, 8, 8 }, 2 }, text = "g is [1,2,3,3], expected [1,2,4,4]" } } }
S.adaptive_avg_pool2d = { samples = { { inputs = { { 2, 3, 5, 7 } }, args = { { 2, 3 } } }, { inputs = { { 2, 16, 4, 4 } }, args = { 1 } } }, fail = { { inputs = { { 1, 1, 2, 2 } }, args = { 0 }, text = "at least 1" } } }
S.adaptive_avg_pool2d_grad = { samples = { { inputs = { { 2, 3, 2, 3 } }, args = { { 2, 3, 5, 7 } } } }, fail = { { inputs = { { 2, 3, 2, 3 } }, args = { { 2, 4, 5, 7 } }, text = "expected [2,4,2,3]" } } }

-- ---- softmax and loss ------------------------------------------------------------------------------------------------------------
S.softmax = { samples = { { inputs = { { 3, 5 } }, args = { -1 } }, { inputs = { { 2, 3, 4 } }, args = { 2 } }, { inputs = { { 40, 33 } }, args = { 2 }, no_grad = true }, { inputs = { { 2, 5003 } }, args = { 2 }, no_grad = true } }, fail = { { inputs = { { 3 } }, args = { 2 }, text = "dim 1 of a tensor of 1 dims" } } }
S.softmax_grad = { samples = { { inputs = { { 3, 5 }, { 3, 5 } }, args = { -1 } }, { inputs = { { 2, 3, 4 }, { 2, 3, 4 } }, args = { 2 } }, { inputs = { { 40, 33 }, { 40, 33 } }, args = { 2 }, no_grad = true } },
  fail = { { inputs = { { 3 }, { 4 } }, args = { 1 }, text = "g is [3], y [4]" }, { inputs = { { 3 }, { 3, dtype = "f64" } }, args = { 1 }, text = "y is f64, expected f32" }, { inputs = { { 3 }, { 3 } }, args = { 2 }, text = "dim 1 of a tensor of 1 dims" } } }
S.log_softmax_grad = { samples = { unpack(S.softmax_grad.samples) }, fail = S.softmax_grad.fail }
S.log_softmax = { samples = S.softmax.samples, fail = S.softmax.fail }
local label = { inputs = { { 4, 3 }, { 4, kind = "label", n = 3 } } }
S.cross_entropy = { samples = { label, { inputs = { { 4, 3 }, { 4, kind = "label", n = 3 } }, args = { 0, -100, 0.1 } }, { inputs = { { 2, 3, 4 }, { 2, 4, kind = "label", n = 3 } }, args = { 2, 1 } }, { inputs = { { 64, 10 }, { 64, kind = "label", n = 10 } }, no_grad = true },
  { inputs = { { 3, 5003 }, { 3, kind = "label", n = 5003 } }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 4, kind = "label", n = 1 } }, args = { 7 }, text = "reduction 7" }, { inputs = { { 2, 3 }, { value = true } }, text = "target" } } }
S.cross_entropy_grad = { samples = { { inputs = { { 3 }, { 3, 5003 }, { 3, kind = "label", n = 5003 } }, args = { 0 }, no_grad = true }, { inputs = { {}, { 4, 3 }, { 4, kind = "label", n = 3 } } }, { inputs = { { 4 }, { 4, 3 }, { 4, kind = "label", n = 3 } }, args = { 0, 1, 0.2 } } },
  fail = { { inputs = { { 2 }, { 4, 3 }, { 4, kind = "label", n = 3 } }, text = "expected the loss's shape" } } }
-- Rows that are left out, one and several together, among those that are not.
table.insert(S.cross_entropy.samples, { inputs = { { 40, 33 }, { 40, kind = "label", n = 3 } }, args = { 0, 1 }, no_grad = true })
table.insert(S.cross_entropy_grad.samples, { inputs = { {}, { 40, 33 }, { 40, kind = "label", n = 3 } }, args = { 1, 1 }, no_grad = true })
for _, n in ipairs { 1, 3, 15, 16, 17, 33, 1000, 4097 } do
  local row, classes = { 5, n }, { 5, kind = "label", n = n }
  for _, name in ipairs { "softmax", "log_softmax" } do table.insert(S[name].samples, { inputs = { row }, args = { -1 }, no_grad = true }) end
  for _, name in ipairs { "softmax_grad", "log_softmax_grad" } do table.insert(S[name].samples, { inputs = { row, row }, args = { -1 }, no_grad = true }) end
  for _, smoothing in ipairs { 0, 0.1 } do
    table.insert(S.cross_entropy.samples, { inputs = { row, classes }, args = { 1, -100, smoothing }, no_grad = true })
    table.insert(S.cross_entropy_grad.samples, { inputs = { {}, row, classes }, args = { 1, -100, smoothing }, no_grad = true })
  end
  local image, places = { 2, n, 3, 4 }, { 2, 3, 4, kind = "label", n = n } -- channels-last among their layouts
  table.insert(S.cross_entropy.samples, { inputs = { image, places }, args = { 0, 0 }, no_grad = true })
  table.insert(S.cross_entropy_grad.samples, { inputs = { { 2, 3, 4 }, image, places }, args = { 0, 0 }, no_grad = true })
end
S.dropout = { samples = { { inputs = { { 1 } }, seed = 3 }, { inputs = { { 15 } }, seed = 3 }, { inputs = { { 17 } }, seed = 3 }, { inputs = { { 5, 33 } }, args = { 0.1 }, seed = 3 },
  { inputs = { { 7, 1000 } }, args = { 0.4 }, seed = 3, no_grad = true }, { inputs = { { 6, 5 } }, args = { 0.4 }, seed = 3 },
  { inputs = { { 5, 1030 } }, args = { 0 }, seed = 3, no_grad = true }, { inputs = { { 5, 33 } }, args = { 1 - 2 ^ -30 }, seed = 3, no_grad = true } }, fail = { { inputs = { { 3 } }, args = { 1 }, text = "expected 0 <= p < 1" } } }

S.dropout_grad = { samples = { { inputs = { { 1 }, { 1, kind = "bool" } } }, { inputs = { { 5, 33 }, { 5, 33, kind = "bool" } }, args = { 0.1 } }, { inputs = { { 7, 1000 }, { 7, 1000, kind = "bool" } }, args = { 0.4 }, no_grad = true } },
  fail = { { inputs = { { 3 }, { 4, kind = "bool" } }, text = "g is [3], mask [4]" }, { inputs = { { 3 }, { 3 } }, text = "mask is f32, expected bool" }, { inputs = { { 3 }, { 3, kind = "bool" } }, args = { 1 }, text = "expected 0 <= p < 1" } } }

-- ---- shapes -----------------------------------------------------------------------------------------------------------------------
S.view = { keeps_layout = true, samples = { { inputs = { { 2, 6 } }, args = { { 3, -1 } } }, { inputs = { { 2, 1, 3 } }, args = { { 6 } } } }, fail = { { inputs = { { 2, 3 } }, args = { { 4, -1 } }, text = "does not divide into" }, { inputs = { { 2, 3 } }, args = { { 7 } }, text = "x [2,3] has 6 elements, [7] has 7" } } }
S.permute = { samples = { { inputs = { { 2, 3, 4 } }, args = { { 3, 1, 2 } } } }, fail = { { inputs = { { 2, 3 } }, args = { { 1, 1 } }, text = "named twice" } } }
S.transpose = { samples = { { inputs = { { 2, 3, 4 } }, args = { 1, -1 } } }, fail = { { inputs = { { 2 } }, args = { 1, 2 }, text = "dim 1 of a tensor of 1 dims" } } }
S.expand = { samples = { { inputs = { { 3, 1 } }, args = { { 2, 3, 4 } } }, { inputs = { { 1 } }, args = { { 5 } } } }, fail = { { inputs = { { 3 } }, args = { { 4 } }, text = "does not expand to [4]" } } }
S.slice = { samples = { { inputs = { { 5, 3 } }, args = { 1, 1, 5, 2 } }, { inputs = { { 5 } }, args = { 1, 2, 2 } } }, fail = { { inputs = { { 5 } }, args = { 1, 2, 7 }, text = "2 to 7 of dim 0, which has 5" } } }
S.select = { samples = { { inputs = { { 3, 4 } }, args = { 1, 2 } }, { inputs = { { 3, 4 } }, args = { 2, -1 } } }, fail = { { inputs = { { 3 } }, args = { 1, 4 }, text = "index 3 of dim 0, which has 3" } } }
S.unsqueeze = { samples = { { inputs = { { 2, 3 } }, args = { 1 } }, { inputs = { { 2, 3 } }, args = { -1 } } }, fail = { { inputs = { { 2 } }, args = { 4 }, text = "dim 3" } } }
S.squeeze = { samples = { { inputs = { { 2, 1, 3, 1 } } }, { inputs = { { 2, 1, 3, 1 } }, args = { 2 } } }, fail = { { inputs = { { 2 } }, args = { 4 }, text = "dim 3" } } }
S.slice_grad = { samples = { { inputs = { { 2, 3 } }, args = { { 5, 3 }, 1, 1, 5, 2 } } }, fail = { { inputs = { { 3, 3 } }, args = { { 5, 3 }, 1, 1, 5, 2 }, text = "the slice [2,3]" } } }
S.cat = { samples = { { inputs = { { list = { { 2, 3 }, { 1, 3 } } } } }, { inputs = { { list = { { 2, 3 }, { 2, 1 }, { 2, 2 } } } }, args = { 2 } } }, fail = { { inputs = { { list = { { 2, 3 }, { 2, 4 } } } }, text = "only dim 0 may differ" }, { inputs = { { list = {} } }, text = "no tensors" } } }
S.stack = { samples = { { inputs = { { list = { { 2, 3 }, { 2, 3 } } } } }, { inputs = { { list = { { 3 }, { 3 } } } }, args = { -1 } } }, fail = { { inputs = { { list = { { 3 }, { 4 } } } }, text = "tensor 1 is [3], tensor 2 [4]" } } }

-- ---- indexing -------------------------------------------------------------------------------------------------------------------------
S.index_select = { samples = { { inputs = { { 4, 3 }, { 5, kind = "label", n = 4 } }, args = { 1 } }, { inputs = { { 2, 4 }, { 3, kind = "label", n = 4 } }, args = { 2 } } }, fail = { { inputs = { { 2, 2 }, { 3, kind = "int", lo = 5, n = 9 } }, args = { 1 }, text = "expected 0 to 1" } } }
S.index_select_grad = { samples = { { inputs = { { 5, 3 }, { 5, kind = "label", n = 4 } }, args = { { 4, 3 }, 1 } } }, fail = { { inputs = { { 4, 3 }, { 5, kind = "label", n = 4 } }, args = { { 4, 3 }, 1 }, text = "g is [4,3], expected [5,3]" } } }
S.gather = { samples = { { inputs = { { 4, 3 }, { 2, 3, kind = "label", n = 4 } }, args = { 1 } }, { inputs = { { 3, 4 }, { 3, 2, kind = "label", n = 4 } }, args = { 2 } } }, fail = { { inputs = { { 2, 2 }, { 3, kind = "label", n = 2 } }, args = { 1 }, text = "ids are [3], x [2,2]" } } }
S.gather_grad = { samples = { { inputs = { { 2, 3 }, { 2, 3, kind = "label", n = 4 } }, args = { { 4, 3 }, 1 } } }, fail = { { inputs = { { 2, 2 }, { 2, 3, kind = "label", n = 4 } }, args = { { 4, 3 }, 1 }, text = "g is [2,2], ids [2,3]" } } }

-- ---- making ------------------------------------------------------------------------------------------------------------------------------
local bad_size = { args = { { -1 } }, text = "is negative" }
S.full = { samples = { { args = { { 2, 3 }, 1.5 } }, { args = { {}, 2 } }, { args = { { 37 }, 0.1, "bf16" } }, { args = { { 37 }, 0.1, "f16" } } }, fail = { { args = { { -1 }, 0 }, text = "is negative" } } }
S.arange = { samples = { { args = { 0, 5, 1, "f32" } }, { args = { 1, 2, 0.25, "f64" } }, { args = { 1, 9, 0.5, "bf16" } }, { args = { 1, 9, 0.5, "f16" } } }, fail = { { args = { 0, 5, -1 }, text = "does not lead from 0 to 5" } } }
S.eye = { samples = { { args = { 3 } }, { args = { 2, 4 } }, { args = { 3, 0, "bf16" } } }, fail = { { args = { -1 }, text = "is negative" } } }
S.rand = { samples = { { args = { { 3, 5 } }, seed = 1 }, { args = { { 300 }, "bf16" }, seed = 1 }, { args = { { 300 }, "f16" }, seed = 1 }, { args = { { 300 }, "f64" }, seed = 1 } }, fail = { bad_size, { args = { { 2 }, "i64" }, text = "draws floating dtypes" } } }
S.randn = { samples = { { args = { { 3, 5 } }, seed = 1 }, { args = { { 300 }, "bf16" }, seed = 1 }, { args = { { 300 }, "f16" }, seed = 1 }, { args = { { 1001 } }, seed = 1 } }, fail = { bad_size } }
S.randint = { samples = { { args = { 0, 10, { 50 } }, seed = 1 } }, fail = { { args = { 3, 3, { 2 } }, text = "lo 3 is not below hi 3" } } }
S.randperm = { samples = { { args = { 10 }, seed = 1 } }, fail = { { args = { -2 }, text = "is negative" } } }
S.uniform_ = { samples = { { inputs = { { 33 } }, args = { -1, 2 }, seed = 1, no_grad = true, draws = true } }, fail = { { inputs = { { 3, kind = "int" } }, text = "draws floating dtypes" } } }
S.normal_ = { samples = { { inputs = { { 33 } }, args = { 1, 2 }, seed = 1, no_grad = true, draws = true } }, fail = { { inputs = { { 3, kind = "int" } }, text = "draws floating dtypes" } } }
S.bernoulli_ = { samples = { { inputs = { { 33 } }, args = { 0.3 }, seed = 1, no_grad = true } }, fail = { { inputs = { { 3 } }, args = { 2 }, text = "p is 2, expected 0 to 1" } } }
for _, name in ipairs { "rand", "randn" } do for _, s in ipairs(S[name].samples) do s.draws = true end end

-- ---- optimizers ----------------------------------------------------------------------------------------------------------------------------
local function lists(n, sizes)
  local out = {}
  for k = 1, n do
    out[k] = { list = {} }
    for i, s in ipairs(sizes) do out[k].list[i] = { unpack(s) }; if k == 4 then out[k].list[i].kind = "positive" end end
  end
  return out
end
local halves_refused = { dtype = "bf16", text = "parameter 1 is bf16, expected f32 or f64; keep parameters in f32 and compute under autocast" }
S.sgd_step = { returns_first = true, no_half = true, samples = { { inputs = lists(3, { { 3 }, { 2, 4 } }), args = { 0.1, 0.9, 0, 0.01 } }, { inputs = lists(3, { { 37 } }), args = { 0.1, 0.9, 0.1, 0.01, false, false } }, { inputs = lists(3, { { 5 } }), args = { 0.1, 0.9, 0, 0, true, true } },
  { inputs = lists(3, { { 3 }, { 37 } }), args = { 0.1, 0.9, 0.1, 0.01, false, false, 0.25 } }, { inputs = lists(3, { { 3 }, { 37 } }), args = { 0.1, 0.9, 0.1, 0.01, false, false, 0.25, true } },
  { inputs = lists(3, { { 37 } }), args = { 0.1, 0.9, 0, 0.01, true, true, 3, true } }, { inputs = lists(3, { { 37 } }), args = { 0.1, 0, 0, 0.01, false, false, 3, true } } },
  fail = { { inputs = { { list = { { 3 } } }, { list = { { 4 } } }, { list = { { 3 } } } }, args = { 0.1 }, text = "its grads f32 [4]" },
    { inputs = lists(3, { { 3 } }), args = { 0.1 }, dtype = halves_refused.dtype, text = halves_refused.text } } }
S.adam_step = { returns_first = true, no_half = true, samples = { { inputs = lists(4, { { 3 }, { 2, 4 } }), args = { 0.01 } }, { inputs = lists(4, { { 37 } }), args = { 0.01, 0.8, 0.99, 1e-6, 0.1, true, 3 } },
  { inputs = lists(4, { { 3 }, { 37 } }), args = { 0.01, 0.8, 0.99, 1e-6, 0.1, true, 3, 0.25 } }, { inputs = lists(4, { { 3 }, { 37 } }), args = { 0.01, 0.8, 0.99, 1e-6, 0.1, false, 3, 4, true } } },
  fail = { { inputs = lists(4, { { 3 } }), args = { 0.01, 0.9, 0.999, 1e-8, 0, false, 0 }, text = "step is 0" },
    { inputs = lists(4, { { 3 } }), args = { 0.01 }, dtype = halves_refused.dtype, text = halves_refused.text } } }

-- ---- gradients before the step ---------------------------------------------------------------------------------------------------------------
local none, whole_numbers = { inputs = { { list = {} } }, text = "no gradients" }, { inputs = { { list = { { 2, kind = "int" } } } }, text = "gradient 1 is i64, expected f32 or f64" }
S.grad_unscale_ = { returns_first = true, no_half = true, samples = { { inputs = lists(1, { { 3 }, { 2, 4 }, {}, { 2, 0 } }), args = { 0.25 } }, { inputs = lists(1, { { 70000 }, { 37 } }), args = { 3 } } }, fail = { none, whole_numbers } }
S.grad_clip_ = { returns_first = true, no_half = true, samples = { { inputs = lists(1, { { 3 }, { 2, 4 }, {}, { 2, 0 } }), args = { 0.5 } }, { inputs = lists(1, { { 140001 }, { 37 } }), args = { 3 } },
  { inputs = lists(1, { { 3 }, { 4 } }), args = { 1000 } }, { inputs = lists(1, { { 5 } }) } }, fail = { none, whole_numbers, { inputs = lists(1, { { 3 } }), args = { -1 }, text = "max_norm is -1" } } }
S.grad_norm = { returns_first = true, no_half = true, samples = { { inputs = lists(1, { { 3 }, { 2, 4 }, {}, { 2, 0 } }), args = { 0.25 } }, { inputs = lists(1, { { 140001 }, { 37 } }) } }, fail = { none, whole_numbers } }

-- ---- collectives (a world of one) ------------------------------------------------------------------------------------------------------------
S.all_gather = { samples = { { inputs = { { 2, 3 } } } }, fail = {} }
S.reduce_scatter = { samples = { { inputs = { { 2, 3 } } } }, fail = { { inputs = { { 3, kind = "int" } }, args = { 1 }, text = "the mean of i64" } } }
S.all_reduce_ = { samples = { { inputs = { { 2, 3 } }, no_grad = true } }, fail = { { inputs = { { 2 } }, args = { 9 }, text = "op 9" } } }
S.broadcast_ = { samples = { { inputs = { { 2, 3 } }, no_grad = true } }, fail = { { inputs = { { 2 } }, args = { 4 }, text = "root 4 in a world of 1" } } }

-- ---- layers of transformers -------------------------------------------------------------------------------------------------------------------
S.layer_norm = { samples = { { inputs = { { 4, 5 }, { 5 }, { 5 } } }, { inputs = { { 2, 3, 4 }, false, false } }, { inputs = { { 2, 3, 4 }, { 3, 4, wide = true }, { 3, 4, wide = true } }, args = { 2 } },
  { inputs = { { 7 }, { 7 }, false }, args = { 1, 1e-3 } }, { inputs = { { 40, 65 }, { 65, wide = true }, { 65, wide = true } }, no_grad = true }, { inputs = { { 3, 2500 }, { 2500 }, { 2500 } }, no_grad = true } },
  fail = { { inputs = { { 4, 5 }, { 4 }, false }, text = "weight is [4], expected [5] for x [4,5]" }, { inputs = { { 4, 5 }, false, false }, args = { 3 }, text = "dims is 3, expected 1 to 2" },
    { inputs = { { 4, 0 }, false, false }, text = "nothing to normalise" }, { inputs = { { 4, 5, kind = "int" }, false, false }, text = "expected a floating dtype" } } }
-- mean and rstd must belong to x where second gradients are differences: no_grad.
S.layer_norm_grad = { samples = { { inputs = { { 4, 5 }, { 4, 5 }, { 5 }, { 4, wide = true }, { 4, kind = "positive", wide = true } }, no_grad = true },
  { inputs = { { 2, 3, 4 }, { 2, 3, 4 }, false, { 2, wide = true }, { 2, kind = "positive", wide = true } }, args = { 2 }, no_grad = true },
  { inputs = { { 40, 65 }, { 40, 65 }, { 65, wide = true }, { 40, wide = true }, { 40, kind = "positive", wide = true } }, no_grad = true },
  { inputs = { { 3, 2500 }, { 3, 2500 }, { 2500 }, { 3, wide = true }, { 3, kind = "positive", wide = true } }, no_grad = true } },
  fail = { { inputs = { { 4, 5 }, { 4, 6 }, false, { 4 }, { 4 } }, text = "g is [4,5], x [4,6]" }, { inputs = { { 4, 5 }, { 4, 5 }, false, { 5 }, { 4 } }, text = "mean is [5], expected [4]" } } }
-- Around a vector's width, and fewer and more rows than are taken together.
for _, n in ipairs { 1, 2, 15, 16, 17, 33, 200, 769 } do
  for _, rows in ipairs { 1, 5, 37 } do
    local x, v, m, r = { rows, n }, { n, wide = true }, { rows, wide = true }, { rows, kind = "positive", wide = true }
    table.insert(S.layer_norm.samples, { inputs = { x, v, rows == 5 and v }, no_grad = true })
    table.insert(S.layer_norm_grad.samples, { inputs = { x, x, v, m, r }, no_grad = true })
  end
end
S.embedding = { samples = { { inputs = { { 5, 3 }, { 4, kind = "label", n = 5 } } }, { inputs = { { 5, 3 }, { 2, 3, kind = "label", n = 5 } } }, { inputs = { { 5, 3 }, { kind = "label", n = 5 } } },
  { inputs = { { 50, 130 }, { 8, 9, kind = "label", n = 50 } }, no_grad = true } },
  fail = { { inputs = { { 2, 2 }, { 3, kind = "int", lo = 5, n = 9 } }, text = "expected 0 to 1" }, { inputs = { { 2 }, { 3, kind = "label", n = 2 } }, text = "expected 2 dims" } } }
S.embedding_grad = { samples = { { inputs = { { 4, 3 }, { 4, kind = "label", n = 5 } }, args = { 5 } }, { inputs = { { 2, 3, 2 }, { 2, 3, kind = "label", n = 4 } }, args = { 4 } },
  { inputs = { { 90, 130 }, { 90, kind = "label", n = 7 } }, args = { 7 }, no_grad = true } },
  fail = { { inputs = { { 4, 3 }, { 5, kind = "label", n = 5 } }, args = { 5 }, text = "g is [4,3], ids [5]" } } }
local function gelu_tanh(x) return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3))) end
S.gelu = unary(nil)
for _, shape in ipairs { { 2, 3 }, { 37 } } do S.gelu.samples[#S.gelu.samples + 1] = { inputs = { shape }, args = { true }, list_value = function(x)
  local out = {}
  for i, v in ipairs(x:reshape(x:numel()):tolist()) do out[i] = gelu_tanh(v) end
  return out
end } end
S.gelu_grad = { samples = { { inputs = { { 2, 3 }, { 2, 3 } } }, { inputs = { { 37 }, { 37 } } }, { inputs = { { 2, 3 }, { 2, 3 } }, args = { true } }, { inputs = { { 37 }, { 37 } }, args = { true } } },
  fail = { { inputs = { { 3 }, { 4 } }, text = "g is [3], x [4]" } } }
S.silu = unary(function(x) return x / (1 + math.exp(-x)) end)

for _, sample in ipairs(S.conv_bn_act.samples) do sample.stepwise = true end

S.to_device = { value = function(x) return x end, samples = { { inputs = { { 2, 3 } }, args = { "cpu" } }, { inputs = { {} }, args = { "cpu" } }, { inputs = { { 0, 3 } }, args = { "cpu" } } },
  fail = { { inputs = { { 2 } }, args = { "gpu" }, text = "no device \"gpu\"" } } }

return S
