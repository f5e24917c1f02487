-- nn: modules, layers, functions, initial values.
local base = require "ddp.ffi"
local module = require "ddp.nn.module"
local grad = require "ddp.grad"

local nn = { functional = require "ddp.nn.functional", Parameter = module.Parameter, Module = module.class, is_module = module.is_module }
for name, class in pairs(require "ddp.nn.layers") do nn[name] = class end
nn.SyncBatchNorm = require("ddp.nn.sync_norm").SyncBatchNorm

-- ---- nn.init: in place, outside the graph; each returns its tensor -------------------------------------------------
local init = {}
nn.init = init

local function fans(t, what)
  local s = t:size()
  if #s < 2 then base.error(("%s: a tensor of %d dims has no fan; at least 2"):format(what, #s)) end
  local field = 1
  for i = 3, #s do field = field * s[i] end
  return s[2] * field, s[1] * field
end
local function in_place(fn) return function(t, ...) grad.no_grad(fn, t, ...) return t end end

init.uniform_ = in_place(function(t, a, b) t:uniform_(a or 0, b or 1) end)
init.normal_ = in_place(function(t, mean, std) t:normal_(mean or 0, std or 1) end)
init.constant_ = in_place(function(t, v) t:fill_(v) end)
init.zeros_ = in_place(function(t) t:fill_(0) end)
init.ones_ = in_place(function(t) t:fill_(1) end)

-- He et al. 2015: normal with deviation gain/sqrt(fan). {mode = "fan_in"|"fan_out"}; the gain is relu's, sqrt 2.
init.kaiming_normal_ = in_place(function(t, opts)
  opts = base.options("kaiming_normal_", opts, { "mode", "nonlinearity" })
  local fan_in, fan_out = fans(t, "kaiming_normal_")
  t:normal_(0, math.sqrt(2 / (opts.mode == "fan_out" and fan_out or fan_in)))
end)
init.kaiming_uniform_ = in_place(function(t, opts)
  opts = base.options("kaiming_uniform_", opts, { "mode", "nonlinearity", "a" })
  local fan_in, fan_out = fans(t, "kaiming_uniform_")
  local gain = math.sqrt(2 / (1 + (opts.a or 0) ^ 2))
  local bound = gain * math.sqrt(3 / (opts.mode == "fan_out" and fan_out or fan_in))
  t:uniform_(-bound, bound)
end)
-- Glorot & Bengio 2010.
init.xavier_uniform_ = in_place(function(t)
  local fan_in, fan_out = fans(t, "xavier_uniform_")
  local bound = math.sqrt(6 / (fan_in + fan_out))
  t:uniform_(-bound, bound)
end)

return nn
