-- layers.lua -- the layers, with PyTorch's names, arguments, parameter shapes and initial values.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local module = require "ddp.nn.module"
local F = require "ddp.nn.functional"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local fail, free, Parameter, class = base.error, base.free, module.Parameter, module.class

local M = {}

local function whole(what, v)
  if type(v) ~= "number" or v % 1 ~= 0 or v < 1 then fail(("%s is %s, expected a whole number from 1"):format(what, tostring(v))) end
  return v
end

local function pair(v) if type(v) == "table" then return v end return { v, v } end

-- Uniform in +-1/sqrt(fan_in): what PyTorch's kaiming_uniform with a = sqrt(5) comes to.
local function uniform(size, fan_in)
  local bound = 1 / math.sqrt(fan_in)
  return Parameter(tensor.empty(size):uniform_(-bound, bound))
end

-- ---- containers -----------------------------------------------------------------------------------------------------

M.Sequential = class "Sequential"
function M.Sequential:init(...)
  for i, m in ipairs { ... } do
    if not module.is_module(m) then fail(("Sequential: argument %d is a %s, expected a module"):format(i, type(m))) end
    self[i] = m
  end
end
-- A Conv2d, the BatchNorm2d and the ReLU after it go as one where nothing is trained, a BatchNorm and a ReLU, and a Linear and a
-- ReLU or GELU. What a convolution made for the norm after it is freed where no hook could have kept it.
function M.Sequential:forward(x)
  local i, n = 1, #self
  while i <= n do
    local m, after = self[i], self[i + 1]
    if after and M.joins(m, after, x) then
      local relu = self[i + 2] ~= nil and M.plain(self[i + 2], M.ReLU)
      x = M.conv_bn_act(m, after, x, nil, relu)
      i = i + (relu and 3 or 2)
    elseif m:is(M.BatchNorm) then
      local relu, before = after ~= nil and M.plain(after, M.ReLU), self[i - 1]
      local normed = relu and M.batch_norm_relu(m, x) or m(x)
      if before and M.plain(before, M.Conv2d) and M.plain(m, M.BatchNorm) then free(x) end
      x = normed
      i = i + (relu and 2 or 1)
    elseif after and M.plain(m, M.Linear) and M.activation(after) then
      x = M.linear_act(m, x, M.activation(after))
      i = i + 2
    else
      x = m(x)
      i = i + 1
    end
  end
  return x
end

M.ModuleList = class "ModuleList"
function M.ModuleList:init(list) for _, m in ipairs(list or {}) do self:append(m) end end
function M.ModuleList:append(m)
  self[#self + 1] = m
  return self
end

M.ModuleDict = class "ModuleDict"
function M.ModuleDict:init(dict)
  local names = {}
  for name in pairs(dict or {}) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do self[name] = dict[name] end
end

-- ---- layers with parameters --------------------------------------------------------------------------------------------

M.Linear = class "Linear"
function M.Linear:init(i, o, opts)
  opts = base.options("Linear", opts, { "bias" })
  self.in_features, self.out_features = whole("Linear: in_features", i), whole("Linear: out_features", o)
  self.weight = uniform({ o, i }, i)
  if opts.bias ~= false then self.bias = uniform({ o }, i) end
end
function M.Linear:forward(x) return ops.linear(x, self.weight, self.bias) end
-- act(linear(x)) as one op; act: a number of ops.linear_act. What its gradient reads is kept only where one is wanted.
function M.linear_act(linear, x, act)
  local y, pre = ops.linear_act(x, linear.weight, linear.bias, nil, act, base.C.ddp_grad_mode() == 1)
  free(pre)
  return y
end
function M.Linear:extra() return ("%d, %d%s"):format(self.in_features, self.out_features, self.bias == nil and ", bias = false" or "") end

M.Conv2d = class "Conv2d"
function M.Conv2d:init(i, o, kernel, opts)
  opts = base.options("Conv2d", opts, { "stride", "padding", "dilation", "groups", "bias" })
  whole("Conv2d: in_channels", i)
  whole("Conv2d: out_channels", o)
  local groups = whole("Conv2d: groups", opts.groups or 1)
  if i % groups ~= 0 or o % groups ~= 0 then fail(("Conv2d: %d and %d channels do not divide into %d groups"):format(i, o, groups)) end
  local k = pair(kernel)
  self.stride, self.padding, self.dilation, self.groups = pair(opts.stride or 1), pair(opts.padding or 0), pair(opts.dilation or 1), groups
  self.channels, self.kernel = { i, o }, k
  local fan_in = i / groups * k[1] * k[2]
  self.weight = uniform({ o, i / groups, k[1], k[2] }, fan_in)
  if opts.bias ~= false then self.bias = uniform({ o }, fan_in) end
end
function M.Conv2d:forward(x) return ops.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups) end
function M.Conv2d:extra() return ("%d, %d, {%d, %d}"):format(self.channels[1], self.channels[2], self.kernel[1], self.kernel[2]) end

local BatchNorm = class "BatchNorm"
M.BatchNorm = BatchNorm
function BatchNorm:init(c, opts)
  opts = base.options(self._name, opts, { "eps", "momentum", "affine", "track_running_stats" })
  self.num_features = whole(self._name .. ": num_features", c)
  self.eps, self.momentum = opts.eps or 1e-5, opts.momentum or 0.1
  if opts.affine ~= false then
    self.weight = Parameter(tensor.ones(c))
    self.bias = Parameter(tensor.zeros(c))
  end
  if opts.track_running_stats ~= false then
    self:register_buffer("running_mean", tensor.zeros(c))
    self:register_buffer("running_var", tensor.ones(c))
    self:register_buffer("num_batches_tracked", tensor.zeros({}, { dtype = "i64" }))
  end
end
-- Checks x and counts the batch. Do batch statistics apply, and which running ones are read or moved? None on the second run
-- of a checkpoint: the first one counted this batch.
local function begin(self, x)
  if x:dim() ~= self.dims and x:dim() ~= self.other_dims then
    fail(("%s: x has %d dims, expected %d"):format(self._name, x:dim(), self.dims))
  end
  local training = self.training
  if training and grad.runs_again() then return true, nil, nil end
  if training and self.running_mean ~= nil then ops.add_(self.num_batches_tracked, 1) end
  return training or self.running_mean == nil, self.running_mean, self.running_var
end
function BatchNorm:forward(x)
  local training, mean, var = begin(self, x)
  return F.batch_norm(x, mean, var, self.weight, self.bias, training, self.momentum, self.eps)
end
-- Does m do what its class says, unseen: no hook to be called, no forward of its own, no check_nan that names modules?
function M.plain(m, kind)
  return m:is(kind) and m.forward == kind.forward and not rawget(m, "_hooks") and not rawget(m, "_pre_hooks") and not module.traced()
end

-- Can conv and bn, and what is added to them, go as one op: unseen, nothing recorded, by running statistics, in dtypes that fit?
function M.joins(conv, bn, x, residual)
  if base.C.ddp_grad_mode() == 1 or not tensor.is_tensor(x) or bn.training or bn.running_mean == nil or not M.plain(conv, M.Conv2d) or not M.plain(bn, M.BatchNorm2d) then
    return false
  end
  local C = base.C
  local own, low = C.ddp_dtype_of(x), C.ddp_autocast_dtype()
  if own == base.dtypes.f64 or C.ddp_dtype_of(bn.running_mean) ~= base.dtypes.f32 then return false end
  local y = low == C.DDP_AUTOCAST_OFF and own or low
  return (y == low or own == C.ddp_dtype_of(conv.weight)) and (residual == nil or y == C.ddp_dtype_of(residual))
end
-- relu(bn(conv(x)) + residual) as one op, where they join; relu and residual where they are.
function M.conv_bn_act(conv, bn, x, residual, relu)
  return ops.conv_bn_act(x, conv.weight, conv.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var, residual, conv.stride, conv.padding, conv.dilation,
    conv.groups, bn.eps, relu)
end

-- relu(bn(x) + residual), as one op where nobody looks in between; residual may be nil.
function M.batch_norm_relu(bn, x, residual)
  if M.plain(bn, BatchNorm) and (residual == nil or residual:dtype() == x:dtype()) then
    local training, running_mean, running_var = begin(bn, x)
    local y, mean, rstd = ops.batch_norm_act(x, bn.weight, bn.bias, running_mean, running_var, residual, training, bn.momentum, bn.eps)
    free(mean)
    free(rstd)
    return y
  end
  local y = bn(x) -- a hook may keep it
  if residual == nil then return ops.relu(y) end
  local sum = ops.add(y, residual)
  local z = ops.relu(sum)
  free(sum)
  return z
end
function BatchNorm:extra() return tostring(self.num_features) end
M.BatchNorm2d = class("BatchNorm2d", BatchNorm)
M.BatchNorm2d.dims = 4
M.BatchNorm1d = class("BatchNorm1d", BatchNorm)
M.BatchNorm1d.dims, M.BatchNorm1d.other_dims = 2, 3

M.LayerNorm = class "LayerNorm"
function M.LayerNorm:init(shape, opts)
  opts = base.options("LayerNorm", opts, { "eps", "elementwise_affine", "bias" })
  self.shape, self.eps = type(shape) == "table" and { unpack(shape) } or { shape }, opts.eps or 1e-5
  if #self.shape == 0 then fail "LayerNorm: normalized_shape is empty" end
  for _, n in ipairs(self.shape) do whole("LayerNorm: normalized_shape", n) end
  if opts.elementwise_affine ~= false then
    self.weight = Parameter(tensor.ones(self.shape))
    if opts.bias ~= false then self.bias = Parameter(tensor.zeros(self.shape)) end
  end
end
function M.LayerNorm:forward(x) return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps) end
function M.LayerNorm:extra() return table.concat(self.shape, ", ") end

M.Embedding = class "Embedding"
function M.Embedding:init(n, dim)
  self.num_embeddings, self.embedding_dim = whole("Embedding: num_embeddings", n), whole("Embedding: embedding_dim", dim)
  self.weight = Parameter(tensor.randn({ n, dim }))
end
function M.Embedding:forward(ids) return ops.embedding(self.weight, ids) end
function M.Embedding:extra() return ("%d, %d"):format(self.num_embeddings, self.embedding_dim) end

-- ---- layers without ----------------------------------------------------------------------------------------------------------

local function simple(name, fn)
  M[name] = class(name)
  M[name].forward = function(_, x) return fn(x) end
end
simple("ReLU", ops.relu)
simple("Tanh", ops.tanh)
simple("Sigmoid", ops.sigmoid)
simple("SiLU", ops.silu)
simple("Identity", function(x) return x end)

M.GELU = class "GELU"
function M.GELU:init(opts) self.opts = base.options("GELU", opts, { "approximate" }) end
function M.GELU:forward(x) return F.gelu(x, self.opts) end

-- The number by which ops.linear_act knows what m does, unseen; nil where it does not.
function M.activation(m)
  if M.plain(m, M.ReLU) then return 1 end
  if M.plain(m, M.GELU) then return m.opts.approximate == "tanh" and 3 or (m.opts.approximate == nil or m.opts.approximate == "none") and 2 or nil end
end

M.Flatten = class "Flatten"
function M.Flatten:init(first, last) self.first, self.last = first or 2, last or -1 end
function M.Flatten:forward(x) return x:flatten(self.first, self.last) end

M.Dropout = class "Dropout"
function M.Dropout:init(p) self.p = p or 0.5 end
function M.Dropout:forward(x) return F.dropout(x, self.p, self.training) end
function M.Dropout:extra() return tostring(self.p) end

local function pool(name, fn, known)
  M[name] = class(name)
  M[name].init = function(self, kernel, opts)
    opts = base.options(name, opts, known)
    self.kernel, self.opts = kernel, opts
  end
  M[name].forward = function(self, x) return fn(x, self.kernel, self.opts) end
  M[name].extra = function(self) return type(self.kernel) == "table" and table.concat(self.kernel, ", ") or tostring(self.kernel) end
end
pool("MaxPool2d", function(x, k, o) return F.max_pool2d(x, k, o.stride, o.padding) end, { "stride", "padding" })
pool("AvgPool2d", function(x, k, o) return F.avg_pool2d(x, k, o.stride, o.padding, o.count_include_pad) end, { "stride", "padding", "count_include_pad" })
pool("AdaptiveAvgPool2d", function(x, size) return ops.adaptive_avg_pool2d(x, size) end, {})

M.Softmax = class "Softmax"
function M.Softmax:init(dim) self.dim = dim or -1 end
function M.Softmax:forward(x) return ops.softmax(x, self.dim) end
M.LogSoftmax = class "LogSoftmax"
function M.LogSoftmax:init(dim) self.dim = dim or -1 end
function M.LogSoftmax:forward(x) return ops.log_softmax(x, self.dim) end

M.CrossEntropyLoss = class "CrossEntropyLoss"
function M.CrossEntropyLoss:init(opts) self.opts = base.options("CrossEntropyLoss", opts, { "reduction", "ignore_index", "label_smoothing" }) end
function M.CrossEntropyLoss:forward(x, y) return F.cross_entropy(x, y, self.opts) end
M.MSELoss = class "MSELoss"
function M.MSELoss:init(opts) self.opts = base.options("MSELoss", opts, { "reduction" }) end
function M.MSELoss:forward(x, y) return F.mse_loss(x, y, self.opts) end

return M
