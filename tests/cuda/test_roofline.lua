-- test_roofline.lua -- what a step does on paper (tests/bench/gpu/trace.lua), on nets small enough to be counted by hand.
package.path = "tests/bench/gpu/?.lua;" .. package.path
local t = require "harness"
local reader = require "trace"
local double = (os.getenv "DDP_BUILD" or "build") .. "/cuda-double"

-- 1 TFLOP/s and 1 GB/s: a byte is a nanosecond.
local SLOW = { f64 = 1, f32 = 1, tf32 = 2, half = 4, gb_per_s = 1 }
local BYTES = 4 * 4096 * 4 -- of an activation here: several pages, so that what touches it is seen

-- The analysis of `body` (Lua; x is [4, 4096] f32 on the GPU), run on the double without computing.
local function traced(body, opts)
  local script, log = os.tmpname(), os.tmpname()
  local file = assert(io.open(script, "w"))
  file:write(([[
    local ddp = require "ddp"
    local C, ops, F = require("ddp.ffi").C, require "ddp.ops", ddp.nn.functional
    local x = ddp.randn(4, 4096):to "cuda"
    local function step() %s end
    step()
    assert(C.ddp_trace_start "%s" == 0)
    step()
    C.ddp_trace_stop()
    os.exit(0) ]]):format(body, log))
  file:close()
  local pipe = io.popen(("DDP_CUDA_LIBS=%s DDP_DOUBLE_MODE=dry DDP_DOUBLE_LEAKS=quiet DDP_DOUBLE_LOG=%s luajit %s 2>&1; echo status $?"):format(double, log, script))
  local text = pipe:read "*a"
  pipe:close()
  os.remove(script)
  t.ok(text:find "status 0\n$", text)
  local result = reader.analyse(log, SLOW, { batch = 4, parameters = opts and opts.parameters or {}, tf32 = opts and opts.tf32 })
  os.remove(log)
  return result
end

-- The tensor that call number n made.
local function made_by(trace, n)
  for _, tensor in ipairs(trace.tensors) do if tensor.producer and tensor.producer.number == n then return tensor end end
end

t.test("three elementwise ops: launches, operations, bytes and the limit's time are those counted by hand", function()
  local r = traced "local a = x * 2; local b = a:relu(); local c = b + x"
  t.eq(#r.calls, 3)
  t.eq({ r.own, r.calls_out, r.copies }, { 3, 0, 0 })
  t.eq(r.flops, 3 * 16384)
  t.eq(r.moved, (2 + 2 + 3) * BYTES)
  t.near(r.seconds, 7 * BYTES * 1e-9, 1e-15)
  t.eq(r.rows[1].kernel, "add.cuda", "the longest row")
  t.eq(r.rows[1].by, "memory")
  t.eq(r.calls[2].launches[1].name, "relu_f32")
end)
t.test("an unfused chain is named, pass by pass, with its neighbours, and its tensors are what fusing would save", function()
  local r = traced "local a = x * 2; local b = a:relu(); local c = b + x"
  t.eq(#r.fusable, 3)
  t.eq(reader.describe(r.fusable[1]), "mul.cuda #1 over 4x4096 f32: after nothing in the step, before relu.cuda #2")
  t.eq(reader.describe(r.fusable[2]), "relu.cuda #2 over 4x4096 f32: after mul.cuda #1, before add.cuda #3")
  t.eq(reader.describe(r.fusable[3]), "add.cuda #3 over 4x4096 f32: after relu.cuda #2, before nothing in the step")
  t.eq({ r.fusable[1].bytes, r.fusable[2].bytes, r.fusable[3].bytes }, { 0, 2 * BYTES, 2 * BYTES })
  t.eq(r.least, 3 * BYTES, "x read by two, c written")
end)
t.test("each activation knows how often it is read and written", function()
  local r = traced "local a = x * 2; local b = a:relu(); local c = b + a; c:add_(1)"
  t.eq({ made_by(r, 1).reads, made_by(r, 1).writes }, { 2, 1 }, "a")
  t.eq({ made_by(r, 2).reads, made_by(r, 2).writes }, { 1, 1 }, "b")
  t.eq({ made_by(r, 3).reads, made_by(r, 3).writes }, { 1, 2 }, "c, once in place")
  t.eq(r.fusable[2].bytes, BYTES, "a is read by another too: it is written all the same")
end)
t.test("an op that is no elementwise pass is not named, nor is a pass that stands alone", function()
  local r = traced "local s = (x * 2):sum(2)"
  t.eq(#r.fusable, 1)
  t.eq(reader.describe(r.fusable[1]), "mul.cuda #1 over 4x4096 f32: after nothing in the step, before sum.cuda #2")
  t.eq(r.fusable[1].bytes, 2 * BYTES, "what mul writes and sum reads")
  t.eq(#traced("local y = x * 2").fusable, 0)
end)
t.test("parameters and what has their sizes are no activations", function()
  local r = traced("local a = x * 2; local b = a:relu()", { parameters = { "4x4096" } })
  t.eq(#r.fusable, 0)
  for _, tensor in ipairs(r.tensors) do t.ok(not tensor.activation) end
end)
t.test("what two launches of one op read is read twice; a launch that is given a tensor and leaves it alone does not count", function()
  local r = traced "local y, mean, rstd = ops.batch_norm(x, nil, nil, nil, nil, true)"
  t.eq(#r.calls[1].launches, 3, "sums, finish, apply: all are given x and y")
  t.eq(#r.again, 1)
  t.eq({ r.again[1].operand.name, r.again[1].reads }, { "x", 2 })
  t.eq({ made_by(r, 1).reads, made_by(r, 1).writes }, { 0, 1 }, "y")
  t.eq(r.moved, 3 * BYTES + 4 * 4096 * 4, "x twice, y once; mean and rstd are written by one launch and read by the next")
  t.eq(r.least, 2 * BYTES + 2 * 4096 * 4 * 2, "each once each way")
end)
t.test("products are priced by the unit that does them", function()
  local function limit(op, dtype, tf32) return { reader.limit({ op = op, flops = 8e12, moved = 8e8, operands = { { dtype = dtype } } }, SLOW, tf32) } end
  t.eq(limit("conv2d", "f32"), { 8, "FMA" })
  t.eq(limit("conv2d", "f32", true), { 4, "TF32 tensor cores" })
  t.eq(limit("linear", "bf16"), { 2, "bf16 tensor cores" })
  t.eq(limit("add", "bf16"), { 8, "FMA" })
  t.eq(limit("matmul", "f64", true), { 8, "f64" })
end)
t.test("a step that allocates nothing from the driver says so, one that does says how often", function()
  t.eq(traced("local y = x * 2; y = nil; collectgarbage()").allocations, 0)
end)

t.done()
