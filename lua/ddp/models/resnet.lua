-- resnet.lua -- residual networks (He et al. 2016). resnet18 and resnet50 have torchvision's parameter names; stem "cifar"
-- is a 3x3 convolution of stride 1 without the max pool, "imagenet" the usual one. resnet20 is the paper's for CIFAR.
local base = require "ddp.ffi"
local nn = require "ddp.nn"
local layers = require "ddp.nn.layers"
local free = base.free

local function conv3x3(i, o, stride) return nn.Conv2d(i, o, 3, { stride = stride, padding = 1, bias = false }) end
local function conv1x1(i, o, stride) return nn.Conv2d(i, o, 1, { stride = stride, bias = false }) end

-- relu(bn(conv(x)) + residual). What is made in between is dropped at once (the tape keeps what it needs), and with `drop`
-- x too, each where no hook of the modules that see it could have kept it.
local function conv_bn_relu(conv, bn, x, residual, drop)
  if layers.joins(conv, bn, x, residual) then
    local z = layers.conv_bn_act(conv, bn, x, residual, true)
    if drop then free(x) end
    return z
  end
  local y = conv(x)
  local z = layers.batch_norm_relu(bn, y, residual)
  local unseen = layers.plain(conv, nn.Conv2d)
  if unseen and layers.plain(bn, nn.BatchNorm2d) then free(y) end
  if unseen and drop then free(x) end
  return z
end

local Basic = nn.Module "BasicBlock"
Basic.expansion = 1
function Basic:init(i, o, stride)
  self.conv1 = conv3x3(i, o, stride)
  self.bn1 = nn.BatchNorm2d(o)
  self.conv2 = conv3x3(o, o, 1)
  self.bn2 = nn.BatchNorm2d(o)
  if stride ~= 1 or i ~= o then self.downsample = nn.Sequential(conv1x1(i, o, stride), nn.BatchNorm2d(o)) end
end

-- The block's input as it joins its output: a tensor of its own with a downsample, dropped by `joined` then.
local function shortcut(block, x) return block.downsample and block.downsample(x) or x end
local function joined(block, short, z)
  local d = block.downsample
  if d and layers.plain(d, nn.Sequential) and layers.plain(d[#d], nn.BatchNorm2d) then free(short) end
  return z
end
function Basic:forward(x)
  local y, short = conv_bn_relu(self.conv1, self.bn1, x), shortcut(self, x)
  return joined(self, short, conv_bn_relu(self.conv2, self.bn2, y, short, true))
end

local Bottleneck = nn.Module "Bottleneck"
Bottleneck.expansion = 4
function Bottleneck:init(i, o, stride)
  self.conv1 = conv1x1(i, o, 1)
  self.bn1 = nn.BatchNorm2d(o)
  self.conv2 = conv3x3(o, o, stride)
  self.bn2 = nn.BatchNorm2d(o)
  self.conv3 = conv1x1(o, 4 * o, 1)
  self.bn3 = nn.BatchNorm2d(4 * o)
  if stride ~= 1 or i ~= 4 * o then self.downsample = nn.Sequential(conv1x1(i, 4 * o, stride), nn.BatchNorm2d(4 * o)) end
end
function Bottleneck:forward(x)
  local y, short = conv_bn_relu(self.conv1, self.bn1, x), shortcut(self, x)
  y = conv_bn_relu(self.conv2, self.bn2, y, nil, true)
  return joined(self, short, conv_bn_relu(self.conv3, self.bn3, y, short, true))
end

local ResNet = nn.Module "ResNet"
-- opts: num_classes, stem, in_channels, zero_init_residual; widths: channels of the stages
function ResNet:init(block, depths, widths, opts)
  local stem = opts.stem or "imagenet"
  if stem ~= "cifar" and stem ~= "imagenet" then base.error(("resnet: stem is \"%s\", expected cifar or imagenet"):format(tostring(stem))) end
  local channels = widths[1]
  if stem == "cifar" then self.conv1 = conv3x3(opts.in_channels or 3, channels, 1)
  else self.conv1 = nn.Conv2d(opts.in_channels or 3, channels, 7, { stride = 2, padding = 3, bias = false }) end
  self.bn1 = nn.BatchNorm2d(channels)
  if stem == "imagenet" then self.maxpool = nn.MaxPool2d(3, { stride = 2, padding = 1 }) end
  self.stages = #depths
  for s, depth in ipairs(depths) do
    local blocks = {}
    for b = 1, depth do
      blocks[b] = block(channels, widths[s], (s > 1 and b == 1) and 2 or 1)
      channels = widths[s] * block.expansion
    end
    self["layer" .. s] = nn.Sequential(unpack(blocks))
  end
  self.avgpool = nn.AdaptiveAvgPool2d(1)
  self.fc = nn.Linear(channels, opts.num_classes or 1000)
  self:apply(function(m)
    if m:is(nn.Conv2d) then nn.init.kaiming_normal_(m.weight, { mode = "fan_out" }) end
    -- Each block begins as its shortcut (Goyal et al. 2017): the first hundred steps of a deep network go faster.
    if not opts.zero_init_residual then return end
    if m:is(Basic) then nn.init.zeros_(m.bn2.weight) elseif m:is(Bottleneck) then nn.init.zeros_(m.bn3.weight) end
  end)
end
function ResNet:forward(x)
  x = conv_bn_relu(self.conv1, self.bn1, x)
  if self.maxpool then x = self.maxpool(x) end
  for s = 1, self.stages do x = self["layer" .. s](x) end
  local pooled = self.avgpool(x)
  local flat = pooled:flatten(2)
  if layers.plain(self.avgpool, nn.AdaptiveAvgPool2d) then free(pooled) end
  return self.fc(flat)
end

local function maker(name, block, depths, widths, stem)
  return function(opts)
    opts = base.options(name, opts, { "num_classes", "stem", "in_channels", "zero_init_residual" })
    return ResNet(block, depths, widths, { num_classes = opts.num_classes, stem = opts.stem or stem, in_channels = opts.in_channels,
      zero_init_residual = opts.zero_init_residual })
  end
end
local wide = { 64, 128, 256, 512 }
return {
  resnet20 = maker("resnet20", Basic, { 3, 3, 3 }, { 16, 32, 64 }, "cifar"),
  resnet18 = maker("resnet18", Basic, { 2, 2, 2, 2 }, wide),
  resnet34 = maker("resnet34", Basic, { 3, 4, 6, 3 }, wide),
  resnet50 = maker("resnet50", Bottleneck, { 3, 4, 6, 3 }, wide),
}
