-- test_coroutines.lua -- no_grad, enable_grad and autocast belong to the coroutine that set them.
local t = require "harness"
local ddp = require "ddp"
local C = require("ddp.ffi").C
local yield = coroutine.yield

-- "grad bf16": what is in force.
local function modes()
  local dtype = C.ddp_autocast_dtype()
  return (C.ddp_grad_mode() == 1 and "grad" or "none") .. (dtype == C.DDP_AUTOCAST_OFF and "" or dtype == C.DDP_BF16 and " bf16" or " f16")
end
-- What the coroutine yields or returns; raises what it raised.
local function step(co, ...)
  local ok, value = coroutine.resume(co, ...)
  if not ok then error(value, 0) end
  return value
end

t.test("a coroutine that yields inside no_grad or autocast leaves its resumer's modes alone", function()
  local x, w = ddp.ones({ 2, 2 }, { requires_grad = true }), ddp.ones(2, 2)
  local quiet = coroutine.create(function() ddp.no_grad(yield, 1) return modes() end)
  local low = coroutine.create(function() ddp.autocast("bf16", yield, 1) return modes() end)
  step(quiet)
  step(low)
  t.eq(modes(), "grad")
  t.ok((x * 2).requires_grad)
  t.eq(x:matmul(w):dtype(), "f32")
  t.eq(step(quiet), "grad")
  t.eq(step(low), "grad")
end)
t.test("it finds its own modes again when it is resumed, whatever its resumer runs under then", function()
  local co = coroutine.create(function()
    return ddp.no_grad(function()
      yield(modes())
      return ddp.autocast("f16", function()
        yield(modes())
        return modes()
      end)
    end)
  end)
  t.eq(step(co), "none")
  t.eq(ddp.autocast("bf16", step, co), "none f16")
  t.eq(ddp.autocast("bf16", ddp.enable_grad, step, co), "none f16")
  t.eq(modes(), "grad")
end)
t.test("it begins in the modes of the one that resumes it first", function()
  local co = coroutine.create(function() yield(modes()) return modes() end)
  t.eq(ddp.no_grad(ddp.autocast, "bf16", step, co), "none bf16")
  t.eq(modes(), "grad")
  t.eq(step(co), "none bf16", "and keeps them")
end)
t.test("an error inside ends its modes and no others", function()
  local co = coroutine.create(function() ddp.no_grad(ddp.autocast, "bf16", function() yield() error "broken" end) end)
  ddp.autocast("f16", function()
    step(co)
    t.eq(modes(), "grad f16")
    t.fails(function() step(co) end, "broken")
    t.eq(modes(), "grad f16")
    t.eq(coroutine.status(co), "dead")
    t.fails(function() step(co) end, "dead")
    t.eq(modes(), "grad f16")
  end)
  t.eq(modes(), "grad")
end)
t.test("an error caught inside a coroutine, after yields, restores what was before", function()
  local co = coroutine.create(function()
    local ok = pcall(ddp.no_grad, function() yield(modes()) error "x" end)
    yield(ok)
    return modes()
  end)
  t.eq({ step(co), step(co), step(co) }, { "none", false, "grad" })
end)
t.test("coroutines in coroutines each have theirs", function()
  local inner = coroutine.create(function() ddp.enable_grad(ddp.autocast, "f16", function() yield(modes()) yield(modes()) end) end)
  local outer = coroutine.create(function()
    ddp.no_grad(function()
      yield(step(inner))
      yield(modes())
      ddp.autocast("bf16", function() yield(step(inner)) yield(modes()) end)
    end)
  end)
  local seen = {}
  for i = 1, 4 do
    seen[i] = step(outer)
    t.eq(modes(), "grad")
  end
  t.eq(seen, { "grad f16", "none", "grad f16", "none bf16" })
end)
t.test("coroutine.wrap does so too: as an iterator, and when it fails", function()
  local function numbers(n)
    return coroutine.wrap(function() ddp.no_grad(function() for i = 1, n do yield(i, modes()) end end) end)
  end
  local sum = 0
  for i, inside in numbers(3) do
    t.eq({ inside, modes() }, { "none", "grad" })
    sum = sum + i
  end
  t.eq(sum, 6)
  local failing = coroutine.wrap(function(a) ddp.autocast("bf16", function() yield(a + 1) error({ code = 7 }) end) end)
  t.eq(failing(1), 2)
  local ok, err = pcall(failing)
  t.eq({ ok, err.code, modes() }, { false, 7, "grad" })
  t.fails(failing, "dead")
end)
t.test("many coroutines interleaved in any order keep theirs", function()
  local function body(grad, dtype)
    return function()
      (grad and ddp.enable_grad or ddp.no_grad)(ddp.autocast, dtype, function() for _ = 1, 20 do yield(modes()) end end)
    end
  end
  local list, want = {}, {}
  for i = 1, 12 do
    local grad, dtype = i % 2 == 0, ({ "bf16", "f16", false })[i % 3 + 1]
    list[i], want[i] = coroutine.create(body(grad, dtype)), (grad and "grad" or "none") .. (dtype and " " .. dtype or "")
  end
  for round = 1, 20 do
    for k = 1, 12 do
      local i = (k * 5 + round) % 12 + 1
      t.eq(step(list[i]), want[i])
      t.eq(modes(), "grad")
    end
  end
end)
t.test("values and errors go through resume as before", function()
  local co = coroutine.create(function(...) return select("#", ...), yield(...) end)
  t.eq({ coroutine.resume(co, nil, 2, nil) }, { true, nil, 2, nil })
  t.eq({ coroutine.resume(co, "a", nil) }, { true, 3, "a", nil })
  t.eq({ coroutine.resume(co) }, { false, "cannot resume dead coroutine" })
  t.fails(function() coroutine.resume(1) end, "bad argument #1")
  t.eq(coroutine.resume(coroutine.running() or co), false)
  t.fails(function() coroutine.wrap(1) end, "bad argument #1")
end)

-- ---- the weights that autocast keeps ---------------------------------------------------------------------------------------

local function allocated() return ddp.memory_stats().allocated end
local function cast_weight(w)
  local x = ddp.ones(2, 256)
  ddp.autocast("bf16", ddp.no_grad, function()
    x:matmul(w)
    yield()
    x:matmul(w)
  end)
end
t.test("weights cast in a region stay until it ends, also while its coroutine waits", function()
  local w, first = ddp.zeros({ 256, 256 }, { requires_grad = true }), coroutine.create(cast_weight)
  step(first, w)
  step(first) -- workspaces that stay are there now
  collectgarbage()
  collectgarbage()
  local before, co = allocated(), coroutine.create(cast_weight)
  step(co, w)
  ddp.autocast("bf16", function() end) -- another region ends
  collectgarbage()
  t.ok(allocated() >= before + 256 * 256 * 2, "it was let go early")
  step(co)
  collectgarbage()
  collectgarbage()
  t.eq(allocated(), before)
end)
t.test("a coroutine that is dropped inside a region takes them with it", function()
  local w = ddp.zeros({ 256, 256 }, { requires_grad = true })
  collectgarbage()
  local before = allocated()
  for _ = 1, 3 do step(coroutine.create(cast_weight), w) end
  for _ = 1, 4 do collectgarbage() end
  t.eq(allocated(), before)
  t.eq(modes(), "grad")
end)
t.done()
