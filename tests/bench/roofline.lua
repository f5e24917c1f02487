-- roofline.lua -- one training step by kernel and shape, beside what one core of this machine can do at most.
-- The limits are measured first. A row's share is the time that the nearer limit (operations at the peak, or bytes at the
-- speed of copying as many) would need, over the time taken. It passes 100 % where a convolution needs fewer operations than
-- are counted (Winograd), or data were in a nearer cache than those bytes fit into. What is in no kernel is the host: the Lua side, the call path, the tape, the allocator.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local F = ddp.nn.functional
local opts = ddp.args({ models = "resnet18,resnet50", batch = 64, amp = "none", precision = "highest", rows = 40, peak = "build/peak" },
  { amp = { "none", "bf16" }, precision = { "exact", "highest", "high" } })
ddp.set_float32_matmul_precision(opts.precision)

local limits = bench.limits(opts.peak)
local function given(what, gflops) return gflops and (", %s %.0f"):format(what, gflops) or "" end
print(("limits of one thread, GFLOP/s: f32 by FMA %.0f%s%s"):format(limits.f32, given("bf16 by pairs", limits.pairs), given("bf16 by AMX", limits.amx)))
if os.getenv "DDP_AMX" == "emulate" then print "  AMX is emulated, for tests: times of its kernels say nothing" end
for _, c in ipairs(limits.copy) do print(("  copying, source and destination %8d KB together: %6.1f GB/s read and written"):format(c[1] / 1024, c[2])) end

local function step_of(name)
  if not ddp.models[name] then error("--models: no model " .. name, 0) end
  local model = ddp.models[name] { num_classes = 10, stem = "cifar" }
  local opt = ddp.optim.SGD(model:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
  local x, y = bench.channels_last(opts.batch, 3, 32, 32), ddp.randint(0, 10, { opts.batch })
  local function forward() return F.cross_entropy(model(x), y) end
  return function()
    local loss = opts.amp == "none" and forward() or ddp.autocast(opts.amp, forward)
    opt:zero_grad()
    loss:backward()
    opt:step()
    return loss:item()
  end
end

-- The limit of a row's operations and what it is: matrix products and convolutions of bf16 run by pairs or AMX where they are,
-- f32 by AMX as three products.
local PRODUCTS = { matmul = true, linear = true, conv2d = true, conv2d_grad_input = true, conv2d_grad_weight = true }
local function peak_of(row)
  local half = row.shape:find "^bf16"
  if not PRODUCTS[row.op] then return limits.f32, "FMA" end
  if row.kernel:find(".amx.", 1, true) and limits.amx then return limits.amx / (half and 1 or 3), half and "AMX" or "AMX/3" end
  if half and limits.pairs then return limits.pairs, "pairs" end
  return limits.f32, "FMA"
end

local function share_of(row)
  local bytes = row.gb_per_s * 1e9 * row.seconds / row.calls
  local peak, name = peak_of(row)
  local flops, copy = row.gflops_per_s / peak, row.gb_per_s / bench.copy_limit(limits, bytes)
  if copy > flops then return copy, "copy" end
  return flops, name
end

local FORMAT, HEAD = "%-26s %-48s %5d %9.2f %8.1f %8.1f %6.0f %% %s", "%-26s %-48s %5s %9s %8s %8s %8s"
local function table_of(name, rows)
  print(("\n%s, CIFAR stem, batch %d, %s: a step of %.1f ms"):format(name, opts.batch, opts.amp == "none" and "f32" or opts.amp, rows.wall * 1e3))
  print(HEAD:format("kernel", "shape", "calls", "ms", "GFLOP/s", "GB/s", "limit"))
  local rest, rest_calls, ideal = 0, 0, 0
  for i, r in ipairs(rows) do
    local share, limit = share_of(r)
    ideal = ideal + share * r.seconds
    if i <= opts.rows then
      local shape = #r.shape > 48 and r.shape:sub(1, 46) .. ".." or r.shape
      print(FORMAT:format(r.kernel, shape, r.calls, r.seconds * 1e3, r.gflops_per_s, r.gb_per_s, 100 * share, limit))
    else
      rest, rest_calls = rest + r.seconds, rest_calls + r.calls
    end
  end
  if rest_calls > 0 then print(("%-75s %5d %9.2f"):format(("%d rows more (--rows)"):format(#rows - opts.rows), rest_calls, rest * 1e3)) end
  print(("%-75s %5s %9.2f %26.0f %%"):format("inside kernels", "", rows.inside * 1e3, 100 * ideal / rows.inside))
  print(("%-75s %5s %9.2f %26.1f %% of the step"):format("outside: the host", "", (rows.wall - rows.inside) * 1e3, 100 * (1 - rows.inside / rows.wall)))
end

for name in opts.models:gmatch "[^,]+" do
  ddp.manual_seed(0)
  local step = step_of(name)
  step()
  step()
  local best
  for _ = 1, 3 do
    collectgarbage()
    local rows = ddp.profile(step)
    if not best or rows.wall < best.wall then best = rows end
  end
  table_of(name, best)
  step = nil -- luacheck: ignore 311
  collectgarbage()
  collectgarbage()
  ddp.empty_cache()
end
