-- test_nn.lua -- modules, optimizers, and training with them.
local t = require "harness"
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional
local ops = require "ddp.ops"

t.test("modules list parameters in order of assignment, tied ones once", function()
  local Block = nn.Module "Block"
  function Block:init()
    self.b = nn.Linear(2, 3)
    self.a = nn.Linear(3, 2, { bias = false })
    self.tied = self.a
    self.scale = nn.Parameter(ddp.ones(1))
    self:register_buffer("n", ddp.zeros(1))
  end
  local m, names = Block(), {}
  for name in m:named_parameters() do names[#names + 1] = name end
  t.eq(names, { "scale", "b.weight", "b.bias", "a.weight" })
  t.eq(#m:parameters(), 4)
  t.ok(m:state_dict().n ~= nil)
  t.ok(m:is(Block) and not m:is(nn.Linear) and m.a:is(nn.Linear))
end)
t.test("children of Sequential are numbered from 0 by name and from 1 by position", function()
  local m = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
  t.ok(m[3].weight:size(2) == 3)
  local names = {}
  for name in ddp.sorted(m:state_dict()) do names[#names + 1] = name end
  t.eq(names, { "0.bias", "0.weight", "2.bias", "2.weight" })
  t.eq(m(ddp.ones(4, 2)):size(), { 4, 1 })
end)
t.test("a plain table that holds modules is an error at parameters()", function()
  local M = nn.Module "M"
  function M:init() self.list = { nn.Linear(1, 1) } end
  t.fails(function() M():parameters() end, "use nn.ModuleList")
end)
t.test("load_state_dict copies, and names what is missing or unexpected", function()
  local a, b = nn.Linear(2, 2), nn.Linear(2, 2)
  b:load_state_dict(a:state_dict())
  t.ok(a.weight:equal(b.weight) and a.weight ~= b.weight)
  t.fails(function() b:load_state_dict { weight = a.weight, extra = a.bias } end, "missing: bias; unexpected: extra")
  local r = b:load_state_dict({ weight = a.weight }, { strict = false })
  t.eq(r.missing_keys, { "bias" })
  t.fails(function() b:load_state_dict { weight = ddp.ones(3, 2), bias = a.bias } end, "weight is [2,2] here, [3,2]")
end)
t.test("hooks run before and after forward, and can be removed", function()
  local m, log = nn.Linear(2, 2), {}
  local h1 = m:register_forward_pre_hook(function() log[#log + 1] = "pre" end)
  local h2 = m:register_forward_hook(function(_, _, y) log[#log + 1] = "post" return y * 0 end)
  t.eq(m(ddp.ones(1, 2)):sum():item(), 0)
  t.eq(log, { "pre", "post" })
  h1:remove()
  h2:remove()
  t.ok(m(ddp.ones(1, 2)):abs():sum():item() > 0)
end)
t.test("dropout and batch norm follow train and eval", function()
  local m = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(3))
  ddp.manual_seed(1)
  local x = ddp.randn(8, 3, 4, 4)
  local y = m(x)
  t.near(y:mean():item(), 0, 1e-5)
  t.eq(m[2].num_batches_tracked:item(), 1)
  m:eval()
  local mean = m[2].running_mean:clone()
  m(x)
  t.ok(m[2].running_mean:equal(mean), "eval leaves the statistics alone")
  t.fails(function() m[2](ddp.ones(2, 3)) end, "BatchNorm2d: x has 2 dims")
end)
t.test("constructors refuse bad arguments by name", function()
  t.fails(function() nn.Linear(2) end, "Linear: out_features is nil")
  t.fails(function() nn.Conv2d(3, 4, 3, { strid = 2 }) end, "did you mean \"stride\"")
  t.fails(function() nn.Conv2d(3, 4, 3, { groups = 2 }) end, "do not divide into 2 groups")
  t.fails(function() ddp.optim.SGD({}, { lr = 1 }) end, "no parameters")
  t.fails(function() ddp.optim.SGD({ ddp.ones(1) }, {}) end, "lr is missing")
  t.fails(function() ddp.optim.Adam({ ddp.ones(1) }, { learning_rate = 1 }) end, "no option")
end)
t.test("a label out of range is named", function()
  t.fails(function() return F.cross_entropy(ddp.zeros(2, 3), ddp.tensor({ 0, 7 }, { dtype = "i64" })) end, "label 7 at position 1")
end)
t.test("SGD skips parameters without a gradient and follows momentum", function()
  local a, b = ddp.ones(1, { requires_grad = true }), ddp.ones(1, { requires_grad = true })
  local opt = ddp.optim.SGD({ a, b }, { lr = 0.1, momentum = 0.9, weight_decay = 0.1 });
  (a * 2):sum():backward()
  opt:step()
  t.near(a:item(), 1 - 0.1 * 2.1, 1e-6)
  t.eq(b:item(), 1, "no weight decay without a gradient")
  opt:zero_grad()
  t.ok(a.grad == nil);
  (a * 2):sum():backward()
  local before = a:item()
  opt:step()
  t.near(a:item(), before - 0.1 * (0.9 * 2.1 + 2 + 0.1 * before), 1e-6)
end)
t.test("groups have options of their own", function()
  local a, b = ddp.ones(1, { requires_grad = true }), ddp.ones(1, { requires_grad = true })
  local opt = ddp.optim.SGD({ { params = { a }, lr = 1 }, { params = { b } } }, { lr = 0.1 });
  (a + b):sum():backward()
  opt:step()
  t.near(a:item(), 0, 1e-6)
  t.near(b:item(), 0.9, 1e-6)
  opt.param_groups[2].lr = 0
  opt:step()
  t.near(b:item(), 0.9, 1e-6)
end)
t.test("a small net fits exclusive or", function()
  ddp.manual_seed(2)
  local x, y = ddp.tensor { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 } }, ddp.tensor { { 0 }, { 1 }, { 1 }, { 0 } }
  local m = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
  local opt = ddp.optim.Adam(m:parameters(), { lr = 0.05 })
  local loss
  for _ = 1, 300 do
    loss = F.mse_loss(m(x), y)
    opt:zero_grad()
    loss:backward()
    opt:step()
  end
  t.ok(loss:item() < 1e-3, "loss " .. loss:item())
end)
t.test("resnets have torchvision's parameter names and counts", function()
  local m = ddp.models.resnet18 { num_classes = 10, stem = "cifar" }
  t.eq(m:num_parameters(), 11173962)
  local sd = m:state_dict()
  for _, name in ipairs { "conv1.weight", "bn1.running_mean", "layer2.0.downsample.0.weight", "layer4.1.bn2.num_batches_tracked", "fc.bias" } do
    t.ok(sd[name] ~= nil, name)
  end
  t.eq(ddp.models.resnet50():num_parameters(), 25557032)
  t.eq(ddp.models.resnet20 { num_classes = 10 }:num_parameters() > 270000, true)
end)
local function tiny_resnet()
  ddp.manual_seed(1)
  return ddp.models.resnet20 { num_classes = 10 }, ddp.randn(2, 3, 8, 8)
end
for _, path in ipairs { "conv1", "bn1", "avgpool", "layer2.1.conv1", "layer2.1.bn1", "layer2.1.conv2", "layer2.1.bn2", "layer2.1.downsample.2" } do
  t.test("hooks on a resnet's " .. path .. " may keep what they see", function()
    local net, x = tiny_resnet()
    local m, kept = net, {}
    for key in path:gmatch "[^.]+" do m = m[tonumber(key) or key] end
    local function keep(y) kept[#kept + 1] = { y, y:clone() } end
    m:register_forward_pre_hook(function(_, input) keep(input[1]) end)
    m:register_forward_hook(function(_, _, y) keep(y) end)
    net(x)
    for _ = 1, 20 do ddp.ones(1) end -- a handle that was given back is another tensor's now
    t.eq(#kept, 2)
    for _, k in ipairs(kept) do t.ok(k[1]:size(1) == 2 and k[1]:equal(k[2])) end
  end)
end
t.test("a Sequential's hook on a batch norm may keep what it sees", function()
  local m, kept = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), nil
  m[1]:register_forward_hook(function(_, _, y) kept = { y, y:clone() } end)
  m(ddp.randn(4, 3, 2, 2))
  for _ = 1, 20 do ddp.ones(1) end
  t.ok(kept[1]:size(1) == 4 and kept[1]:equal(kept[2]))
end)
t.test("a resnet's batch norms and pooling may be put out of use by Identity", function()
  local net, x = tiny_resnet()
  local block = net.layer2[1]
  net.bn1, block.bn1, block.bn2, block.downsample[2], net.avgpool = nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity(), nn.AvgPool2d(2)
  local kept
  block:register_forward_hook(function(_, input) kept = { input[1], input[1]:clone() } end)
  local y = net(x)
  for _ = 1, 20 do ddp.ones(1) end
  t.ok(kept[1]:equal(kept[2]))
  t.ok(y:equal(net(x)), "a second run gives the same")
  t.eq(y:size(), { 2, 10 })
end)
t.test("clip_grad_norm_ scales to the norm and returns what it was", function()
  local a = ddp.ones(4, { requires_grad = true });
  (a * 3):sum():backward()
  t.near(ddp.clip_grad_norm_({ a }, 1):item(), 6, 1e-5)
  t.near(a.grad:norm():item(), 1, 1e-4)
end)

-- Numbers of PyTorch 2.8.
local function near(got, want, message) for i, w in ipairs(want) do t.near(got[i], w, 2e-6, message) end end

t.test("GELU, exact and with tanh, and SiLU give PyTorch's values and gradients", function()
  local function check(f, values, grads)
    local x = ddp.tensor({ -3, -1, -0.5, 0, 0.5, 1, 3 }, { requires_grad = true })
    local y = f(x)
    near(y:tolist(), values)
    y:sum():backward()
    near(x.grad:tolist(), grads)
  end
  check(nn.GELU(), { -0.0040502, -0.1586553, -0.1542688, 0, 0.3457312, 0.8413447, 2.9959497 },
    { -0.0119456, -0.0833154, 0.1325049, 0.5, 0.8674951, 1.0833154, 1.0119456 })
  check(nn.GELU { approximate = "tanh" }, { -0.0036374, -0.158808, -0.154286, 0, 0.345714, 0.841192, 2.9963627 },
    { -0.0115843, -0.0829641, 0.1326301, 0.5, 0.8673699, 1.0829641, 1.0115843 })
  check(nn.SiLU(), { -0.1422776, -0.2689414, -0.1887703, 0, 0.3112297, 0.7310586, 2.8577225 },
    { -0.0881041, 0.0723295, 0.2600388, 0.5, 0.7399612, 0.9276705, 1.0881041 })
  t.fails(function() F.gelu(ddp.ones(1), { approximate = "erf" }) end, "expected none or tanh")
end)
t.test("LayerNorm gives PyTorch's values and gradients", function()
  local m = nn.LayerNorm(3)
  m:load_state_dict { weight = ddp.tensor { 1, 0.5, 2 }, bias = ddp.tensor { 0, 1, -1 } }
  local x = ddp.tensor({ { 1, 2, 4 }, { 0, -1, 3 } }, { requires_grad = true })
  local y = m(x)
  near(y:reshape(6):tolist(), { -1.069041, 0.86637, 1.672604, -0.392232, 0.509711, 1.745621 });
  (y * ddp.tensor { { 1, 2, 3 }, { -1, 0, 1 } }):sum():backward()
  near(x.grad:reshape(6):tolist(), { 0.572688, -0.859055, 0.286365, -0.543091, 0.407315, 0.135775 })
  near(m.weight.grad:tolist(), { -0.67681, -0.534521, 5.381716 })
  near(m.bias.grad:tolist(), { 0, 2, 4 })
end)
t.test("LayerNorm normalises over several dims, and refuses other sizes by name", function()
  ddp.manual_seed(3)
  local y = nn.LayerNorm({ 4, 5 }, { elementwise_affine = false })(ddp.randn(6, 4, 5) * 3 + 7)
  for i = 1, 6 do
    t.near(y[i]:mean():item(), 0, 1e-5)
    t.near((y[i] * y[i]):mean():item(), 1, 1e-4)
  end
  t.eq(#nn.LayerNorm(3, { bias = false }):parameters(), 1)
  t.fails(function() nn.LayerNorm(5)(ddp.ones(2, 4)) end, "layer_norm: x is [2,4], expected its last sizes to be [5]")
  t.fails(function() nn.LayerNorm({ 2, 4 })(ddp.ones(4)) end, "x is [4]")
  t.fails(function() nn.LayerNorm(0) end, "normalized_shape")
end)
t.test("LayerNorm and BatchNorm2d with f32 parameters take x of 16 bits and keep its dtype", function()
  for _, dtype in ipairs { "f16", "bf16" } do
    local norm, x = nn.LayerNorm(4), ddp.randn(3, 4):to(dtype):requires_grad_(true)
    local y = norm(x)
    y:sum():backward()
    t.eq({ y:dtype(), x.grad:dtype(), norm.weight.grad:dtype() }, { dtype, dtype, "f32" })
    local bn = nn.BatchNorm2d(2)
    t.eq(bn(ddp.randn(3, 2, 4, 4):to(dtype)):dtype(), dtype)
    t.eq(bn.running_mean:dtype(), "f32")
  end
end)
t.test("Embedding picks rows by ids of any shape and adds their gradients up", function()
  local m = nn.Embedding(4, 2)
  local ids = ddp.tensor({ { 1, 3 }, { 1, 0 } }, { dtype = "i64" })
  local y = m(ids)
  t.eq(y:size(), { 2, 2, 2 })
  t.ok(y[1][1]:equal(m.weight[2]) and y[2][2]:equal(m.weight[1]))
  t.ok(y:equal(F.embedding(ids, m.weight)))
  y:sum():backward()
  t.eq(m.weight.grad:tolist(), { { 1, 1 }, { 2, 2 }, { 0, 0 }, { 1, 1 } })
  t.fails(function() m(ddp.tensor({ 4 }, { dtype = "i64" })) end, "id 4 at position 0, expected 0 to 3")
end)

-- The kernels that fn's ops ran on, as one text.
local function kernels_of(fn)
  local names = {}
  for _, row in ipairs(ddp.profile(fn)) do names[#names + 1] = row.kernel end
  return table.concat(names, " ")
end
local function close(a, b, limit) return (a - b):abs():max():item() <= limit * math.max(b:abs():max():item(), 1e-12) end

t.test("a BatchNorm2d and the ReLU after it go as one op, equal to the two, gradients and statistics included", function()
  ddp.manual_seed(5)
  local fused = nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU())
  local plain = nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU())
  plain:load_state_dict(fused:state_dict())
  local x = ddp.randn(4, 3, 6, 6)
  local a, b = x:clone():requires_grad_(true), x:clone():requires_grad_(true)
  local y, z
  t.ok(kernels_of(function() y = fused(a) end):find "batch_norm_act")
  t.ok(not kernels_of(function() z = F.relu(plain[2](plain[1](b))) end):find "batch_norm_act")
  local g = ddp.randn(4, 6, 6, 8):permute(1, 4, 2, 3) -- laid out as the results are: the vectorised kernels take it
  t.ok(kernels_of(function() y:backward(g) end):find "batch_norm_act_grad%.cpu")
  z:backward(g)
  t.ok(close(y, z, 1e-6) and close(a.grad, b.grad, 1e-5))
  local p, q = fused:parameters(), plain:parameters()
  for i = 3, #p do t.ok(close(p[i].grad, q[i].grad, 1e-5)) end -- the convolution's bias has no gradient but rounding
  t.ok(close(p[1].grad, q[1].grad, 1e-4))
  for name, buffer in fused:named_buffers() do t.ok(buffer:equal(plain:state_dict()[name]), name) end
  fused:eval()
  plain:eval()
  t.ok(close(fused(x), F.relu(plain[2](plain[1](x))), 1e-6))
end)
t.test("a hook, or a forward of its own, keeps BatchNorm2d and ReLU apart", function()
  local m, x, seen = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()), ddp.randn(4, 2, 3, 3), 0
  local function fused() return kernels_of(function() m(x) end):find "batch_norm_act" ~= nil end
  t.ok(fused())
  local hook = m[1]:register_forward_hook(function(_, _, y) seen = seen + (y:amin():item() < 0 and 1 or 0) end)
  t.ok(not fused() and seen == 1, "the hook saw what the norm made")
  hook:remove()
  hook = m[2]:register_forward_pre_hook(function() seen = seen + 1 end)
  t.ok(not fused() and seen == 2)
  hook:remove()
  t.ok(fused())
  m[2].forward = function(_, y) return y * 2 end
  t.ok(not fused())
end)
-- What the ops of m(x) in eval mode are called, and the result, without recording: as users run a trained model.
local function unrecorded(m, x)
  local y
  return kernels_of(function() y = ddp.no_grad(m, x) end), y
end
local function convolutions(relu)
  local m = nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), relu and nn.ReLU() or nn.Tanh())
  ddp.no_grad(m, ddp.randn(4, 3, 6, 6)) -- statistics of its own
  return m:eval()
end
t.test("a Conv2d, BatchNorm2d and ReLU in eval mode go as one op where nothing is recorded, equal to the three", function()
  ddp.manual_seed(6)
  for _, relu in ipairs { true, false } do
    local m, x = convolutions(relu), ddp.randn(4, 6, 6, 3):permute(1, 4, 2, 3)
    local names, y = unrecorded(m, x)
    t.ok(names:find "conv_bn_act" and not names:find "batch_norm" and not names:find "relu", names)
    local recorded
    t.ok(not kernels_of(function() recorded = m(x) end):find "conv_bn_act", "fused where a gradient may be wanted")
    t.ok(close(y, recorded, 1e-5))
    names, y = unrecorded(function(v) return ddp.autocast("bf16", m, v) end, x)
    t.ok(names:find "conv_bn_act" and y:dtype() == "bf16", names)
    t.ok(close(y:float(), recorded, 2 ^ -6))
    m:train()
    t.ok(not unrecorded(m, x):find "conv_bn_act", "fused in training")
  end
end)
t.test("a hook, a forward of its own, check_nan, missing statistics or f64 keep Conv2d and BatchNorm2d apart", function()
  local m, x, seen = convolutions(true), ddp.randn(2, 3, 6, 6), 0
  local function fused() return unrecorded(m, x):find "conv_bn_act" ~= nil end
  t.ok(fused())
  for i = 1, 2 do
    local hook = m[i]:register_forward_hook(function() seen = seen + 1 end)
    t.ok(not fused() and seen == i)
    hook:remove()
  end
  local hook = m[3]:register_forward_pre_hook(function(_, input) seen = seen + (input[1]:amin():item() < 0 and 1 or 0) end)
  local names = unrecorded(m, x)
  t.ok(names:find "conv_bn_act" and names:find "relu%.cpu" and seen == 3, "the hook saw what the norm made")
  hook:remove()
  ddp.check_nan(true)
  t.ok(not fused())
  ddp.check_nan(false)
  local own = m[1].forward
  m[1].forward = function(self, v) return own(self, v) * 2 end
  t.ok(not fused())
  m[1].forward = nil
  t.ok(fused())
  local bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, { track_running_stats = false })):eval()
  t.ok(not unrecorded(bare, x):find "conv_bn_act")
  t.fails(function() unrecorded(m, x:double()) end, "conv2d: w is f32, expected f64")
end)
t.test("resnet18's logits in eval mode are the same whether its convolutions and norms go as one op or apart", function()
  ddp.manual_seed(8)
  local net, x = ddp.models.resnet18 { num_classes = 10, stem = "cifar" }, ddp.randn(2, 3, 32, 32)
  ddp.no_grad(net, x)
  net:eval()
  for dtype, limit in pairs { f32 = 1e-4, bf16 = 2 ^ -4 } do
    local function run(v) return dtype == "f32" and net(v) or ddp.autocast(dtype, net, v) end
    local names, y = unrecorded(run, x)
    t.ok(names:find "conv_bn_act" and not names:find "batch_norm", names)
    local recorded
    t.ok(not kernels_of(function() recorded = run(x) end):find "conv_bn_act")
    t.ok(y:dtype() == recorded:dtype() and close(y:float(), recorded:float(), limit), dtype)
  end
end)
t.test("a Sequential frees what a Conv2d made for the BatchNorm2d after it, unless a hook could have kept it", function()
  local m, x, kept = nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8)), ddp.randn(4, 3, 16, 16), nil
  local function left()
    collectgarbage()
    collectgarbage()
    collectgarbage "stop"
    local before = ddp.memory_stats().live_tensors
    local y = ddp.no_grad(m, x)
    local n = ddp.memory_stats().live_tensors - before
    collectgarbage "restart"
    return n, y
  end
  t.eq((left()), 1)
  local hook = m[1]:register_forward_hook(function(_, _, y) kept = y end)
  t.eq((left()), 2)
  t.eq(kept:size(), { 4, 8, 16, 16 })
  hook:remove()
  local y = m(x:requires_grad_(true)) -- the tape keeps what it reads
  y:sum():backward()
  t.ok(x.grad ~= nil)
end)
t.test("a Linear and the ReLU or GELU after it go as one op, equal to the two, gradients included", function()
  local bits = { f32 = 23, bf16 = 7 }
  for _, make in ipairs { function() return nn.ReLU() end, function() return nn.GELU() end, function() return nn.GELU { approximate = "tanh" } end } do
    for _, dtype in ipairs { "f32", "bf16" } do
      ddp.manual_seed(5)
      local fused = nn.Sequential(nn.Linear(20, 70), make(), nn.Linear(70, 5, { bias = false }), make())
      local plain = nn.Sequential(nn.Linear(20, 70), make(), nn.Linear(70, 5, { bias = false }), make())
      plain:load_state_dict(fused:state_dict())
      for i = 1, 4 do plain[i]:register_forward_hook(function() end) end
      local x, g = ddp.randn(130, 20), ddp.randn(130, 5)
      local a, b = x:clone():requires_grad_(true), x:clone():requires_grad_(true)
      local function run(m, v) return dtype == "f32" and m(v) or ddp.autocast(dtype, m, v) end
      local y, z
      t.ok(kernels_of(function() y = run(fused, a) end):find "linear_act%.cpu", "not fused")
      t.ok(not kernels_of(function() z = run(plain, b) end):find "linear_act", "hooks did not keep them apart")
      t.ok(kernels_of(function() y:backward(g:to(y:dtype())) end):find "linear_act_grad%.cpu")
      z:backward(g:to(z:dtype()))
      local limit = 8 * 2 ^ -bits[dtype] -- what each layer rounds
      t.ok(close(y, z, limit) and close(a.grad, b.grad, limit))
      local q = plain:parameters()
      for i, p in ipairs(fused:parameters()) do t.ok(close(p.grad, q[i].grad, limit), "parameter " .. i) end
      local quiet = ddp.no_grad(function() return run(fused, x) end)
      t.ok(not quiet.requires_grad and close(quiet, z, limit))
    end
  end
end)
t.test("a hook, a forward of its own or check_nan keeps Linear and GELU apart; an unknown approximation stays an error", function()
  local m, x = nn.Sequential(nn.Linear(3, 4), nn.GELU()), ddp.randn(2, 3)
  local function fused() return kernels_of(function() m(x) end):find "linear_act" ~= nil end
  t.ok(fused())
  local hook = m[1]:register_forward_hook(function() end)
  t.ok(not fused())
  hook:remove()
  hook = m[2]:register_forward_pre_hook(function() end)
  t.ok(not fused())
  hook:remove()
  ddp.check_nan(true)
  t.ok(not fused())
  ddp.check_nan(false)
  t.ok(fused())
  m[1].forward = function(self, v) return F.linear(v, self.weight, self.bias) * 2 end
  t.ok(not fused())
  t.fails(function() nn.Sequential(nn.Linear(3, 4), nn.GELU { approximate = "tan" })(x) end, "expected none or tanh")
end)
t.test("without a gradient wanted, or without save, linear_act keeps nothing for it", function()
  local x, w = ddp.randn(6, 3), ddp.randn(4, 3)
  local _, kept = ops.linear_act(x, w, nil, nil, 2)
  local _, none = ops.linear_act(x, w, nil, nil, 2, false)
  local _, of_relu = ops.linear_act(x, w, nil, nil, 1)
  t.eq({ kept:numel(), none:numel(), of_relu:numel() }, { 24, 0, 0 })
end)
t.test("hooks in a ResNet see live tensors, before and after the ops that drop theirs", function()
  local net, kept = ddp.models.resnet20 { num_classes = 3, in_channels = 3 }, {}
  local block = net.layer2[1]
  for _, m in ipairs { block.conv1, block.bn1, block.conv2, block.bn2, block.downsample[1], block.downsample[2] } do
    m:register_forward_hook(function(_, input, y) kept[#kept + 1] = y kept[#kept + 1] = input[1] end)
  end
  net(ddp.randn(2, 3, 8, 8)):sum():backward()
  t.eq(#kept, 12)
  for _, y in ipairs(kept) do t.ok(y:sum():item() == y:sum():item()) end
end)

t.test("SyncBatchNorm alone is a BatchNorm, of any number of dims; convert keeps what a model has", function()
  local x = ddp.randn(4, 3, 2, 2)
  local model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3, { eps = 0.1 })))
  model(x)
  local seen, want = 0, model:eval()(x)
  model[2]:register_forward_hook(function() seen = seen + 1 end)
  local before = model:state_dict()
  t.ok(nn.SyncBatchNorm.convert(model) == model and model[2]:is(nn.SyncBatchNorm) and model[3][1]:is(nn.SyncBatchNorm))
  for name, p in pairs(model:state_dict()) do t.ok(p == before[name], name .. " is another tensor") end
  t.ok(model(x):equal(want), "the converted model gives other values")
  t.eq(seen, 1, "a hook was lost")
  t.ok(not model[2].training and nn.SyncBatchNorm(3)(ddp.randn(4, 3)):size(2) == 3)
  t.fails(function() nn.SyncBatchNorm.convert(3) end, "SyncBatchNorm.convert: expected a module")
  t.fails(function() nn.SyncBatchNorm(3, { momentun = 1 }) end, "did you mean \"momentum\"")
end)

t.done()
