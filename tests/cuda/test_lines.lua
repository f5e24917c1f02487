-- test_lines.lua -- reductions, softmax, cross-entropy and norms on the GPU against the reference on the CPU: sizes around blocks and
-- beyond them, layouts, values that are not finite, and the same bits whatever order threads run in.
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local ddp = require "ddp"

local TOL = { f32 = 2e-5, f64 = 1e-11, f16 = 2e-3, bf16 = 1.6e-2 }
local HALF = { f16 = true, bf16 = true }
local FLOATS = { "f32", "f64", "f16", "bf16" }
local nan, inf = 0 / 0, math.huge

-- ---- running on both ---------------------------------------------------------------------------------------------------

local function randn(size, dtype) return ddp.randn(size, { dtype = "f64" }):to(dtype) end
local function positive(n, dtype) return (ddp.rand({ n }, { dtype = "f64" }) + 0.5):to(HALF[dtype] and "f32" or dtype) end
local function results(...)
  local out = {}
  for i = 1, select("#", ...) do out[i] = (select(i, ...)) end
  return out
end
local function wide(x) return ddp.is_tensor(x) and (x:dtype():find "f") and x:to "f64" or x end

-- inputs: a list with n, nil where absent; lay: as they are seen, of a dense tensor (on either device); writes: inputs that are
-- compared too. Results of the op on the GPU, and of the reference in f64.
local function both(name, inputs, args, lay, writes)
  local n, gpu, cpu = inputs.n or #inputs, {}, {}
  for i = 1, n do
    local x = inputs[i]
    if ddp.is_tensor(x) then
      gpu[i], cpu[i] = x:to "cuda", wide(x)
      if lay then gpu[i], cpu[i] = lay(gpu[i]), lay(cpu[i]) end
    end
  end
  for i, a in ipairs(args or {}) do gpu[n + i], cpu[n + i] = a, a end
  local count = n + #(args or {})
  local got = results(ops[name](unpack(gpu, 1, count)))
  local want = checks.run(ops[name], { n_args = #(args or {}), args = args }, { n = n, unpack(cpu, 1, n) }, "ref")
  for _, i in ipairs(writes or {}) do got[#got + 1], want[#want + 1] = gpu[i], cpu[i] end
  for i, y in ipairs(got) do got[i] = y:to "cpu" end
  return got, want
end

local function agrees(name, inputs, args, lay, writes)
  ddp.manual_seed(3)
  local dtype = inputs.dtype
  local got, want = both(name, inputs(), args, lay, writes)
  checks.compare(got, want, TOL[dtype] or 2e-5, name, HALF[dtype] and 1 or nil)
end

-- make(dtype) gives the inputs; the op agrees in each of the dtypes.
local function in_dtypes(name, dtypes, make, args, lay, writes)
  for _, dtype in ipairs(dtypes) do
    local inputs = setmetatable({ dtype = dtype }, { __call = function() return make(dtype) end })
    local ok, err = pcall(agrees, name, inputs, args, lay, writes)
    if not ok then error(("%s in %s: %s"):format(name, dtype, err), 0) end
  end
end

local function channels_last(x) return x:dim() == 4 and x:permute(1, 3, 4, 2):contiguous():permute(1, 4, 2, 3) or x end

-- ---- schedules ----------------------------------------------------------------------------------------------------------------------

-- All bits of a few calls of each family, as text.
local function digest()
  ddp.manual_seed(11)
  local x, image, v = ddp.randn{ 40, 3000 }:to "cuda", ddp.randn{ 20, 12, 9, 9 }:to "cuda", (ddp.rand{ 12 } + 0.5):to "cuda"
  local target = ddp.randint(0, 3000, { 40 }):to "cuda"
  local all = { x:sum(), x:sum(1), x:sum(2), x:amax(1), x:argmax(1), x:softmax(1), x:softmax(2),
    ops.cross_entropy(x, target), ops.cross_entropy_grad(ddp.ones({}):to "cuda", x, target),
    ops.batch_norm(image, v, v), ops.layer_norm(x), x:slice(2, 1, 700):softmax(2) }
  for _, y in ipairs { ops.batch_norm_act_grad(image, image, v, v, v, v) } do all[#all + 1] = y end
  for _, y in ipairs { ops.batch_norm_grad(channels_last(image), channels_last(image), v, v, v) } do all[#all + 1] = y end
  local rows = (ddp.rand{ 40 } + 0.5):to "cuda"
  for _, y in ipairs { ops.layer_norm_grad(x, x, nil, rows, rows) } do all[#all + 1] = y end
  local hash = 0
  for _, y in ipairs(all) do
    for _, value in ipairs(y:to "cpu":to "f64":reshape(y:numel()):tolist()) do
      local digits, exponent = math.frexp(value) -- 24 digits are whole below: nothing is rounded off
      hash = (hash * 31 + digits * 2 ^ 24 + exponent) % 2 ^ 46
    end
  end
  return ("%.17g"):format(hash)
end

if arg[1] == "digest" then
  print(digest())
  os.exit(0)
end

-- ---- reductions -------------------------------------------------------------------------------------------------------------

local ALL = { "f32", "f64", "f16", "bf16", "i64", "i32", "u8", "bool" }
local function values(size, dtype)
  if dtype:find "f" then return randn(size, dtype) end
  return ddp.randint(dtype == "u8" and 0 or -9, dtype == "u8" and 200 or 10, size):to(dtype)
end

t.test("sums and extremes of all elements: one, a block less one, and what many blocks share", function()
  for _, n in ipairs { 1, 255, 257, 70001 } do
    local few = n > 300 and { "f32", "bf16", "i64", "u8" } or ALL
    for _, name in ipairs { "sum", "amax", "amin" } do in_dtypes(name, few, function(d) return { values({ n }, d) } end) end
    in_dtypes("argmax", few, function(d) return { values({ n }, d) } end, { 1 })
  end
end)

t.test("sums and extremes over rows, columns and what lies apart, few results and many", function()
  for _, s in ipairs { { { 3, 9000 }, { 2 } }, { { 9000, 3 }, { 2 } }, { { 9000, 3 }, { 1 } }, { { 900, 64 }, { 1 } }, { { 2, 20000 }, { 1 } }, { { 700, 2, 3 }, { 2 } },
    { { 6, 5, 4, 3 }, { 2, 4 } }, { { 16, 32, 7, 7 }, { 1, 3, 4 } }, { { 16, 32, 8, 8 }, { 1, 3, 4 } } } do
    for _, name in ipairs { "sum", "amin" } do in_dtypes(name, { "f32", "f16", "i32" }, function(d) return { values(s[1], d) } end, { s[2] }) end
    in_dtypes("mean", { "f32", "bf16" }, function(d) return { values(s[1], d) } end, { s[2] }, channels_last)
    if #s[2] == 1 then in_dtypes("max_dim", { "f32", "u8" }, function(d) return { values(s[1], d) } end, { s[2][1] }) end
  end
end)

t.test("a sum of nothing is 0, a mean of nothing NaN", function()
  t.eq(ddp.zeros { 4, 0 }:to "cuda":sum(2):tolist(), { 0, 0, 0, 0 })
  local m = ddp.zeros { 0 }:to "cuda":mean():item()
  t.ok(m ~= m)
  t.eq(ddp.zeros { 0, 3 }:to "cuda":sum(2):size(), { 0 })
end)

t.test("NaN beats all in extremes, and of equals the first is taken", function()
  local n = 5000
  local function with(changes)
    local x = ddp.zeros { n }
    for i, v in pairs(changes) do x[i] = v end
    return x:to "cuda"
  end
  t.eq(with { [700] = 3, [4000] = 3 }:argmax(1):item(), 699) -- from 0
  t.eq(with {}:argmax(1):item(), 0)
  t.eq(with { [12] = inf, [3001] = nan, [3002] = nan }:argmax(1):item(), 3000)
  local least = with { [12] = -inf, [3001] = nan }:amin():item()
  t.ok(least ~= least)
  t.eq(with { [4999] = -inf }:amin():item(), -inf)
end)

-- ---- softmax and cross-entropy -----------------------------------------------------------------------------------------------

local LINES = { { { 3, 1 }, 2 }, { { 400, 10 }, 2 }, { { 3, 2048 }, 2 }, { { 3, 4097 }, 2 }, { { 2, 9000 }, 2 }, { { 3, 7, 70 }, 2 }, { { 300, 5 }, 1 } }

t.test("softmax and its gradients along short, long and crosswise lines", function()
  for _, s in ipairs(LINES) do
    for _, name in ipairs { "softmax", "log_softmax" } do
      in_dtypes(name, FLOATS, function(d) return { randn(s[1], d) } end, { s[2] })
      in_dtypes(name .. "_grad", FLOATS, function(d) return { randn(s[1], d), ops[name](randn(s[1], "f64"), s[2]):to(d) } end, { s[2] })
    end
  end
end)

t.test("cross-entropy and its gradient, every reduction, with smoothing and labels left out", function()
  for _, s in ipairs(LINES) do
    if s[2] == 2 then
      local targets = { s[1][1], s[1][3] }
      for reduction = 0, 2 do
        local args = { reduction, 0, reduction == 1 and 0.1 or 0 }
        local function logits(d) return { randn(s[1], d), ddp.randint(0, s[1][2], targets) } end
        in_dtypes("cross_entropy", { "f32", "bf16" }, logits, args)
        in_dtypes("cross_entropy_grad", { "f32", "f16" }, function(d)
          local x = logits(d)
          return { randn(reduction == 0 and targets or {}, d), x[1], x[2] }
        end, args)
      end
    end
  end
  in_dtypes("cross_entropy", { "f32" }, function(d) return { randn({ 5000, 7 }, d), ddp.randint(0, 7, { 5000 }) } end, { 1, 3, 0.2 })
  in_dtypes("cross_entropy_grad", { "f32" }, function(d) return { randn({}, d), randn({ 5000, 7 }, d), ddp.randint(0, 7, { 5000 }) } end, { 1, 3, 0.2 })
end)

t.test("values that are not finite come out as the reference has them", function()
  local rows = { { 1, 2, nan, 4 }, { 1, inf, 2, 3 }, { -inf, 1, 2, -inf }, { -inf, -inf, -inf, -inf }, { 80, -1e34, 0, 1 } }
  for _, long in ipairs { 1, 3000 } do -- held in registers, and read again
    local function x() return ddp.tensor(rows):view{ 5, 4, 1 }:expand{ 5, 4, long }:reshape{ 5, 4 * long } end
    in_dtypes("softmax", { "f32", "f64" }, function(d) return { x():to(d) } end, { 2 })
    in_dtypes("log_softmax", { "f32" }, function(d) return { x():to(d) } end, { 2 })
    in_dtypes("cross_entropy", { "f32" }, function(d) return { x():to(d), ddp.full({ 5 }, 1, { dtype = "i64" }) } end, { 0 })
    in_dtypes("cross_entropy_grad", { "f32" }, function(d) return { ddp.ones({ 5 }):to(d), x():to(d), ddp.full({ 5 }, 1, { dtype = "i64" }) } end, { 0 })
    in_dtypes("amax", { "f32", "f16" }, function(d) return { x():to(d) } end, { { 2 } })
    in_dtypes("sum", { "f32" }, function(d) return { x():to(d) } end, { { 2 } })
  end
end)

t.test("a label out of range is named by the host's next wait", function()
  local x, target = ddp.randn{ 4, 3 }:to "cuda", ddp.tensor({ 0, 2, 7, 1 }, { dtype = "i64" }):to "cuda"
  t.fails(function()
    local loss = ops.cross_entropy(x, target)
    return loss:item()
  end, "cross_entropy: id 7, expected 0 to 2")
  t.near(ops.cross_entropy(x, ddp.zeros({ 4 }, { dtype = "i64" }):to "cuda"):item(), ops.cross_entropy(x:to "cpu", ddp.zeros({ 4 }, { dtype = "i64" })):item(), 1e-5)
end)

-- ---- norms ----------------------------------------------------------------------------------------------------------------------

local IMAGES = { { 8, 64, 16, 16 }, { 32, 3, 7, 7 }, { 2, 130, 5, 5 }, { 2000, 16 }, { 3, 1, 40, 40 }, { 3, 2050, 2, 2 } }

t.test("batch normalisation forward, row-major and channels-last, training and not", function()
  for _, s in ipairs(IMAGES) do
    for _, lay in ipairs { function(x) return x end, channels_last } do
      local function inputs(d)
        local c = s[2]
        return { n = 5, (randn(s, d):to "f64" + 2):to(d), positive(c, d), positive(c, d), positive(c, d), positive(c, d) }
      end
      in_dtypes("batch_norm", FLOATS, inputs, {}, lay, { 4, 5 })
      in_dtypes("batch_norm", { "f32", "bf16" }, inputs, { false }, lay, { 4, 5 })
      in_dtypes("batch_norm_act", { "f32", "f16" }, function(d)
        local x = inputs(d)
        x.n, x[6] = 6, randn(s, d)
        return x
      end, {}, lay, { 4, 5 })
    end
  end
end)

t.test("the gradients of batch normalisation, with relu and a residual too", function()
  for _, s in ipairs(IMAGES) do
    for _, lay in ipairs { function(x) return x end, channels_last } do
      local function inputs(d)
        local c = s[2]
        return { n = 5, randn(s, d), randn(s, d), positive(c, d), positive(c, d), positive(c, d) }
      end
      in_dtypes("batch_norm_grad", { "f32", "f64", "bf16" }, inputs, { true }, lay)
      in_dtypes("batch_norm_grad", { "f32" }, inputs, { false }, lay)
      in_dtypes("batch_norm_act_grad", { "f64" }, function(d) -- f64: no element is near relu's kink
        local x = inputs(d)
        x.n, x[6] = 6, positive(s[2], d)
        return x
      end, { true }, lay)
      in_dtypes("batch_norm_add_act_grad", { "f32", "f16" }, function(d)
        local x = inputs(d)
        x.n, x[6] = 6, randn(s, d)
        return x
      end, { true }, lay)
    end
  end
end)

t.test("batch normalisation keeps its digits where the mean is large", function()
  ddp.manual_seed(1)
  local x = (ddp.randn({ 64, 8, 6, 6 }, { dtype = "f64" }) + 1000):to "f32"
  for _, lay in ipairs { function(v) return v end, channels_last } do
    local got, want = both("batch_norm", { n = 5, x }, {}, lay)
    checks.compare({ got[3] }, { want[3] }, 1e-5, "rstd")
    checks.compare({ got[2] }, { want[2] }, 1e-7, "mean")
  end
end)

t.test("layer normalisation and its gradients, rows in registers and longer ones", function()
  for _, s in ipairs { { 1, 1 }, { 70, 8 }, { 60, 768 }, { 5, 2048 }, { 5, 4100 }, { 3, 20001 }, { 900, 64 } } do
    in_dtypes("layer_norm", FLOATS, function(d) return { n = 3, randn(s, d), positive(s[2], d), positive(s[2], d) } end)
    in_dtypes("layer_norm", { "f16" }, function(d) return { n = 3, randn(s, d), positive(s[2], d):to(d) } end)
    in_dtypes("layer_norm_grad", FLOATS, function(d) return { n = 5, randn(s, d), randn(s, d), positive(s[2], d), positive(s[1], d), positive(s[1], d) } end)
    in_dtypes("layer_norm_grad", { "bf16" }, function(d) return { n = 5, randn(s, d), randn(s, d), positive(s[2], d):to(d), positive(s[1], d), positive(s[1], d) } end)
  end
end)

t.test("the same bits whatever order the threads of a block run in", function()
  if not (os.getenv "DDP_CUDA_LIBS" or ""):find "double" then t.skip "only the test double runs threads in another order" end
  local want
  for schedule = 0, 5 do
    local pipe = io.popen(("DDP_EMU_SCHEDULE=%d DDP_DOUBLE_LEAKS=quiet luajit %s digest 2>/dev/null"):format(schedule, arg[0]))
    local text = pipe:read "*a"
    pipe:close()
    t.ok(#text > 10, "it computed nothing")
    want = want or text
    t.eq(text, want, "schedule " .. schedule)
  end
end)

t.done()
