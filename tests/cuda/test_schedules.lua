-- test_schedules.lua -- kernels whose threads meet give the same bits whichever thread runs first.
local ops = require "ddp.ops"
local ddp = require "ddp"

-- Every element of every result, to the last bit.
local function digest()
  ddp.manual_seed(5)
  local function cuda(size) return ddp.randn(size):to "cuda" end
  local results = {
    ops.adaptive_avg_pool2d(cuda { 2, 40, 9, 7 }, { 1, 1 }),
    ops.adaptive_avg_pool2d(cuda { 1, 64, 30, 30 }:permute(1, 3, 4, 2):contiguous():permute(1, 4, 2, 3), { 1, 2 }),
    ops.embedding_grad(cuda { 5000, 24 }, ddp.randint(0, 300, { 5000 }):to "cuda", 70000), ops.embedding_grad(cuda { 3000, 5 }, ddp.randint(0, 3, { 3000 }):to "cuda", 3),
    ops.gather_grad(cuda { 100, 9 }, ddp.randint(0, 20, { 100, 9 }):to "cuda", { 20, 9 }, 1),
  }
  local function add(...) for i = 1, select("#", ...) do results[#results + 1] = (select(i, ...)) end end
  add(ops.grad_norm { cuda { 9000 }, cuda { 3, 4 }, cuda { 40, 30 }:slice(2, 1, 30, 2) })
  add(ops.grad_clip_({ cuda { 9000 } }, 0.5))
  add(ops.linear_act_grad(cuda { 500, 33 }, cuda { 500, 33 }, 2))
  add(ops.linear_act_grad(cuda { 400, 64 }, cuda { 400, 64 }, 3))
  require "op_checks"
  require("ddp.ffi").C.ddp__kernels_only "cuda" -- our own products, not cuBLAS's
  add(ops.matmul(cuda { 2, 70, 90 }, cuda { 90, 65 }), ops.linear_act(cuda { 66, 40 }, cuda { 70, 40 }, cuda { 70 }, cuda { 66, 70 }, 2))
  require("ddp.ffi").C.ddp__kernels_only(nil)
  local text = {}
  for k, r in ipairs(results) do
    for i, v in ipairs(r:to "cpu":reshape(-1):tolist()) do text[#text + 1] = ("%d %d %a"):format(k, i, v) end
  end
  return table.concat(text, "\n")
end

if arg[1] == "digest" then
  io.write(digest())
  return
end

local t = require "harness"
t.test("the same bits under every schedule of the emulator", function()
  local function under(schedule)
    local pipe = io.popen(("DDP_EMU_SCHEDULE=%d DDP_EMU_SEED=3 luajit %s digest"):format(schedule, arg[0]))
    local text = pipe:read "*a"
    pipe:close()
    return text
  end
  local first = under(0)
  t.ok(#first > 1000, "nothing was computed")
  for schedule = 1, 5 do t.ok(under(schedule) == first, "schedule " .. schedule .. " gives other bits") end
end)
t.done()
