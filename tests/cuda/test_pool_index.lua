-- test_pool_index.lua -- pooling, picking and joining on a GPU against the reference kernels on the CPU.
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local ddp = require "ddp"

local TOL = { f32 = 1e-5, f64 = 1e-12, f16 = 2e-3, bf16 = 1.6e-2 }

local function both(what, dtype, inputs, fn)
  ddp.manual_seed(3)
  local want = checks.run(fn, {}, { n = #inputs, unpack(inputs) }, "ref")
  local there = { n = #inputs }
  for i, x in ipairs(inputs) do
    if type(x) == "table" and not ddp.is_tensor(x) then
      there[i] = {}
      for k, y in ipairs(x) do there[i][k] = y:to "cuda" end
    else there[i] = ddp.is_tensor(x) and x:to "cuda" or x end
  end
  ddp.manual_seed(3)
  local got = checks.run(fn, {}, there)
  for i = 1, #got do
    assert(got[i]:device() == "cuda:0", what .. ": on " .. got[i]:device())
    got[i] = got[i]:to "cpu"
  end
  checks.compare(got, want, TOL[dtype] or 0, what .. " " .. dtype, 1)
end

local function rand(size, dtype) return ddp.randn(size, { dtype = "f64" }):to(dtype) end
local function channels_last(x) -- the same values, channels innermost
  return x:permute(1, 3, 4, 2):contiguous():permute(1, 4, 2, 3)
end

for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
  t.test("pooling in " .. dtype, function()
    ddp.manual_seed(1)
    for _, s in ipairs {
      { 2, 3, 4, 4, 2 }, { 1, 2, 5, 6, 3, 2, 1 }, { 2, 16, 9, 9, 3, 1, 1 }, { 3, 64, 14, 13, 3, 2, 1 }, { 1, 8, 1, 1, 1 }, { 2, 24, 7, 7, 7 },
      { 1, 8, 40, 40, 33, 3, 2 }, { 0, 8, 4, 4, 2 },
    } do
      local n, c, h, w, k, stride, pad = unpack(s)
      stride, pad = stride or 0, pad or 0
      local x = rand({ n, c, h, w }, dtype)
      if n == 2 and c == 16 then x = (ddp.randint(-2, 3, { n, c, h, w })):to(dtype) end
      for layout, v in pairs { rows = x, last = n > 0 and channels_last(x) or x, part = rand({ n, c, h + 3, w * 2 }, dtype):slice(3, 2, h + 1):slice(4, 1, 2 * w, 2) } do
        local what = ("%s k%d s%d p%d %dx%dx%dx%d"):format(layout, k, stride, pad, n, c, h, w)
        both("max " .. what, dtype, { v }, function(a) return ops.max_pool2d(a, k, stride, pad) end)
        for _, include in ipairs { true, false } do
          both("avg " .. what, dtype, { v }, function(a) return ops.avg_pool2d(a, k, stride, pad, include) end)
        end
        local y, places = ops.max_pool2d(v, k, stride, pad)
        local g = rand(y:size(), dtype)
        for _, gl in ipairs { g, n > 0 and channels_last(g) or g } do
          both("max grad " .. what, dtype, { gl, places }, function(a, b) return ops.max_pool2d_grad(a, b, { n, c, h, w }, k, stride, pad) end)
          both("max grad anywhere " .. what, dtype, { gl, places:contiguous() }, function(a, b) return ops.max_pool2d_grad(a, b, { n, c, h, w }) end)
          for _, include in ipairs { true, false } do
            both("avg grad " .. what, dtype, { gl }, function(a) return ops.avg_pool2d_grad(a, { n, c, h, w }, k, stride, pad, include) end)
          end
        end
      end
    end
  end)
  t.test("adaptive pooling in " .. dtype, function()
    for _, s in ipairs { { 2, 3, 5, 7, 2, 3 }, { 2, 16, 4, 4, 1, 1 }, { 2, 40, 7, 7, 1, 1 }, { 1, 3, 64, 50, 1, 1 }, { 1, 264, 9, 9, 1, 2 }, { 1, 3, 3, 2, 5, 4 } } do
      local n, c, h, w, ho, wo = unpack(s)
      local x, g = rand({ n, c, h, w }, dtype), rand({ n, c, ho, wo }, dtype)
      for layout, v in pairs { rows = x, last = channels_last(x) } do
        both("adaptive " .. layout, dtype, { v }, function(a) return ops.adaptive_avg_pool2d(a, { ho, wo }) end)
      end
      for _, v in ipairs { g, channels_last(g) } do both("adaptive grad", dtype, { v }, function(a) return ops.adaptive_avg_pool2d_grad(a, { n, c, h, w }) end) end
    end
  end)
  t.test("max takes NaN in " .. dtype, function()
    local x = rand({ 2, 8, 6, 6 }, dtype)
    x:slice(3, 2, 3):fill_(0 / 0)
    x:slice(4, 5, 6):fill_(-1 / 0)
    for _, v in ipairs { x, channels_last(x) } do both("NaN", dtype, { v }, function(a) return ops.max_pool2d(a, 2, 1, 1) end) end
  end)
end

for _, dtype in ipairs { "f32", "f64", "f16", "bf16", "i64", "u8", "bool" } do
  local function any(size)
    if dtype == "bool" then return ddp.randint(0, 2, size):bool() end
    return (dtype == "i64" or dtype == "u8") and ddp.randint(0, 100, size):to(dtype) or rand(size, dtype)
  end
  t.test("picking in " .. dtype, function()
    for _, s in ipairs { { 4, 3 }, { 50, 64 }, { 1, 1 }, { 7, 1 }, { 3, 700 } } do
      local x = any(s)
      for n_ids in pairs { [0] = 1, [1] = 1, [5] = 1, [300] = 1 } do
        local ids = ddp.randint(0, s[1], { n_ids })
        both("rows", dtype, { x, ids }, function(a, b) return ops.index_select(a, b, 1) end)
        both("rows of turned", dtype, { any { s[2], s[1] }, ids }, function(a, b) return ops.index_select(a:transpose(1, 2), b, 1) end)
        both("columns", dtype, { any { 6, s[1] }, ids }, function(a, b) return ops.index_select(a, b, 2) end)
        both("middle", dtype, { any { 3, s[1], 8 }, ids }, function(a, b) return ops.index_select(a, b, 2) end)
        both("every other id", dtype, { x, ddp.randint(0, s[1], { 2 * n_ids }) }, function(a, b) return ops.index_select(a, n_ids > 0 and b:slice(1, 1, 2 * n_ids, 2) or b, 1) end)
        both("embedding", dtype, { x, ids }, ops.embedding)
        local words = ddp.randint(0, s[1], { 5, 7 })
        both("embedding turned", dtype, { x, words }, function(a, b) return ops.embedding(a, b:transpose(1, 2)) end)
        both("gather", dtype, { x, ddp.randint(0, s[1], { n_ids, s[2] }) }, function(a, b) return ops.gather(a, b, 1) end)
        both("gather along 2", dtype, { any { 9, s[1] }, ddp.randint(0, s[1], { 8, n_ids }) }, function(a, b) return ops.gather(a, b, 2) end)
      end
    end
  end)
  if dtype ~= "bool" and dtype ~= "u8" then
    t.test("adding back in " .. dtype, function()
      for _, s in ipairs { { 4, 3, 300 }, { 50, 64, 500 }, { 1, 8, 700 }, { 7, 1, 5 }, { 70000, 4, 6000 }, { 3, 40, 0 }, { 300, 5, 5000 } } do
        local rows, e, n = unpack(s)
        local ids = ddp.randint(0, rows, { n })
        if n == 6000 then ids:slice(1, 1000, 4000):fill_(69999) end
        both("embedding grad", dtype, { any { n, e }, ids }, function(g, b) return ops.embedding_grad(g, b, rows) end)
        both("rows", dtype, { any { n, e }, ids }, function(g, b) return ops.index_select_grad(g, b, { rows, e }, 1) end)
        both("rows of turned g", dtype, { any { e, n }, ids }, function(g, b) return ops.index_select_grad(g:transpose(1, 2), b, { rows, e }, 1) end)
        if rows < 1000 then
          both("middle", dtype, { any { 3, n, e }, ids }, function(g, b) return ops.index_select_grad(g, b, { 3, rows, e }, 2) end)
          both("columns", dtype, { any { 3, n }, ids }, function(g, b) return ops.index_select_grad(g, b, { 3, rows }, 2) end)
          both("gather grad", dtype, { any { n, e }, ddp.randint(0, rows, { n, e }) }, function(g, b) return ops.gather_grad(g, b, { rows, e + 1 }, 1) end)
          both("few", dtype, { any { 6, e }, ddp.randint(0, rows, { 6, e }) }, function(g, b) return ops.gather_grad(g, b, { rows, e }, 1) end)
          both("few along 2", dtype, { any { e, 6 }, ddp.randint(0, rows, { e, 6 }) }, function(g, b) return ops.gather_grad(g, b, { e, rows }, 2) end)
        end
        if n % 10 == 0 and n > 0 then
          both("embedding grad of turned ids", dtype, { any { n / 10, 10, e }, ids }, function(g, b)
            return ops.embedding_grad(g, b:reshape { 10, n / 10 }:transpose(1, 2), rows)
          end)
        end
      end
    end)
  end
  t.test("joining and laying in " .. dtype, function()
    both("cat", dtype, { { any { 2, 3 }, any { 1, 3 }, any { 0, 3 } } }, function(l) return ops.cat(l, 1) end)
    both("cat 2", dtype, { { any { 20, 16 }, any { 20, 8 }, any { 20, 32 } } }, function(l) return ops.cat(l, 2) end)
    both("cat 2 odd", dtype, { { any { 20, 3 }, any { 20, 8 } } }, function(l) return ops.cat(l, 2) end)
    both("cat turned", dtype, { { any { 5, 20 }, any { 20, 8 } } }, function(l) return ops.cat({ l[1]:transpose(1, 2), l[2] }, 2) end)
    both("cat parts", dtype, { { any { 20, 9 }, any { 1, 8 } } }, function(l) return ops.cat({ l[1]:slice(2, 1, 8), l[2]:expand { 20, 8 } }, 2) end)
    local many = {}
    for i = 1, 150 do many[i] = any { 4, 5 } end
    both("stack many", dtype, { many }, function(l) return ops.stack(l, 2) end)
    both("stack last", dtype, { many }, function(l) return ops.stack(l, -1) end)
    both("cat many", dtype, { many }, function(l) return ops.cat(l, 1) end)
    both("lay", dtype, { any { 2, 3 } }, function(g) return ops.slice_grad(g, { 5, 3 }, 1, 1, 5, 2) end)
    both("lay 64", dtype, { any { 2, 64 } }, function(g) return ops.slice_grad(g, { 7, 64 }, 1, 3, 5, 1) end)
    both("lay last", dtype, { any { 20, 5 } }, function(g) return ops.slice_grad(g, { 20, 33 }, 2, 3, 27, 5) end)
    both("lay all", dtype, { any { 20, 5 } }, function(g) return ops.slice_grad(g, { 20, 5 }, 2, 0, 5, 1) end)
    both("lay one", dtype, { any { 20, 1, 16 } }, function(g) return ops.slice_grad(g, { 20, 1, 16 }, 2, 0, 1, 1) end)
    both("lay expanded", dtype, { any { 1, 1, 16 } }, function(g) return ops.slice_grad(g:expand { 4, 3, 16 }, { 4, 9, 16 }, 2, 2, 5, 1) end)
    both("lay nothing", dtype, { any { 20, 0 } }, function(g) return ops.slice_grad(g, { 20, 5 }, 2, 1, 1, 1) end)
  end)
end

t.test("an id out of range is told at the next wait", function()
  local x = ddp.randn({ 4, 3 }):to "cuda"
  for _, id in ipairs { 4, -1 } do
    local ids = ddp.full({ 3 }, id, { dtype = "i64" }):to "cuda"
    t.fails(function() return ops.index_select(x, ids, 1):to "cpu" end, "index_select: id " .. id .. ", expected 0 to 3")
  end
  t.fails(function() return ops.embedding_grad(x, ddp.full({ 4 }, 12, { dtype = "i64" }):to "cuda", 10):to "cpu" end, "embedding_grad: id 12, expected 0 to 9")
end)
t.done()
