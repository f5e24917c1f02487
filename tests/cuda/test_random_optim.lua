-- test_random_optim.lua -- draws, dropout, optimizer steps and gradients on a GPU against the CPU.
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local ddp = require "ddp"
local C = require("ddp.ffi").C

-- The rounding of one result, and of a normal, whose logarithm and cosine are within a unit in the last place each.
local ROUND = { f32 = 2e-7, f64 = 3e-16, f16 = 1e-3, bf16 = 8e-3 }
local NORMAL = { f32 = 8e-7, f64 = 1.2e-15, f16 = 2e-3, bf16 = 1.6e-2 }

-- fn(device) on both, from one seed; tolerance relative to the largest, at least 1
local function both(what, tol, fn)
  ddp.manual_seed(3)
  local want = { fn "cpu" }
  ddp.manual_seed(3)
  local got = { fn "cuda" }
  for i = 1, #got do
    assert(got[i]:device() == "cuda:0", what .. ": on " .. got[i]:device())
    got[i] = got[i]:to "cpu"
  end
  checks.compare(got, want, tol, what, 1)
end

local SIZES = { { 1 }, { 3, 5 }, { 300 }, { 1001 }, { 4, 256 }, { 2, 3, 4, 5 }, { 0 }, { 5000 } }

for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
  t.test("draws in " .. dtype .. " are the CPU's", function()
    for _, size in ipairs(SIZES) do
      local o = function(d) return { dtype = dtype, device = d } end
      both("rand", 0, function(d) return ops.rand(size, o(d)) end)
      both("randn", NORMAL[dtype], function(d) return ops.randn(size, o(d)) end)
      both("uniform_", 0, function(d) local x = ddp.zeros(size, { dtype = dtype }):to(d); return x:uniform_(-0.3, 1.7) end)
      both("normal_", NORMAL[dtype], function(d) local x = ddp.zeros(size, { dtype = dtype }):to(d); return x:normal_(0.1, 1.5) end)
      both("bernoulli_", 0, function(d) local x = ddp.zeros(size, { dtype = dtype }):to(d); return x:bernoulli_(0.3) end)
      both("dropout", ROUND[dtype], function(d) return ops.dropout(ddp.randn(size, { dtype = "f64" }):to(dtype):to(d), 0.1) end)
      both("dropout_grad", ROUND[dtype], function(d)
        return ops.dropout_grad(ddp.randn(size, { dtype = "f64" }):to(dtype):to(d), ddp.randint(0, 2, size):bool():to(d), 0.4)
      end)
    end
    for _, p in ipairs { 0, 0.5, 0.999, 1 - 1e-9 } do
      both("dropout p", ROUND[dtype], function(d) return ops.dropout(ddp.ones({ 64, 9 }, { dtype = dtype }):to(d), p) end)
    end
    both("drops NaN", 0, function(d) return ops.dropout(ddp.full({ 100 }, 0 / 0, { dtype = dtype }):to(d), 0.5) end)
  end)
  t.test("draws in " .. dtype .. " go by logical position whatever the layout", function()
    local function last(d) return ddp.zeros({ 2, 3, 4, 5 }, { dtype = dtype }):to(d):permute(1, 3, 4, 2) end
    both("uniform_", 0, function(d) return last(d):uniform_(-1, 1) end)
    both("bernoulli_", 0, function(d) return last(d):bernoulli_(0.5) end)
    both("part", 0, function(d) return ddp.zeros({ 6, 9 }, { dtype = dtype }):to(d):slice(2, 2, 8, 3):uniform_(0, 1) end)
    both("offset", 0, function(d) return ddp.zeros({ 100 }, { dtype = dtype }):to(d):slice(1, 2, 98):uniform_(0, 1) end)
    both("dropout", ROUND[dtype], function(d) return ops.dropout(ddp.ones({ 2, 3, 4, 5 }, { dtype = dtype }):to(d):permute(1, 4, 2, 3), 0.5) end)
    both("dropout of a part", ROUND[dtype], function(d) return ops.dropout(ddp.ones({ 6, 9 }, { dtype = dtype }):to(d):slice(2, 2, 8, 3), 0.5) end)
    both("dropout_grad", ROUND[dtype], function(d) return ops.dropout_grad(ddp.ones({ 6, 9 }, { dtype = dtype }):to(d):transpose(1, 2), ddp.ones({ 9, 6 }):bool():to(d), 0.5) end)
  end)
end

t.test("whole numbers, permutations, ranges", function()
  for _, dtype in ipairs { "i64", "i32", "u8", "f32", "f64", "f16", "bf16", "bool" } do
    both("randint " .. dtype, 0, function(d) return ops.randint(0, 10, { 50, 7 }, { dtype = dtype, device = d }) end)
    both("arange " .. dtype, 0, function(d) return ops.arange(1, 9, 0.5, { dtype = dtype, device = d }) end)
    both("arange " .. dtype, 0, function(d) return ops.arange(0, 1000, 7.7, { dtype = dtype == "u8" and "i32" or dtype, device = d }) end)
    both("eye " .. dtype, 0, function(d) return ops.eye(5, 0, { dtype = dtype, device = d }) end)
    both("eye " .. dtype, 0, function(d) return ops.eye(3, 700, { dtype = dtype, device = d }) end)
    both("eye " .. dtype, 0, function(d) return ops.eye(700, 3, { dtype = dtype, device = d }) end)
    both("bernoulli_ " .. dtype, 0, function(d) return ddp.zeros({ 33 }, { dtype = dtype }):to(d):bernoulli_(0.5) end)
  end
  both("randint far", 0, function(d) return ops.randint(-2 ^ 52, 2 ^ 52, { 1000 }, { device = d }) end)
  for _, n in ipairs { 0, 1, 10, 5000 } do both("randperm", 0, function(d) return ops.randperm(n, { device = d }) end) end
end)

local function steps(what, lists, tol, fn)
  both(what, tol, function(d)
    local all, out = {}, {}
    for k, list in ipairs(lists) do
      all[k] = {}
      for i, make in ipairs(list) do all[k][i] = make(d) end
    end
    out[1] = fn(all) or nil
    for _, list in ipairs(all) do for _, x in ipairs(list) do out[#out + 1] = x end end
    return unpack(out)
  end)
end
-- k lists of tensors of these sizes
local function lists(k, sizes, dtype, positive_from)
  local out = {}
  for j = 1, k do
    out[j] = {}
    for i, size in ipairs(sizes) do
      out[j][i] = function(d)
        local x = ddp.randn(size, { dtype = "f64" }):to(dtype or (i % 2 == 0 and "f64" or "f32"))
        return (positive_from and j >= positive_from and x:abs() or x):to(d)
      end
    end
  end
  return out
end
local many = {}
for i = 1, 150 do many[i] = { i } end
many[20] = { 5000 }
many[90] = { 3, 4097 }
local turned = { function(d) return ddp.randn({ 6, 9 }):to(d):transpose(1, 2) end, function(d) return ddp.randn({ 6, 9 }):to(d):slice(2, 1, 9, 2) end,
  function(d) return ddp.randn({ 37 }):to(d):slice(1, 2, 30) end }
local rows = { function(d) return ddp.randn({ 9, 6 }):to(d) end, function(d) return ddp.randn({ 6, 5 }):to(d) end, function(d) return ddp.randn({ 29 }):to(d) end }
local positive = { function(d) return ddp.rand({ 9, 6 }):to(d) end, function(d) return ddp.rand({ 6, 5 }):to(d) end, function(d) return ddp.rand({ 29 }):to(d) end }
local empty = { function(d) return ddp.zeros({ 0 }):to(d) end, function(d) return ddp.zeros({ 0 }):to(d) end, function(d) return ddp.zeros({ 0 }):to(d) end }

t.test("optimizer steps", function()
  for _, sizes in ipairs { { { 3 }, { 2, 4 } }, { { 37 }, { 4096 }, { 5000 }, {}, { 2, 0 } }, many } do
    for _, a in ipairs {
      { 0.1, 0.9, 0, 0.01 }, { 0.1, 0.9, 0.1, 0.01, false, false }, { 0.1, 0.9, 0, 0, true, true }, { 0.1, 0.9, 0, 0.1, true, false, 0.5, true },
      { 0.1 }, { 0.1, 0, 0, 0.1, false, false, 0.25, true },
    } do
      steps("sgd", lists(3, sizes), 1e-6, function(l) ops.sgd_step(l[1], l[2], l[3], unpack(a)) end)
    end
    for _, a in ipairs { { 0.01 }, { 0.01, 0.8, 0.99, 1e-6, 0.1, true, 3 }, { 0.01, 0.9, 0.999, 1e-8, 0.1, false, 2, 0.5, true } } do
      steps("adam", lists(4, sizes, nil, 4), 1e-6, function(l) ops.adam_step(l[1], l[2], l[3], l[4], unpack(a)) end)
    end
  end
  steps("sgd of parts", { turned, rows, rows }, 1e-6, function(l) ops.sgd_step(l[1], l[2], l[3], 0.1, 0.9, 0, 0.01) end)
  steps("sgd of parts without buffers", { turned, rows, empty }, 1e-6, function(l) ops.sgd_step(l[1], l[2], l[3], 0.1) end)
  steps("adam of parts", { turned, rows, rows, positive }, 1e-6, function(l) ops.adam_step(l[1], l[2], l[3], l[4], 0.1) end)
end)

t.test("gradients", function()
  for _, sizes in ipairs { { { 3 }, { 2, 4 } }, { { 37 }, { 4096 }, { 5000 }, {}, { 2, 0 } }, { { 140001 }, { 37 } }, many } do
    for _, dtype in ipairs { "f32", "f64", false } do
      steps("unscale", lists(1, sizes, dtype or nil), 1e-6, function(l) return ops.grad_unscale_(l[1], 0.25) end)
      steps("clip", lists(1, sizes, dtype or nil), 1e-6, function(l) return ops.grad_clip_(l[1], 0.5) end)
      steps("no clip", lists(1, sizes, dtype or nil), 1e-6, function(l) return ops.grad_clip_(l[1], 1e9) end)
      steps("norm alone", lists(1, sizes, dtype or nil), 1e-6, function(l) return ops.grad_clip_(l[1]) end)
      both("norm", 1e-6, function(d) local l = {}; for i, make in ipairs(lists(1, sizes, dtype or nil)[1]) do l[i] = make(d) end; return ops.grad_norm(l, 0.5) end)
    end
  end
  steps("unscale parts", { turned }, 1e-6, function(l) return ops.grad_unscale_(l[1], 0.25) end)
  steps("clip parts", { turned }, 1e-6, function(l) return ops.grad_clip_(l[1], 0.25) end)
  for _, bad in ipairs { 0 / 0, 1 / 0, -1 / 0, 1e30 } do
    for _, dtype in ipairs { "f32", "f64" } do
      local function with(d)
        local x = ddp.randn({ 5000 }, { dtype = dtype })
        x:slice(1, 4999, 4999):fill_(bad)
        return { ddp.randn({ 7 }):to(d), x:to(d) }
      end
      both("found", 1e-6, function(d) return ops.grad_norm(with(d)) end)
      both("unscale found", 1e-6, function(d) local l = with(d); return ops.grad_unscale_(l, 0.5), l[1], l[2] end)
      both("clip found", 1e-6, function(d) local l = with(d); return ops.grad_clip_(l, 0.5), l[1], l[2] end)
    end
  end
end)

t.test("linear_act_grad", function()
  local tol = { f32 = 1e-5, f64 = 1e-13, f16 = 3e-3, bf16 = 2e-2 }
  for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
    for _, size in ipairs { { 70, 37 }, { 3, 1100 }, { 5, 500, 7 }, { 1, 1 }, { 1000, 64 }, { 33, 8 }, { 0, 5 }, { 5, 0 }, { 3000, 8 } } do
      for act = 1, 3 do
        both("act " .. act, tol[dtype] * (size[1] >= 500 and 4 or 1), function(d)
          return ops.linear_act_grad(ddp.randn(size):to(dtype):to(d), ddp.randn(size):to(dtype):to(d), act)
        end)
      end
    end
    both("turned", tol[dtype], function(d) return ops.linear_act_grad(ddp.randn({ 20, 30 }):to(dtype):to(d):transpose(1, 2), ddp.randn({ 30, 20 }):to(dtype):to(d), 2) end)
  end
end)

t.test("an allocation that fails, scratch too, leaves nothing behind and the next call is right", function()
  local function cuda(size) return ddp.randn(size):to "cuda" end
  local g, m, ids = cuda { 5000, 24 }, cuda { 500, 33 }, ddp.randint(0, 300, { 5000 }):to "cuda"
  local calls = { function() return ops.embedding_grad(g, ids, 7000) end, function() return ops.grad_norm { g, m } end,
    function() return ops.linear_act_grad(m:transpose(1, 2), m:transpose(1, 2), 2) end }
  local function allocated()
    collectgarbage()
    collectgarbage()
    return ddp.memory_stats("cuda").allocated
  end
  for _, call in ipairs(calls) do call() end
  local before = allocated()
  for k = 1, 6 do
    for _, call in ipairs(calls) do
      C.ddp_memory_fail_at(k)
      pcall(call)
      C.ddp_memory_fail_at(0)
    end
  end
  t.ok(allocated() <= before, "bytes are left")
  local want = ops.embedding_grad(g:to "cpu", ids:to "cpu", 7000)
  checks.compare({ calls[1]():to "cpu" }, { want }, 1e-6, "embedding_grad", 1)
end)

t.test("check_nan names the op that made a NaN on a GPU", function()
  local x = ddp.tensor({ -1, 2, 3, 4 }):to "cuda"
  ddp.check_nan(true)
  local ok, why = pcall(function() return x:log() end)
  local ok2, why2 = pcall(function() return ddp.zeros({ 2, 40 }):to "cuda":transpose(1, 2):log() end)
  local ok3 = pcall(function() return x * 2 end)
  ddp.check_nan(false)
  t.ok(not ok and why:find("log made 1 NaN among the 4 elements", 1, true), tostring(why))
  t.ok(not ok2 and why2:find("log made 80 infinities", 1, true), tostring(why2))
  t.ok(ok3)
end)
t.done()
