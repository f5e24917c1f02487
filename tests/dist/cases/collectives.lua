-- Every collective on every dtype it takes, in each world; and that all ranks hold the same bits (C13).
local ddp = require "ddp"
local ffi = require "ffi"
ddp.init()
local r, w = ddp.rank(), ddp.world_size()

local function expect(cond, what) if not cond then error(what, 0) end end
local function same_bits(t, what)
  local c = t:to "cpu":contiguous()
  local n = c:numel() * tonumber(require("ddp.ffi").C.ddp_dtype_size(require("ddp.ffi").C.ddp_dtype_of(c)))
  local bytes = n > 0 and ffi.string(ffi.cast("const char *", require("ddp.ffi").C.ddp_data(c)), n) or ""
  for _, other in ipairs(ddp.all_gather_object(bytes)) do expect(other == bytes, what .. ": ranks hold different bits") end
end

local function whole_numbers(n)
  local v = {}
  for i = 1, n do v[i] = (i - 1) % 7 + r end
  return ddp.tensor(v)
end

-- C13: every length and odd tails. The values are no sums of powers of two, so that an order of adding shows.
local lengths = { 127, 1000, 4097, 70001, 300007 }
for n = 0, 70 do lengths[#lengths + 1] = n end
for _, n in ipairs(lengths) do
  for _, dtype in ipairs { "f32", "f64", "bf16", "f16", "i64", "i32", "u8" } do
    if n <= 70 or dtype == "f32" or dtype == "bf16" then
      local whole = dtype:sub(1, 1) == "i" or dtype == "u8"
      local x = whole and whole_numbers(n):to(dtype) or ((ddp.arange(n):float() * 0.37):sigmoid() * (r + 1)):to(dtype)
      ddp.all_reduce(x)
      same_bits(x, ("all_reduce %s x %d"):format(dtype, n))
      if n > 0 then
        local i = n - 1
        local want = 0
        for k = 0, w - 1 do want = want + (whole and i % 7 + k or 1 / (1 + math.exp(-i * 0.37)) * (k + 1)) end
        local got = x:to "f64"[n]:item()
        local tol = (dtype == "bf16" or dtype == "f16") and 0.02 or 1e-5
        expect(math.abs(got - want) <= tol * math.abs(want) + 1e-12, ("all_reduce %s x %d: %g, expected %g"):format(dtype, n, got, want))
      end
    end
  end
end
for _, case in ipairs { { "mean", (w - 1) / 2 + 1 }, { "min", 1 }, { "max", w }, { "sum", w * (w + 1) / 2 } } do
  local op, want = case[1], case[2]
  local x = ddp.full({ 5 }, r + 1)
  ddp.all_reduce(x, op)
  expect(math.abs(x[3]:item() - want) < 1e-6, "all_reduce " .. op)
end
local strided = ddp.zeros(4, 6):slice(2, 1, 6, 2)
strided:fill_(r + 1)
ddp.all_reduce(strided)
expect(strided[2][3]:item() == w * (w + 1) / 2, "a strided tensor")

local b = ddp.full({ 70000 }, r)
ddp.broadcast(b, w - 1)
expect(b[70000]:item() == w - 1, "broadcast")
local g = ddp.all_gather(ddp.tensor { r, r + 0.5 })
expect(g:size(1) == w and g[w][2]:item() == w - 1 + 0.5, "all_gather")
local s = ddp.reduce_scatter(ddp.arange(2 * w):float())
expect(s:size(1) == 2 and s[2]:item() == (2 * r + 1) * w, "reduce_scatter")
ddp.barrier()

-- Asynchronous ones end in their order, many at once.
local works, tensors = {}, {}
for i = 1, 150 do
  tensors[i] = ddp.full({ i }, r + i)
  works[i] = ddp.all_reduce(tensors[i], "sum", { async = true })
end
for i = 150, 1, -1 do works[i]:wait() end
for i = 1, 150 do expect(tensors[i][i]:item() == w * i + w * (w - 1) / 2, "async " .. i) end

expect(ddp.broadcast_object({ a = { 1, "x", true } }).a[2] == "x", "broadcast_object")
expect(ddp.all_gather_object(r * 10)[w] == (w - 1) * 10, "all_gather_object")
expect(ddp.reduce_metrics { acc = { r + 1, 2 } }.acc == (w + 1) / 4, "reduce_metrics")
expect(ddp.rank0(function(v) return v + 1 end, 4) == 5, "rank0")
local ok, err = pcall(ddp.rank0, function() error "inside" end)
expect(not ok and tostring(err):find "inside", "an error in rank0 reaches all")
if w > 1 then
  ok, err = pcall(ddp.rank0, function() ddp.barrier() end)
  expect(not ok and tostring(err):find "inside rank0", "a collective in rank0 is an error: " .. tostring(err))
end
ddp.finish()
if r == 0 then print "fine" end
