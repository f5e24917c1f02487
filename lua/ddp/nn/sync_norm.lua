-- sync_norm.lua -- nn.SyncBatchNorm: batch normalisation whose statistics in training are those of all ranks' values together,
-- however many each has. In evaluation it is a BatchNorm, and never communicates.
--
-- With n_r values a channel on rank r, n in all: mean = sum(n_r mean_r) / n, var = sum(n_r (var_r + (mean_r - mean)^2)) / n.
-- Backward, with xhat = (x - mean) rstd and sums over all ranks: dx = w rstd (g - sum(g) / n - xhat sum(g xhat) / n); the
-- gradients of weight and bias stay this rank's, for they are reduced with all others. Where that reduction is weighted, rank
-- r's gradients will be multiplied by its weight f_r in the end: so the sums here are of f_r g, divided by f_r again.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local module = require "ddp.nn.module"
local layers = require "ddp.nn.layers"
local parallel = require "ddp.parallel"
local func = require("ddp.func").func
local C, fail, free = base.C, base.error, base.free

local TINY = 1e-30 -- of var, where a channel's values are all alike

local SyncBatchNorm = module.class("SyncBatchNorm", layers.BatchNorm)

-- This rank's mean and variance of each channel, each [C], and how many values a channel has.
local function local_statistics(x)
  local channels = x:size(2)
  local n = channels > 0 and x:numel() / channels or 0
  local dtype = x:dtype() == "f64" and "f64" or "f32"
  if n == 0 then return tensor.zeros({ channels }, { dtype = dtype, device = x:device() }), tensor.zeros({ channels }, { dtype = dtype, device = x:device() }), 0 end
  if n == 1 then return x:reshape({ channels }):to(dtype), tensor.zeros({ channels }, { dtype = dtype, device = x:device() }), 1 end
  local y, mean, rstd = ops.batch_norm(x, nil, nil, nil, nil, true, 0, TINY)
  free(y)
  return mean, 1 / (rstd * rstd), n
end

-- Those of all ranks: mean, var and n. Collective; the same bits on all.
local function statistics(x)
  local mean, var, n = local_statistics(x)
  local c = x:size(2)
  local mine = tensor.cat({ tensor.full({ 1 }, n, { dtype = mean:dtype(), device = mean:device() }), mean, var }, 1)
  local all = parallel.all_gather(mine)
  local counts, means, vars = all:narrow(2, 1, 1), all:narrow(2, 2, c), all:narrow(2, 2 + c, c)
  local total = counts:sum():item()
  if total <= 1 then fail(("SyncBatchNorm: x is [%s]: one value a channel over all ranks has no variance to train on"):format(table.concat(x:size(), ","))) end
  local share = counts / total
  local whole = (share * means):sum(1)
  local off = means - whole
  return whole, (share * (vars + off * off)):sum(1), total
end

local function move(running, to, momentum)
  running:mul_(1 - momentum)
  running:add_(to * momentum)
end

local normalize = func {
  forward = function(ctx, bn, x, weight, bias)
    local mean, var, n = statistics(x)
    local y, y_mean, rstd = ops.batch_norm(x, weight, bias, mean, var, false, 0, bn.eps)
    free(y_mean)
    if bn.running_mean ~= nil and not grad.runs_again() then -- the second run of a checkpoint has counted already
      ops.add_(bn.num_batches_tracked, 1)
      move(bn.running_mean, mean, bn.momentum)
      move(bn.running_var, var * (n / (n - 1)), bn.momentum)
    end
    ctx:save_for_backward(x, weight)
    ctx.mean, ctx.rstd, ctx.n = mean, rstd, n
    return y
  end,
  backward = function(ctx, g)
    local x, weight = ctx.saved_tensors[1], ctx.saved_tensors[2]
    local c, shape, dtype = x:size(2), {}, x:dtype()
    if dtype == "f16" or dtype == "bf16" then x, g = x:to "f32", g:to "f32" end
    for d = 1, x:dim() do shape[d] = d == 2 and c or 1 end
    -- As if the statistics were constants; dw and db are the sums that the rest is made of.
    local dx, dw, db = ops.batch_norm_grad(g, x, weight, ctx.mean, ctx.rstd, false)
    local factor = grad.weighted and grad.factor or 1
    local sums = tensor.cat({ db, dw }, 1):to(ctx.rstd:dtype()) * factor
    parallel.all_reduce(sums, "sum", { name = "SyncBatchNorm" })
    if ctx.needs_input_grad[2] and factor ~= 0 then
      sums:mul_(1 / (factor * ctx.n))
      local scale = weight and weight * ctx.rstd or ctx.rstd
      local slope = scale * ctx.rstd * sums:narrow(1, c + 1, c)
      local level = scale * sums:narrow(1, 1, c) - slope * ctx.mean
      local off = x * slope:view(shape) -- slope x + level
      off:add_(level:view(shape))
      dx:sub_(off)
      free(off)
    end
    return nil, dx:to(dtype), weight and dw or nil, weight and db or nil
  end,
}

function SyncBatchNorm:forward(x)
  if not self.training or C.ddp_world_size() == 1 then
    self.dims = x:dim()
    return layers.BatchNorm.forward(self, x)
  end
  if x:dim() < 2 or x:size(2) ~= self.num_features then
    fail(("SyncBatchNorm: x is [%s], expected [N, %d, ...]"):format(table.concat(x:size(), ","), self.num_features))
  end
  return normalize(self, x, self.weight, self.bias)
end

-- Makes every BatchNorm in m a SyncBatchNorm, with the parameters, statistics and hooks it has. Returns m.
function SyncBatchNorm.convert(m)
  if type(m) ~= "table" or not m.named_modules then fail("SyncBatchNorm.convert: expected a module, got a " .. type(m)) end
  for _, child in m:named_modules() do
    if child:is(layers.BatchNorm) and child.forward == layers.BatchNorm.forward then setmetatable(child, SyncBatchNorm._meta) end
  end
  return m
end
SyncBatchNorm.convert_sync_batchnorm = SyncBatchNorm.convert -- PyTorch's name

return { SyncBatchNorm = SyncBatchNorm }
