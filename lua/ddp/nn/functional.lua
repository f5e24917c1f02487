-- functional.lua -- nn.functional: layers as functions, arguments in PyTorch's order.
local base = require "ddp.ffi"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local free, fail = base.free, base.error

local F = {}
for _, name in ipairs { "relu", "tanh", "sigmoid", "linear", "conv2d", "softmax", "log_softmax", "adaptive_avg_pool2d", "silu" } do F[name] = ops[name] end

-- Places are not given: max_pool2d of the op list gives them too.
function F.max_pool2d(x, kernel, stride, padding)
  local y, places = ops.max_pool2d(x, kernel, stride, padding)
  free(places)
  return y
end

function F.avg_pool2d(x, kernel, stride, padding, count_include_pad) return ops.avg_pool2d(x, kernel, stride, padding, count_include_pad) end

function F.dropout(x, p, training)
  if training == false or p == 0 then return x end
  local y, mask = ops.dropout(x, p)
  free(mask)
  return y
end

function F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
  if training and grad.runs_again() then running_mean, running_var = nil, nil end -- counted already
  local y, mean, rstd = ops.batch_norm(x, weight, bias, running_mean, running_var, training or false, momentum, eps)
  free(mean)
  free(rstd)
  return y
end

-- {approximate = "none"|"tanh"}
function F.gelu(x, opts)
  local a = base.options("gelu", opts, { "approximate" }).approximate or "none"
  if a ~= "none" and a ~= "tanh" then fail(("gelu: approximate is \"%s\", expected none or tanh"):format(tostring(a))) end
  return ops.gelu(x, a == "tanh")
end

-- Over the last dims of x, whose sizes are `shape` (a number: one dim).
function F.layer_norm(x, shape, weight, bias, eps)
  if type(shape) ~= "table" then shape = { shape } end
  local first = x:dim() - #shape
  for i, n in ipairs(shape) do
    if first < 0 or x:size(first + i) ~= n then
      fail(("layer_norm: x is [%s], expected its last sizes to be [%s]"):format(table.concat(x:size(), ","), table.concat(shape, ",")))
    end
  end
  local y, mean, rstd = ops.layer_norm(x, weight, bias, #shape, eps)
  free(mean)
  free(rstd)
  return y
end

-- Rows of weight [V, E] by ids, i64 from 0, of any shape: [..., E].
function F.embedding(ids, weight) return ops.embedding(weight, ids) end

local REDUCTION = { none = 0, mean = 1, sum = 2 }
-- {reduction = "mean"|"sum"|"none", ignore_index =, label_smoothing =}
function F.cross_entropy(logits, target, opts)
  opts = base.options("cross_entropy", opts, { "reduction", "ignore_index", "label_smoothing" })
  local r = REDUCTION[opts.reduction or "mean"]
  if not r then fail(("cross_entropy: reduction is \"%s\", expected none, mean or sum"):format(tostring(opts.reduction))) end
  return ops.cross_entropy(logits, target, r, opts.ignore_index, opts.label_smoothing)
end

function F.mse_loss(x, y, opts)
  opts = base.options("mse_loss", opts, { "reduction" })
  local d = ops.sub(base.summand(x), base.summand(y))
  local square = ops.mul(d, d)
  free(d)
  if opts.reduction == "none" then return square end
  local loss = opts.reduction == "sum" and ops.sum(square) or ops.mean(square)
  free(square)
  return loss
end

return F
