-- test_chain.lua -- generated kernels: chains of elementwise ops against the CPU's ops one by one, on the double. test_nvrtc.lua
-- compiles them by the real NVRTC.
local mode = ... -- "one", "real": what a process of its own is to do
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local ddp = require "ddp"
local base = require "ddp.ffi"
local ffi = require "ffi"

ffi.cdef [[
typedef struct ddp_chain_step { const char *op; int32_t in[3]; int32_t to; } ddp_chain_step;
typedef struct ddp_chain {
    int32_t n_in, n_steps, n_out;
    int32_t dtype[8];
    int32_t is_number[8];
    ddp_chain_step step[16];
    int32_t out[4];
} ddp_chain;
int ddp_cuda_chain(const ddp_chain *ch, ddp_tensor *const *in, ddp_tensor *const *out);
int ddp_cuda_chain_compile(const ddp_chain *ch, const char *arch, char *log, size_t n);
int setenv(const char *name, const char *value, int overwrite);
]]
if not mode then ffi.C.setenv("DDP_CACHE", "", 1) end -- each kernel is compiled anew
local cuda = ffi.load((os.getenv "DDP_BUILD" or "build") .. "/libddp_cuda.so")

local DTYPE = { f32 = 0, f64 = 1, f16 = 2, bf16 = 3, i64 = 4, i32 = 5, u8 = 6, bool = 7 }
local FLOATS = { "f32", "f64", "f16", "bf16" }

-- Every op of elementwise.def, with what the CPU computes for it.
local OPS = {}
for line in io.lines "kernels/elementwise.def" do
  local kind, name = line:match "^DDP_([A-Z_0-9]+)%((%w+),"
  if not name then kind, name = line:match "^DDP_([A-Z_0-9]+)%(([%w_]+)," end
  if name then
    OPS[#OPS + 1] = { name = name, binary = kind:find "^BINARY" or kind == "COMPARE" or kind == "VARIANT_2", compare = kind == "COMPARE", cpu = ops[name] }
  end
end
local VARIANTS = { gelu_exact = function(x) return ops.gelu(x, false) end, gelu_tanh = function(x) return ops.gelu(x, true) end,
  gelu_grad_exact = function(g, x) return ops.gelu_grad(g, x, false) end, gelu_grad_tanh = function(g, x) return ops.gelu_grad(g, x, true) end }
for _, op in ipairs(OPS) do op.cpu = op.cpu or VARIANTS[op.name] end

-- { inputs = { "f32", ... }, numbers = { [2] = 0.5 }, steps = { { "add", 1, 2 }, ... }, out = { 3 } }: values from 1.
local function chain_of(d)
  local ch = ffi.new "ddp_chain"
  ch.n_in, ch.n_steps, ch.n_out = #d.inputs, #d.steps, #d.out
  for i, dtype in ipairs(d.inputs) do
    ch.dtype[i - 1] = DTYPE[dtype]
    ch.is_number[i - 1] = d.numbers and d.numbers[i] and 1 or 0
  end
  for k, s in ipairs(d.steps) do
    ch.step[k - 1].op = s[1]
    for j = 2, 4 do ch.step[k - 1]["in"][j - 2] = (s[j] or 1) - 1 end
    ch.step[k - 1].to = DTYPE[s.to or "f32"]
  end
  for i, v in ipairs(d.out) do ch.out[i - 1] = v - 1 end
  return ch
end

local function grown(v, like)
  return type(v) == "number" and ddp.full(like:size(), v, { dtype = like:dtype() }) or v:expand(like:size()):contiguous()
end

-- The steps one by one on the CPU, results in x[1]'s size. x: tensors and numbers. Gradients' ops do not broadcast by themselves.
local function by_steps(d, x)
  local v = { unpack(x, 1, #d.inputs) }
  for _, s in ipairs(d.steps) do
    local r
    if s[1] == "cast" then r = v[s[2]]:to(s.to)
    elseif s[1] == "where" then r = ops.where(v[s[2]], v[s[3]], v[s[4]])
    else
      for _, op in ipairs(OPS) do if op.name == s[1] then
        if op.name:find "_grad" then r = op.cpu(grown(v[s[2]], x[1]), grown(v[s[3]], x[1])) else r = op.binary and op.cpu(v[s[2]], v[s[3]]) or op.cpu(v[s[2]]) end
      end end
    end
    v[#v + 1] = r
  end
  local out = {}
  for i, k in ipairs(d.out) do out[i] = grown(v[k], x[1]) end
  return out
end

local function run(d, x, place)
  local ch, n = chain_of(d), #d.inputs
  local want = by_steps(d, x)
  local got, there = {}, {}
  for i, w in ipairs(want) do got[i] = ddp.full(w:size(), 77, { dtype = w:dtype() ~= "bool" and w:dtype() or "u8" }):to(w:dtype()):to "cuda" end
  for i = 1, n do
    there[i] = type(x[i]) == "number" and base.C.ddp_scalar(x[i]) or place(x[i])
  end
  local status = cuda.ddp_cuda_chain(ch, ffi.new("ddp_tensor *[8]", there), ffi.new("ddp_tensor *[4]", got))
  base.check(status)
  for i, y in ipairs(got) do got[i] = y:to "cpu" end
  return got, want
end

-- exp and its like may differ by a few ulps from the CPU's, which has its own; each step rounds anew.
local TOL = { f32 = 4e-6, f64 = 1e-13, f16 = 4e-3, bf16 = 3e-2 }
local function agree(d, x, place, what)
  local got, want = run(d, x, place)
  for i = 1, #got do
    t.eq(got[i]:dtype(), want[i]:dtype(), what)
    checks.compare({ got[i] }, { want[i] }, TOL[want[i]:dtype()] or 0, what)
  end
end
local function plain(x) return x:to "cuda" end
local function transposed(x) return x:dim() < 2 and x:to "cuda" or x:transpose(1, 2):contiguous():to("cuda"):transpose(1, 2) end

local function text_of(d)
  local parts = {}
  for _, s in ipairs(d.steps) do parts[#parts + 1] = s[1] end
  return table.concat(d.inputs, ",") .. ": " .. table.concat(parts, " ")
end

-- n ops of the list side by side, each on inputs 1 and 2: a chain of one for each.
local function ones(dtype, first, n)
  local d = { inputs = { dtype, dtype }, steps = {}, out = {} }
  for k = first, math.min(first + n - 1, #OPS) do
    d.steps[#d.steps + 1] = { OPS[k].name, 1, 2 }
    d.out[#d.out + 1] = 2 + #d.steps
  end
  return d
end

-- A chain of up to 8 steps over three tensors and a number, some results cast to another dtype.
local function random_chain(dtype)
  local d = { inputs = { dtype, dtype, dtype, dtype }, numbers = { [4] = 0.75 }, steps = {}, out = {} }
  local values, n = { 1, 2, 3, 4 }, math.random(2, 8)
  while #d.steps < n do
    local op = OPS[math.random(#OPS)]
    if op.name == "pow" or op.name == "log" or op.name == "sqrt" or op.name == "div" or op.name == "exp" then goto again end -- leave the range
    do
      local a, b = values[math.random(#values)], values[math.random(#values)]
      if a == 4 then a = 1 end
      d.steps[#d.steps + 1] = { op.name, a, op.binary and b or nil }
      local v = 4 + #d.steps
      if op.compare then
        d.steps[#d.steps + 1] = { "where", v, a, b }
        v = v + 1
      end
      values[#values + 1] = v
    end
    ::again::
  end
  local last = 4 + #d.steps
  d.steps[#d.steps + 1] = { "cast", last, to = FLOATS[math.random(4)] }
  d.out = { last, last + 1 }
  return d
end

-- ---- what the tests below run in processes of their own ---------------------------------------------------------------------

if mode == "one" then
  local d = { inputs = { "f32", "f32" }, steps = { { "add", 1, 2 }, { "relu", 3 } }, out = { 4 } }
  local ok, err = pcall(function()
    agree(d, { ddp.randn { 10 }, ddp.randn { 10 } }, plain, "one")
    agree(d, { ddp.randn { 10 }, ddp.randn { 10 } }, plain, "two")
  end)
  print(ok and "right" or err)
  os.exit(0)
end

local ARCHS = { "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120" }
if mode == "real" then -- test_nvrtc.lua, without the double
  local function compiles(d, arch)
    local log = ffi.new("char[4000]")
    base.check(cuda.ddp_cuda_chain_compile(chain_of(d), arch, log, 4000))
    local said = ffi.string(log)
    t.ok(said == "" , text_of(d) .. " for " .. arch .. ": " .. said)
  end
  if not pcall(compiles, ones("f32", 1, 1), "sm_90") then
    local ok, err = pcall(compiles, ones("f32", 1, 1), "sm_90")
    print((ok or tostring(err):find "is not there") and "skip the real NVRTC compiles: " .. tostring(err) or "not ok the real NVRTC compiles: " .. tostring(err))
    os.exit(0)
  end
  math.randomseed(12)
  for i, arch in ipairs(ARCHS) do
    t.test("the real NVRTC compiles every op and random chains for " .. arch .. " without a word", function()
      for k, dtype in ipairs(FLOATS) do
        for at = 1, #OPS, 4 do if arch == "sm_90" or (at + k + i) % 4 == 0 then compiles(ones(dtype, at, 4), arch) end end
        compiles(random_chain(dtype), arch)
      end
      compiles({ inputs = { "i64", "u8", "bool" }, steps = { { "cast", 2, to = "i64" }, { "mul", 1, 4 }, { "where", 3, 5, 1 }, { "eq", 5, 6 } }, out = { 5, 6, 7 } }, arch)
    end)
  end
  os.exit(t.failed == 0 and 0 or 1)
end
-- ---- on the double ------------------------------------------------------------------------------------------------------

local double = os.getenv "DDP_CUDA_LIBS" and pcall(function() return ddp.zeros({ 1 }):to "cuda" end)
local function need_double() if not double then t.skip "no test double" end end

for _, dtype in ipairs(FLOATS) do
  t.test("every op of the list as a generated kernel in " .. dtype .. " is the CPU's", function()
    need_double()
    ddp.manual_seed(5)
    local x, y = (ddp.rand({ 3, 37 }, { dtype = "f64" }) * 3 + 0.1):to(dtype), (ddp.randn({ 3, 37 }, { dtype = "f64" })):to(dtype)
    for k = 1, #OPS, 4 do
      local d = ones(dtype, k, 4)
      agree(d, { x, y }, plain, text_of(d))
    end
  end)
end

for _, dtype in ipairs(FLOATS) do
  t.test("random chains in " .. dtype .. " are the CPU's ops one by one, over any strides", function()
    need_double()
    math.randomseed(11)
    ddp.manual_seed(6)
    for _ = 1, 2 do
      local d = random_chain(dtype)
      local function random(...) return (ddp.randn({ ... }, { dtype = "f64" })):to(dtype) end
      agree(d, { random(5, 40), random(5, 40), random(5, 40), 0.75 }, plain, text_of(d))
      agree(d, { random(5, 40), random(40), random(5, 1), 0.75 }, plain, text_of(d) .. " broadcast")
      agree(d, { random(6, 7), random(6, 7), random(1, 7), 0.75 }, transposed, text_of(d) .. " transposed")
      agree(d, { random(1), random(1), random(1), 0.75 }, plain, text_of(d) .. " of one element")
    end
  end)
end

t.test("integers wrap, booleans choose, empty tensors are nothing, NaN stays", function()
  need_double()
  local d = { inputs = { "i32", "i32" }, steps = { { "mul", 1, 2 }, { "lt", 1, 2 }, { "where", 4, 3, 1 }, { "cast", 5, to = "i64" } }, out = { 3, 4, 5, 6 } }
  local x, y = ddp.tensor({ 2 ^ 30, -5, 7, 2 ^ 31 - 1 }):to "i32", ddp.tensor({ 4, 3, 7, 2 }):to "i32"
  agree(d, { ddp.randint(-2 ^ 31, 2 ^ 31, { 33 }):to "i32", ddp.randint(-2 ^ 31, 2 ^ 31, { 33 }):to "i32" }, plain, "i32")
  agree(d, { x, y }, plain, "i32")
  local f = { inputs = { "f32", "f32" }, steps = { { "maximum", 1, 2 }, { "relu", 3 } }, out = { 3, 4 } }
  local some = { math.huge, -math.huge, 0 / 0, 1 }
  agree(f, { ddp.tensor(some), ddp.tensor { 0 / 0, 1, 2, 0 / 0 } }, plain, "NaN")
  run(f, { ddp.zeros { 0, 3 }, ddp.zeros { 0, 3 } }, plain)
end)

t.test("each step is rounded to its dtype, as if its op had run alone; products do not melt into sums", function()
  need_double()
  for dtype, big in pairs { f16 = 2048, bf16 = 256, f32 = 2 ^ 24, f64 = 2 ^ 53 } do
    local d = { inputs = { dtype, dtype }, steps = { { "add", 1, 2 }, { "sub", 3, 1 } }, out = { 4 } }
    local got = run(d, { ddp.full({ 3 }, big, { dtype = dtype }), ddp.ones({ 3 }, { dtype = dtype }) }, plain)
    t.eq(got[1]:tolist(), { 0, 0, 0 }, dtype .. ": (x + 1) - x")
  end
end)

t.test("what cannot be a chain is refused with the step", function()
  local function fails(d, text)
    local log = ffi.new("char[1000]")
    t.fails(function() base.check(cuda.ddp_cuda_chain_compile(chain_of(d), "sm_90", log, 1000)) end, text)
  end
  fails({ inputs = { "f32" }, steps = { { "relu", 1 }, { "nothing", 1 } }, out = { 2 } }, "chain: step 2, nothing: no such op in elementwise.def")
  fails({ inputs = { "f32", "f16" }, steps = { { "add", 1, 2 } }, out = { 3 } }, "chain: step 1, add: operands of different dtypes")
  fails({ inputs = { "i64" }, steps = { { "exp", 1 } }, out = { 2 } }, "chain: step 1, exp: of floats only")
  fails({ inputs = { "f32" }, steps = { { "relu", 2 } }, out = { 2 } }, "chain: step 1, relu: an operand that is not there")
  fails({ inputs = { "f32" }, steps = { { "relu", 1 } }, out = { 5 } }, "chain: result 1 is not there")
  fails({ inputs = { "f32" }, steps = { { "where", 1, 1, 1 } }, out = { 2 } }, "a condition that is not bool")
end)

-- ---- caches ------------------------------------------------------------------------------------------------------------

local function shell(command)
  local pipe = io.popen(command .. " 2>&1")
  local out = pipe:read "*a"
  pipe:close()
  return out
end

-- Runs one small chain in a process of its own, with these settings; what it printed, and how often NVRTC compiled.
local function child(settings)
  local log = os.tmpname()
  local out = shell(("DDP_DOUBLE_LOG=%s %s luajit tests/cuda/test_chain.lua one"):format(log, settings))
  local compiled = 0
  for line in io.lines(log) do if line:find "nvrtcCompileProgram" then compiled = compiled + 1 end end
  os.remove(log)
  return out, compiled
end

t.test("a kernel is compiled once a process, once a cache on disk, and anew where the file is damaged", function()
  need_double()
  local dir = shell("mktemp -d"):gsub("%s", "")
  local settings = "DDP_CACHE=" .. dir .. "/a/b"
  local function one(want, what)
    local out, compiled = child(settings)
    t.ok(out:find "^right", what .. ": " .. out)
    t.eq(compiled, want, what .. ": compiled")
  end
  one(1, "first")
  one(0, "from disk")
  local file = shell("ls " .. dir .. "/a/b/chain-*"):gsub("%s", "")
  shell("truncate -s -3 " .. file)
  one(1, "cut short")
  one(0, "made anew")
  shell(("printf x | dd of=%s bs=1 seek=200 conv=notrunc"):format(file))
  one(1, "another byte")
  shell("chmod -x " .. file)
  settings = settings .. " DDP_DOUBLE_NVRTC=13010"
  one(1, "another NVRTC")
  settings = "DDP_CACHE="
  one(1, "no folder")
  settings = "DDP_CACHE=/proc/none"
  one(1, "a folder that cannot be made")
  t.eq(shell("ls " .. dir .. "/a/b | grep -c XXXXXX; ls " .. dir .. "/a/b/ | wc -l"):gsub("%s+", " "), "0 2 ", "files left")
  shell("rm -r " .. dir)
end)

t.test("errors of NVRTC are named: not there, and a source that does not compile with its line", function()
  need_double()
  local dir = shell("mktemp -d"):gsub("%s", "")
  shell(("cp -P %s/*.so* %s; rm %s/libnvrtc*"):format(os.getenv "DDP_CUDA_LIBS", dir, dir))
  local out = shell(("DDP_CACHE= DDP_CUDA_LIBS=%s luajit tests/cuda/test_chain.lua one"):format(dir))
  t.ok(out:find("libnvrtc.so.13 is not there: install NVRTC of CUDA 13", 1, true), out)
  shell("rm -r " .. dir)
  out = child "DDP_CACHE= DDP_DOUBLE_FAIL=nvrtcCompileProgram:1:4"
  t.ok(out:find("nvrtcCompileProgram: NVRTC_ERROR", 1, true), out)
  out = child "DDP_CACHE= DDP_DOUBLE_NVRTC_BREAKS=1"
  t.ok(out:find("a generated kernel does not compile for sm_90: generated.cu(", 1, true) and out:find("error: ", 1, true) and out:find("; line %d+: %S"), out)
end)

if double then shell(("rm -rf %s/nvrtc"):format(os.getenv "DDP_CUDA_LIBS")) end -- what the double of NVRTC compiled
t.done()
