-- ddp -- the module that scripts require. What is used rarely is loaded when it is first named.
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local grad = require "ddp.grad"
local parallel = require "ddp.parallel"
local ffi = require "ffi"
local C = base.C
require "ddp.coroutines" -- modes belong to them

local ddp = {}
for _, part in ipairs { tensor, grad, parallel } do
  for name, value in pairs(part) do ddp[name] = value end
end
for _, internal in ipairs { "methods", "operand", "with_generator", "record_host", "modes", "snapshot", "enter", "leave", "runs_again" } do ddp[internal] = nil end

-- What this rank computes on: "cuda:0", or "cpu" where there is no GPU or DDP_DEVICE=cpu.
function ddp.device()
  local device = C.ddp_local_device()
  if device < 0 then base.raise() end
  return base.device_name(device)
end
-- Where new tensors are made that are not told.
function ddp.set_default_device(name)
  local device = base.device(name, "set_default_device")
  if C.ddp_device_check(device) < 0 then base.raise() end
  base.default_device = device
end
function ddp.num_threads() return C.ddp_num_threads() end
function ddp.version() return ffi.string(C.ddp_version()) end

-- ddp.manual_seed(1), alike on all ranks; {per_rank = true} differs.
function ddp.manual_seed(seed, opts)
  opts = base.options("manual_seed", opts, { "per_rank" })
  if type(seed) ~= "number" then base.error("manual_seed: expected a number, got a " .. type(seed)) end
  if opts.per_rank then C.ddp_manual_seed_per_rank(seed) else C.ddp_manual_seed(seed) end
end
function ddp.generator(seed, opts)
  opts = base.options("generator", opts, { "per_rank" })
  local g = C.ddp_generator_new(seed, opts.per_rank and 1 or 0)
  if g == nil then base.raise() end
  return { handle = ffi.gc(g, C.ddp_generator_free) }
end

-- Of a device; this rank's when none is named.
local function device_of(name, what) return name and base.device(name, what) or math.max(0, C.ddp_local_device()) end
function ddp.memory_stats(device)
  local m = ffi.new "ddp_memory[1]"
  C.ddp_memory_stats(device_of(device, "memory_stats"), m)
  return { allocated = tonumber(m[0].allocated), reserved = tonumber(m[0].reserved), peak = tonumber(m[0].peak), live_tensors = tonumber(m[0].live_tensors) }
end
function ddp.reset_peak_memory_stats(device) C.ddp_memory_reset_peak(device_of(device, "reset_peak_memory_stats")) end
-- Waits until a device has done all it was given; what failed there is raised here.
function ddp.synchronize(device) base.check(C.ddp_device_wait(device_of(device, "synchronize"))) end
function ddp.empty_cache() C.ddp_memory_empty_cache() end

-- "exact": no Winograd; "highest" (the default); "high": two bf16 parts where there is AMX (errors: ddp.h).
local PRECISION = { exact = C.DDP_F32_EXACT, highest = C.DDP_F32_HIGHEST, high = C.DDP_F32_HIGH }
function ddp.set_float32_matmul_precision(name)
  local level = PRECISION[name]
  if not level then
    local near = type(name) == "string" and base.suggest(name, { "exact", "highest", "high" })
    base.error(("set_float32_matmul_precision: no precision \"%s\"%s; known: exact, highest, high"):format(tostring(name),
      near and ", did you mean \"" .. near .. "\"?" or ""))
  end
  base.check(C.ddp_set_float32_matmul_precision(level))
end
function ddp.get_float32_matmul_precision()
  local level = C.ddp_float32_matmul_precision()
  for name, value in pairs(PRECISION) do if value == level then return name end end
end
-- Results that do not depend on the number of threads either.
function ddp.deterministic(on)
  if type(on) ~= "boolean" then base.error("deterministic: expected true or false, got a " .. type(on)) end
  C.ddp_set_deterministic(on and 1 or 0)
end

local LAZY = {
  nn = "ddp.nn", optim = "ddp.optim", data = "ddp.data", models = "ddp.models",
  args = "ddp.args", amp = "ddp.amp", stepper = "ddp.stepper",
}
local FROM = { report = { "ddp.report", "report" }, progress = { "ddp.report", "progress" }, profile = { "ddp.profile", "profile" }, sorted = { "ddp.nn.module", "sorted" },
  func = { "ddp.func", "func" }, autocast = { "ddp.amp", "autocast" }, check_nan = { "ddp.check_nan", "check_nan" }, clip_grad_norm_ = { "ddp.optim", "clip_grad_norm_" },
  check = { "ddp.check", "check" }, save = { "ddp.checkpoint", "save" }, load = { "ddp.checkpoint", "load" } }
local NOT_BUILT = { compile = 1, einsum = 1 }

return setmetatable(ddp, { __index = function(self, name)
  local value
  if LAZY[name] then value = require(LAZY[name])
  elseif FROM[name] then value = require(FROM[name][1])[FROM[name][2]]
  elseif NOT_BUILT[name] then base.error(("ddp.%s is not built yet"):format(name))
  else
    local known = {}
    for k in pairs(self) do known[#known + 1] = k end
    local near = type(name) == "string" and base.suggest(name, known)
    base.error(("ddp has no \"%s\"%s"):format(tostring(name), near and ", did you mean \"" .. near .. "\"?" or ""))
  end
  rawset(self, name, value)
  return value
end })
