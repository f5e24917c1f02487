-- test_copies.lua -- copies between layouts: every order of dims, sizes around the blocks that are turned at once, every width
-- of an element, parts of larger tensors, threads.
local t = require "harness"
local ddp = require "ddp"
local checks = require "op_checks"
local ops = require "ddp.ops"

local WIDTHS = { "u8", "bf16", "f32", "i64" } -- 1, 2, 4 and 8 bytes

local function permutations(n)
  local out, at = {}, {}
  local function place(k, used)
    if k > n then
      out[#out + 1] = { unpack(at) }
      return
    end
    for d = 1, n do
      if not used[d] then
        used[d], at[k] = true, d
        place(k + 1, used)
        used[d] = nil
      end
    end
  end
  place(1, {})
  return out
end

-- Whole numbers, 0 to 250: exact in every dtype.
local function numbers(size, dtype) return ddp.randint(0, 251, size):to(dtype) end

-- x, its dims in another order, laid into rows, and from rows back into that order: as the reference does it.
local function check(x, order)
  local what = ("%s [%s] as %s"):format(x:dtype(), table.concat(x:size(), ","), table.concat(order, ","))
  local turned = x:permute(order)
  local rows = ops.clone(turned)
  t.ok(checks.last_kernel():find "cpu", "by " .. checks.last_kernel())
  checks.compare({ rows }, checks.run(ops.clone, {}, { n = 1, turned }, "ref"), 0, what)
  local back = ddp.full(x:size(), 251, { dtype = x:dtype() })
  back:permute(order):copy_(rows)
  checks.compare({ back }, { x }, 0, what .. ", back")
end

for _, dtype in ipairs(WIDTHS) do
  t.test("matrices of all sizes around a block are turned in " .. dtype, function()
    for _, m in ipairs { 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130 } do
      for _, n in ipairs { 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 200 } do check(numbers({ m, n }, dtype), { 2, 1 }) end
    end
  end)
  t.test("three dims in every order in " .. dtype, function()
    for _, size in ipairs { { 2, 3, 5 }, { 3, 17, 66 }, { 70, 3, 20 }, { 33, 65, 2 }, { 9, 4, 4 }, { 5, 130, 67 } } do
      for _, order in ipairs(permutations(3)) do check(numbers(size, dtype), order) end
    end
  end)
  t.test("four dims in every order in " .. dtype, function()
    for _, size in ipairs { { 2, 3, 4, 5 }, { 3, 17, 5, 33 }, { 2, 66, 3, 9 }, { 4, 3, 16, 16 }, { 2, 64, 8, 8 } } do
      for _, order in ipairs(permutations(4)) do check(numbers(size, dtype), order) end
    end
  end)
  t.test("parts of larger tensors are turned, and nothing beside them, in " .. dtype, function()
    for _, size in ipairs { { 16, 64 }, { 37, 70 }, { 3, 70 }, { 70, 3 }, { 64, 4 } } do
      for offset = 1, 3 do
        local from, to = numbers({ size[1] + 5, size[2] + 7 }, dtype), ddp.full({ size[2] + 5, size[1] + 7 }, 251, { dtype = dtype })
        local x = from:narrow(1, offset, size[1]):narrow(2, offset, size[2])
        local y = to:narrow(1, offset, size[2]):narrow(2, offset, size[1])
        local want = to:clone()
        y:copy_(x:t())
        local w = want:narrow(1, offset, size[2]):narrow(2, offset, size[1])
        checks.run(ops.copy_, {}, { n = 2, w, x:t() }, "ref")
        checks.compare({ to }, { want }, 0, ("%d x %d from %d on"):format(size[1], size[2], offset))
      end
    end
  end)
  t.test("every second row and column is copied, turned or not, in " .. dtype, function()
    local x = numbers({ 66, 70, 6 }, dtype)
    for dim = 1, 3 do
      for _, order in ipairs(permutations(3)) do
        local part = x:slice(dim, 2, -1, 2):permute(order)
        checks.compare({ ops.clone(part) }, checks.run(ops.clone, {}, { n = 1, part }, "ref"), 0, "dim " .. dim)
      end
    end
  end)
end

t.test("large ones, written past the caches and by two threads, are those of the reference", function()
  for _, case in ipairs { { "f32", 1024, 2100 }, { "f32", 2100, 1024 }, { "u8", 3000, 3008 }, { "bf16", 2048, 2112 }, { "i64", 1030, 1024 } } do
    local x = numbers({ case[2], case[3] }, case[1]):t()
    checks.compare({ ops.clone(x) }, checks.run(ops.clone, {}, { n = 1, x }, "ref"), 0, table.concat(case, " "))
  end
  local images = numbers({ 5, 64, 100, 100 }, "f32")
  check(images, { 1, 3, 4, 2 })
  check(images, { 2, 1, 4, 3 })
end)
t.done()
