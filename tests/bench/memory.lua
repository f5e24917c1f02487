-- memory.lua -- ops that memory bounds, as GB/s (inputs read, results written, once each) beside a copy of as many bytes,
-- on one thread. What reads more than it writes (steps) may pass the copy. A row under 80 % of the copy is marked. Best of several runs, random data.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local ops = require "ddp.ops"
local nn = ddp.nn
local opts = ddp.args { batch = 64, seconds = .1, only = "", peak = "build/peak" }

local rows = {}
local function row(name, fn) rows[#rows + 1] = { name, fn } end

local x, g = bench.channels_last(opts.batch, 64, 32, 32), bench.channels_last(opts.batch, 64, 32, 32)
local weight, bias, running_mean, running_var = ddp.rand(64), ddp.randn(64), ddp.randn(64), ddp.rand(64)
local _, mean, rstd = ops.batch_norm(x, weight, bias, running_mean, running_var, true)
row("batch norm, forward", function() return ops.batch_norm(x, weight, bias, running_mean, running_var, true) end)
row("batch norm, evaluation", function() return ops.batch_norm(x, weight, bias, running_mean, running_var, false) end)
row("batch norm, backward", function() return ops.batch_norm_grad(g, x, weight, mean, rstd, true) end)
row("relu", function() return ops.relu(x) end)
row("relu, backward", function() return ops.relu_grad(g, x) end)
row("add", function() return ops.add(x, g) end)
row("copy", function() return ops.clone(x, true) end)
for _, window in ipairs { { 2, 2, 0 }, { 3, 2, 1 } } do
  local k, stride, pad = unpack(window)
  local pooled, places = ops.max_pool2d(x, k, stride, pad)
  row(("max pool %d/%d, forward"):format(k, stride), function() return ops.max_pool2d(x, k, stride, pad) end)
  row(("max pool %d/%d, backward"):format(k, stride), function() return ops.max_pool2d_grad(pooled, places, x:size(), k, stride, pad) end)
  row(("average pool %d/%d, forward"):format(k, stride), function() return ops.avg_pool2d(x, k, stride, pad) end)
  row(("average pool %d/%d, backward"):format(k, stride), function() return ops.avg_pool2d_grad(pooled, x:size(), k, stride, pad) end)
end
local averaged = ops.adaptive_avg_pool2d(x, 1)
row("average pool to 1x1, forward", function() return ops.adaptive_avg_pool2d(x, 1) end)
row("average pool to 1x1, backward", function() return ops.adaptive_avg_pool2d_grad(averaged, x:size()) end)

local logits, labels, one = ddp.randn(4096, 1000), ddp.randint(0, 1000, { 4096 }), ddp.tensor(1)
row("softmax", function() return ops.softmax(logits, -1) end)
row("log softmax", function() return ops.log_softmax(logits, -1) end)
local shares, slopes, logits_16 = ops.softmax(logits, -1), ddp.randn(4096, 1000), logits:to "bf16"
row("softmax, backward", function() return ops.softmax_grad(slopes, shares, -1) end)
row("log softmax, backward", function() return ops.log_softmax_grad(slopes, shares, -1) end)
row("softmax, bf16", function() return ops.softmax(logits_16, -1) end)
row("cross entropy, forward, bf16", function() return ops.cross_entropy(logits_16, labels) end)
row("cross entropy, forward", function() return ops.cross_entropy(logits, labels) end)
row("cross entropy, backward", function() return ops.cross_entropy_grad(one, logits, labels) end)
for _, size in ipairs { { 4096, 768 }, { 65536, 48 } } do
  local h, dy, w, b = ddp.randn(size), ddp.randn(size), ddp.rand(size[2]), ddp.randn(size[2])
  local name = (" of [%d, %d]"):format(size[1], size[2])
  local _, average, rdev = ops.layer_norm(h, w, b)
  row("layer norm" .. name, function() return ops.layer_norm(h, w, b) end)
  row("layer norm, backward" .. name, function() return ops.layer_norm_grad(dy, h, w, average, rdev) end)
end

local flat = ddp.randn(4096, 1024)
local half = flat:to "bf16"
row("sum of all", function() return ops.sum(flat) end)
row("sum of rows", function() return ops.sum(flat, 2) end)
row("sum of columns", function() return ops.sum(flat, 1) end)
row("largest of rows", function() return ops.amax(flat, 2) end)
row("argmax of rows", function() return ops.argmax(flat, 2) end)
row("largest of columns", function() return ops.amax(flat, 1) end)
row("argmax of columns", function() return ops.argmax(flat, 1) end)
local doubles, whole = ddp.randn(2048, 1024, { dtype = "f64" }), ddp.randint(-1000, 1000, { 2048, 1024 })
row("argmax of rows, f64", function() return ops.argmax(doubles, 2) end)
row("argmax of rows, i64", function() return ops.argmax(whole, 2) end)
row("largest of rows, bf16", function() return ops.amax(half, 2) end)
row("sum of rows, bf16", function() return ops.sum(half, 2) end)
row("sum of columns, bf16", function() return ops.sum(half, 1) end)
row("cast f32 to bf16", function() return ops.cast(flat, "bf16") end)
row("cast bf16 to f32", function() return ops.cast(half, "f32") end)
for _, dtype in ipairs { "f32", "bf16", "u8", "i64" } do
  local matrix = flat:to(dtype)
  row("transpose of " .. dtype, function() return ops.clone(matrix:t()) end)
end
local planes, colours = ops.clone(x), ddp.randint(0, 256, { 64, 3, 224, 224 }, { dtype = "u8" })
row("channels-last to planes", function() return ops.clone(x) end)
row("planes to channels-last", function() return ops.clone(planes:permute(1, 3, 4, 2)) end)
row("colours to channels-last, u8", function() return ops.clone(colours:permute(1, 3, 4, 2)) end)
local heads = ddp.randn(8, 512, 16, 64)
row("heads before tokens", function() return ops.clone(heads:permute(1, 3, 2, 4)) end)
row("cat of rows", function() return ops.cat({ flat, flat }, 1) end)
row("cat of columns", function() return ops.cat({ flat, flat }, 2) end)
local ids, mask = ddp.randint(0, 4096, { 4096 }), ddp.randint(0, 2, { 1, 1024 }):bool()
row("embedding", function() return ops.embedding(flat, ids) end)
row("embedding, backward", function() return ops.embedding_grad(flat, ids, 4096) end)
row("rows by number", function() return ops.index_select(flat, ids, 1) end)
row("masked fill, one mask a row", function() return flat:masked_fill(mask, 0) end)
row("dropout", function() return ops.dropout(flat, .5) end)
local _, kept = ops.dropout(flat, .5)
row("dropout, backward", function() return ops.dropout_grad(flat, kept, .5) end)
row("dropout, bf16", function() return ops.dropout(half, .5) end)

local function step(name, make)
  local p = nn.Parameter(ddp.randn(11e6))
  p.grad = ddp.randn(11e6)
  local opt = make({ p })
  opt:step()
  row(name .. " step, 11 M", function() opt:step() end)
end
step("SGD", function(p) return ddp.optim.SGD(p, { lr = 1e-6 }) end)
step("SGD, momentum", function(p) return ddp.optim.SGD(p, { lr = 1e-6, momentum = .9, weight_decay = 1e-4 }) end)
step("Adam", function(p) return ddp.optim.Adam(p, { lr = 1e-6 }) end)
step("AdamW", function(p) return ddp.optim.AdamW(p, { lr = 1e-6 }) end)

-- {kernel, bytes, GB/s} of a row.
local function measure(fn)
  local profile, bytes = ddp.profile(fn), 0
  for _, k in ipairs(profile) do bytes = bytes + k.gb_per_s * k.seconds * 1e9 end
  local rate = bytes / bench.best(fn, opts.seconds) / 1e9
  collectgarbage()
  return { kernel = profile[1] and profile[1].kernel or "-", bytes = bytes, rate = rate }
end

local results, sizes = {}, {}
for _, r in ipairs(rows) do
  if r[1]:find(opts.only, 1, true) then
    local m = measure(r[2])
    m.name = r[1]
    results[#results + 1] = m
    sizes[#sizes + 1] = ("%.0f"):format(m.bytes)
  end
end
local copies = bench.limits(opts.peak .. " " .. table.concat(sizes, " ")).copy

print(("%-36s %-27s %9s %8s %8s %8s"):format("", "kernel", "MB", "GB/s", "copy", "share"))
for i, m in ipairs(results) do
  local copy = copies[i][2]
  print(("%-36s %-27s %9.1f %8.1f %8.1f %6.0f %%%s"):format(m.name, m.kernel, m.bytes / 1e6, m.rate, copy, 100 * m.rate / copy, m.rate < .8 * copy and "  <" or ""))
end
