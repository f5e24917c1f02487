-- test_check_nan.lua -- P4: the first op and module that made a NaN or an infinity.
local t = require "harness"
local ddp = require "ddp"
local nn = ddp.nn

local function checked(fn)
  ddp.check_nan(true)
  local ok, err = pcall(fn)
  ddp.check_nan(false)
  if not ok then error(err, 0) end
end
local function fails(fn, text) return t.fails(function() checked(fn) end, text) end

local Log = nn.Module "Log"
function Log:forward(x) return x:log() end
local function block() return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), Log())) end

t.test("P4 the op and the module's path are named, at the user's line", function()
  local m = block()
  ddp.no_grad(function() m[1].weight:fill_(0) m[1].bias:fill_(0) end)
  local err = fails(function() return m(ddp.ones(2, 3)) end, "check_nan: log in 1.1 (Log) made 8 infinities among the 8 elements of f32 [2,4]")
  t.ok(err:find "test_check_nan.lua:%d+: ", err)
  fails(function() return Log()(ddp.full({ 3 }, -1)) end, "check_nan: log in Log made 3 NaN")
  fails(function() return ddp.zeros(2) / ddp.zeros(2) end, "check_nan: div made 2 NaN among the 2 elements of f32 [2]")
end)
t.test("P4 a batch norm is named where its relu would run in one op with it", function()
  local m, x = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), ddp.randn(4, 3, 2, 2)
  ddp.no_grad(function() m[1].weight:fill_(3e38) end)
  fails(function() return m(x) end, "in 0 (BatchNorm2d)")
  local net = ddp.models.resnet20 { num_classes = 10 }
  ddp.no_grad(function() net.layer1[2].bn1.weight:fill_(3e38) end)
  fails(function() return net(ddp.randn(2, 3, 8, 8)) end, "in layer1.1.bn1 (BatchNorm2d)")
end)
t.test("P4 in backward the op whose gradient it is, and its module", function()
  local Root = nn.Module "Root"
  function Root:forward(x) return x:sqrt() end
  local m = nn.Sequential(nn.Linear(3, 1), Root())
  ddp.no_grad(function() m[1].weight:fill_(0) m[1].bias:fill_(0) end)
  fails(function() m(ddp.ones(2, 3)):sum():backward() end, "check_nan: div, in the gradient of sqrt, in 1 (Root) made 2 infinities")
  t.ok(pcall(function() m(ddp.ones(2, 3)):sum():backward() end), "off it lets them pass")
end)
t.test("P4 a wrapped model's modules are named too, and a NaN in the data is told as such", function()
  local net = ddp.DistributedDataParallel(block())
  local x = ddp.ones(2, 3)
  x[1][2] = 0 / 0
  fails(function() return net(x) end, "check_nan: linear in 0 (Linear) got 1 NaN among the 6 elements of f32 [2,3] in its input x")
end)
t.test("P4 f16 overflow under autocast names the cast, strided and f64 results are seen", function()
  fails(function() ddp.autocast("f16", function() return ddp.full({ 2, 2 }, 1e6):matmul(ddp.ones(2, 2)) end) end, "check_nan: cast made 4 infinities among the 4 elements of f16")
  fails(function() return ddp.zeros({ 2, 2 }, { dtype = "f64" }):log() end, "4 infinities among the 4 elements of f64")
  fails(function()
    local big = ddp.zeros(4, 3)
    big:slice(2, 2, 2):log_()
  end, "4 infinities among the 4 elements of f32 [4,1]")
end)
t.test("infinities that were asked for pass: a mask before a softmax", function()
  checked(function()
    local x = ddp.ones(2, 3):masked_fill(ddp.tensor { { 0, 1, 0 }, { 0, 0, 1 } }:bool(), -math.huge)
    t.near(x:softmax(-1)[1][1]:item(), 0.5, 1e-6)
    ddp.full({ 2 }, math.huge):fill_(0 / 0)
  end)
end)
t.test("P4 off by default and again after an error; what it was set to comes back", function()
  t.ok((ddp.zeros(1) / ddp.zeros(1)):item() ~= 0)
  t.eq({ ddp.check_nan(true), ddp.check_nan(false), ddp.check_nan(false) }, { false, true, false })
  t.fails(function() ddp.check_nan() end, "expected true or false")
  local m = nn.Linear(2, 2)
  checked(function()
    t.ok(not pcall(m, ddp.ones(2, 3)))
    m(ddp.ones(2, 2)):sum():backward()
  end)
end)

t.done()
