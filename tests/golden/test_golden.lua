-- test_golden.lua -- one training step against PyTorch's numbers (make_golden.py), from the same weights and inputs.
-- PyTorch computed in f64, so the difference is all ours.
local t = require "harness"
local ddp = require "ddp"
local golden = require "golden"
local nn, F = ddp.nn, ddp.nn.functional

local function within(w, limits)
  for kind, limit in pairs(limits) do
    t.ok(w[kind] <= limit, ("%s differ by %.3g of the largest value (%s), at most %.0e"):format(kind, w[kind], tostring(w[kind .. "_name"]), limit))
  end
end

local function inputs(numbers)
  local n = 1
  for _, s in ipairs(numbers.size) do n = n * s end
  return golden.draw(n, numbers.stream):float():view(numbers.size)
end

t.test("golden: the toy's step equals PyTorch's", function()
  local m, numbers = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)), require "toy"
  golden.fill(m)
  local x = inputs(numbers)
  within(golden.step(m, numbers, function(net) return net(x):mean() end, ddp.optim.Adam(m:parameters())), { loss = 1e-5, grads = 1e-5, params = 1e-5 })
end)

-- ResNet-18's last batch norms see 8 values a channel: dividing by the deviation of so few multiplies the rounding of
-- what lies above (measured 2.7e-5 with Winograd convolutions, 1.1e-5 in exact precision).
local LIMIT = { exact = { resnet20 = 1e-5, resnet18 = 2e-5 }, highest = { resnet20 = 1e-5, resnet18 = 5e-5 } }
local function resnet_step(name, precision)
  t.test(("golden: %s's step equals PyTorch's, %s precision"):format(name, precision), function()
    ddp.set_float32_matmul_precision(precision)
    local limit = LIMIT[precision][name]
    local m, numbers = ddp.models[name] { num_classes = 10, stem = "cifar" }, require(name)
    golden.fill(m)
    local x, labels = inputs(numbers), {}
    for i = 1, numbers.size[1] do labels[i] = (i - 1) * 7 % 10 end
    local y = ddp.tensor(labels, { dtype = "i64" })
    local opt = ddp.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9, weight_decay = 5e-4, nesterov = true })
    local w = golden.step(m, numbers, function(net) return F.cross_entropy(net(x), y) end, opt)
    print(("# %s: loss %.1e, gradients %.1e (%s), parameters %.1e, buffers %.1e"):format(name, w.loss, w.grads, w.grads_name, w.params, w.buffers))
    within(w, { loss = 1e-5, grads = limit, params = limit, buffers = 1e-5 })
  end)
end
for _, precision in ipairs { "exact", "highest" } do
  for _, name in ipairs { "resnet20", "resnet18" } do resnet_step(name, precision) end
end

t.done()
