-- test_amp_golden.lua -- GradScaler, clipping and the one-cycle schedule against PyTorch's, step by step (make_amp_golden.py).
local t = require "harness"
local ddp = require "ddp"
local golden = require "golden"
local F = ddp.nn.functional
local numbers, cycles = require "scaler", require "one_cycle"

local BAD = { [3] = math.huge, [4] = 0 / 0, [11] = -math.huge, [20] = 0 / 0, [21] = math.huge, [22] = math.huge }

local function follow(trace, make_optimizer)
  local w = golden.draw(12, 1):view(3, 4):float():requires_grad_(true)
  local b = golden.draw(3, 2):float():requires_grad_(true)
  local opt = make_optimizer { w, b }
  local scaler = ddp.amp.GradScaler { init_scale = 1024, growth_factor = 2, backoff_factor = 0.5, growth_interval = 4 }
  t.eq(#trace.steps, 32)
  for step, want in ipairs(trace.steps) do
    local x = golden.draw(20, 100 + step):view(5, 4):float()
    opt:zero_grad()
    scaler:scale((F.linear(x, w, b) ^ 2):mean()):backward()
    if BAD[step] then w.grad[2][3] = BAD[step] end
    if step % 2 == 0 then
      scaler:unscale_(opt)
      ddp.clip_grad_norm_({ w, b }, 0.5)
    end
    t.eq(scaler:step(opt), want.applied, "applied at step " .. step)
    scaler:update()
    t.eq(scaler:get_scale(), want.scale, "the scale after step " .. step)
    local got = w:detach():reshape(12):tolist()
    for _, v in ipairs(b:detach():tolist()) do got[#got + 1] = v end
    for i, v in ipairs(want.params) do t.near(got[i], v, 2e-6, ("element %d after step %d"):format(i, step)) end
  end
  t.eq(scaler:state_dict()._growth_tracker, trace.tracker)
end

t.test("P1 golden: the scaler follows PyTorch's through growth and skipped steps, with SGD", function()
  follow(numbers.sgd, function(p) return ddp.optim.SGD(p, { lr = 0.1, momentum = 0.9, nesterov = true }) end)
end)
t.test("P1 golden: and with AdamW", function()
  follow(numbers.adamw, function(p) return ddp.optim.AdamW(p, { lr = 0.01 }) end)
end)

local function rates(want, opts)
  local opt = ddp.optim.SGD({ ddp.zeros(1, { requires_grad = true }) }, { lr = 0.3 })
  opts.optimizer, opts.steps = opt, #want
  local s = ddp.optim.schedule.one_cycle(opts)
  for i, lr in ipairs(want) do
    t.near(opt.param_groups[1].lr, lr, 1e-9, "the rate of step " .. i)
    s:step()
  end
end
t.test("golden: one_cycle is PyTorch's OneCycleLR", function()
  rates(cycles.plain, {})
  rates(cycles.linear, { pct_start = 0.2, anneal_strategy = "linear", div_factor = 10, final_div_factor = 100 })
end)

t.done()
