-- test_extremes.lua -- the largest and smallest and their places where values meet: NaN, several of the same, long lines.
local t = require "harness"
local ddp = require "ddp"
local checks = require "op_checks"
local ops = require "ddp.ops"
local nan = 0 / 0

-- [3, 700] random numbers of a dtype, with `value` at each of `places` of the second row.
local function with(value, places, dtype)
  local x = ddp.randn(3, 700)
  for _, p in ipairs(places) do x[2][p]:fill_(value) end
  return x:to(dtype)
end

for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
  t.test("NaN is the largest, wherever it stands, in " .. dtype, function()
    for p = 1, 700, 23 do
      local x = with(nan, { p, 700 }, dtype)
      for _, y in ipairs { x, x:t():contiguous():t() } do -- lines, then rows
        local values, places = ops.max_dim(y, 2)
        t.ok(values[2]:item() ~= values[2]:item() and values[1]:item() == values[1]:item(), "at " .. p)
        t.eq(places[2]:item(), p - 1)
        for _, op in ipairs { ops.amax, ops.amin } do
          local top = op(y, 2)
          t.ok(top[2]:item() ~= top[2]:item() and top[3]:item() == top[3]:item(), "at " .. p)
        end
      end
    end
    t.ok(checks.last_kernel():find "cpu", "by " .. checks.last_kernel())
  end)
  t.test("the place is the first of several largest in " .. dtype, function()
    for p = 1, 699, 31 do
      local x = with(9, { p, p + 1, 700 }, dtype)
      t.eq(ops.argmax(x, 2)[2]:item(), p - 1)
      t.eq(ops.argmax(x:t():contiguous():t(), 2)[2]:item(), p - 1)
      t.eq(ops.argmax(x, 1, false, true):item(), 700 + p - 1)
    end
  end)
end

t.test("nothing but -infinity gives -infinity, at place 0", function()
  local values, places = ops.max_dim(ddp.full({ 40, 50 }, -math.huge), 1)
  t.eq(values[50]:item(), -math.huge)
  t.eq(places[50]:item(), 0)
end)

t.test("large ones, cut into parts for threads, are those of the reference", function()
  local function all(x, dim)
    local values, places = ops.max_dim(x, dim)
    return values, places, ops.amin(x, dim), ops.argmax(x, 1, false, true)
  end
  for _, case in ipairs { { 300000, 3 }, { 3, 300000 }, { 700000 }, { 900, 1100 }, { 40, 30, 1000 } } do
    local x = ddp.randint(-2000, 2000, case):float()
    for dim = 1, #case do
      local want = checks.run(all, { args = { dim } }, { n = 1, x }, "ref")
      checks.compare({ all(x, dim) }, want, 0, table.concat(case, "x") .. " along " .. dim)
    end
  end
end)
t.test("every length and dtype: values and places are the reference's, by vectors", function()
  local function all(x, dim)
    local values, places = ops.max_dim(x, dim)
    return values, places, ops.amin(x, dim), ops.amax(x, dim)
  end
  for _, dtype in ipairs { "f32", "f16", "bf16", "f64", "i64", "i32", "u8", "bool" } do
    for _, n in ipairs { 1, 3, 15, 17, 33, 63, 64, 65, 129, 257, 1000, 4097 } do
      for _, size in ipairs { { 3, n }, { n, 3 }, { n, 40 } } do
        local x = ddp.randint(0, dtype == "bool" and 2 or 99, size):to(dtype)
        for dim = 1, 2 do
          local want = checks.run(all, { args = { dim } }, { n = 1, x }, "ref")
          checks.compare({ all(x, dim) }, want, 0, ("%s %dx%d along %d"):format(dtype, size[1], size[2], dim))
          t.ok(checks.last_kernel():find "cpu", "by " .. checks.last_kernel())
        end
      end
    end
  end
end)

t.test("i64 beyond 2^53 and the ends of each whole type keep their bits", function()
  local big = ddp.full({ 5 }, 2 ^ 62, { dtype = "i64" })
  big[4]:add_(ddp.tensor(1, { dtype = "i64" }))
  t.eq(ops.argmax(big):item(), 3)
  t.eq(ops.argmax(big * -1):item(), 0)
  for dtype, ends in pairs { i64 = { -2 ^ 63, 2 ^ 62 }, i32 = { -2 ^ 31, 2 ^ 31 - 1 }, u8 = { 0, 255 } } do
    local x = ddp.full({ 100 }, 7, { dtype = dtype })
    x[40]:fill_(ends[1])
    x[60]:fill_(ends[2])
    local least, most = ops.eq(ops.amin(x), x[40]):to "i32":item(), ops.eq(ops.amax(x), x[60]):to "i32":item()
    t.eq({ least, most, ops.argmax(x):item() }, { 1, 1, 59 }, dtype)
  end
end)
t.done()
