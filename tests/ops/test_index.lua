-- test_index.lua -- rows by number, joining and the gradient of slice by the vectorised kernels: every dim, every width of an
-- element, other layouts, numbers that come several times, threads.
local t = require "harness"
local ddp = require "ddp"
local checks = require "op_checks"
local ops = require "ddp.ops"

local function numbers(size, dtype) return ddp.randint(-99, 100, size):to(dtype) end

-- op(x..., args...) by the vectorised kernels is the reference's, to the bit.
local function check(op, x, args, what)
  local inputs = { n = #x, unpack(x) }
  local want = checks.run(op, { args = args }, inputs, "ref")
  checks.compare(checks.run(op, { args = args }, inputs, "cpu"), want, 0, what)
  return want[1]
end

for _, dtype in ipairs { "u8", "f16", "bf16", "f32", "f64", "i64" } do
  t.test("slices by number are the reference's along every dim in " .. dtype, function()
    for _, size in ipairs { { 7 }, { 9, 33 }, { 5, 17, 3 }, { 2, 3, 4, 70 } } do
      local x = ddp.randint(0, 100, size):to(dtype)
      for dim = 1, #size do
        for _, n in ipairs { 0, 1, 8, 40 } do check(ops.index_select, { x, ddp.randint(0, size[dim], { n }) }, { dim }, n .. " along dim " .. dim) end
      end
    end
  end)
  t.test("tensors of any layout are joined as the reference does in " .. dtype, function()
    for _, n in ipairs { 1, 3, 16, 65 } do
      local a, b, c = numbers({ 4, n, 5 }, dtype), numbers({ 5, n, 4 }, dtype):permute(3, 2, 1), numbers({ 4, 2 * n, 5 }, dtype):slice(2, 1, -1, 2)
      for dim = 1, 3 do check(function(...) return ops.cat({ ... }, dim) end, { a, b, a:narrow(dim, 1, 1), c }, {}, "cat along " .. dim) end
      for dim = 1, 4 do check(function(...) return ops.stack({ ... }, dim) end, { a, b, c }, {}, "stack along " .. dim) end
    end
  end)
  t.test("the gradient of slice is g among zeros in " .. dtype, function()
    for _, step in ipairs { 1, 2, 3 } do
      for dim = 1, 3 do
        for _, start in ipairs { 0, 2 } do
          local size, x_size = { 5, 18, 7 }, { 5, 18, 7 }
          x_size[dim] = start + (size[dim] - 1) * step + 1 + start
          local stop = start + (size[dim] - 1) * step + 1
          check(ops.slice_grad, { numbers(size, dtype) }, { x_size, dim, start, stop, step }, ("dim %d, from %d by %d"):format(dim, start, step))
        end
      end
    end
  end)
end

for _, dtype in ipairs { "f32", "f16", "bf16" } do
  t.test("gradients of numbers that come several times are added up as in the reference in " .. dtype, function()
    for _, E in ipairs { 1, 15, 64, 130 } do
      local ids = ddp.randint(0, 5, { 40 })
      check(ops.embedding_grad, { numbers({ 40, E }, dtype), ids }, { 6 }, E .. " columns")
      for dim = 1, 3 do
        local size = { 3, 4, E }
        size[dim] = 40
        local x_size = { unpack(size) }
        x_size[dim] = 6
        check(ops.index_select_grad, { numbers(size, dtype), ids }, { x_size, dim }, E .. " columns, along dim " .. dim)
      end
    end
  end)
end

t.test("large ones, shared among threads, are the reference's", function()
  local w, ids = numbers({ 3000, 200 }, "f32"), ddp.randint(0, 3000, { 4000 })
  check(ops.embedding, { w, ids }, {}, "embedding")
  check(ops.index_select, { w, ddp.randint(0, 200, { 300 }) }, { 2 }, "columns")
  check(ops.embedding_grad, { numbers({ 4000, 200 }, "f32"), ids }, { 3000 }, "embedding, backward")
  check(ops.index_select_grad, { numbers({ 50, 40, 300 }, "f32"), ddp.randint(0, 7, { 40 }) }, { { 50, 9, 300 }, 2 }, "along dim 2")
end)
t.done()
