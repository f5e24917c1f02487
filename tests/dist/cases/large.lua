-- Collectives of many bytes, with odd tails: more than one piece or chunk of any engine.
local ddp = require "ddp"
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function all_equal(t, want, what)
  local worst = (t:to "f64" - want):abs():max():item()
  expect(worst == 0, ("%s: off by %g"):format(what, worst)) -- NaN is unequal too
end

local sums = w * (w + 1) / 2
for _, n in ipairs { 2 ^ 18 + 3, 3 * 2 ^ 20 + 1, 211, 4099 } do
  for _, dtype in ipairs { "f32", "f64", "f16", "bf16", "i64", "i32", "u8" } do
    local base = (ddp.arange(n) - ddp.arange(n):div(5, "floor") * 5):to(dtype) -- i mod 5
    local x = base + ddp.full({ 1 }, r + 1):to(dtype)
    ddp.all_reduce(x)
    all_equal(x, base:to "f64" * w + sums, ("sum of %s x %d"):format(dtype, n))
  end
  local base = ddp.arange(n):float() / 8
  local x = base + r
  ddp.all_reduce(x, "min")
  all_equal(x, base:to "f64", "min")
  x = base + r
  ddp.all_reduce(x, "max")
  all_equal(x, base:to "f64" + (w - 1), "max")
  for root = 0, w - 1 do
    x = base + r
    ddp.broadcast(x, root)
    all_equal(x, base:to "f64" + root, "broadcast from " .. root)
  end
  local g = ddp.all_gather(base + r)
  for k = 1, w do all_equal(g[k], base:to "f64" + (k - 1), "all_gather") end
  local s = ddp.reduce_scatter(ddp.arange(n * w):to "f64")
  all_equal(s, (ddp.arange(n):to "f64" + n * r) * w, "reduce_scatter")
end
local huge = ddp.full({ 25 * 2 ^ 18 + 5 }, r + 1)
local work = ddp.all_reduce(huge, "sum", { async = true })
local small = ddp.full({ 3 }, r + 1)
ddp.all_reduce(small)
work:wait()
all_equal(huge, sums, "25 MB")
all_equal(small, sums, "three after 25 MB")
ddp.finish()
if r == 0 then print "fine" end
