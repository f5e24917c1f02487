-- step.lua -- training steps of a network on a GPU (or its double), random data on the device. --trace FILE: the third step is traced into
-- it, with the sizes of the parameters as lines "parameter SIZES" on the output; else one line of times at the end.
local ddp = require "ddp"
local C = require("ddp.ffi").C
local F = ddp.nn.functional
local opts = ddp.args({ model = "resnet50", stem = "imagenet", batch = 64, amp = "none", steps = 10, device = "cuda", trace = "" },
  { amp = { "none", "bf16", "f16", "tf32" }, stem = { "imagenet", "cifar" } })
if not ddp.models[opts.model] and opts.model ~= "toy" then error("--model: no model " .. opts.model, 0) end
if opts.amp == "tf32" then ddp.set_float32_matmul_precision "high" end
local amp = (opts.amp == "bf16" or opts.amp == "f16") and opts.amp

local function make()
  if opts.model == "toy" then
    local nn = ddp.nn
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)), ddp.randn(opts.batch, 10)
  end
  local side = opts.stem == "cifar" and 32 or 224
  local model = ddp.models[opts.model] { num_classes = opts.stem == "cifar" and 10 or 1000, stem = opts.stem }
  return model, ddp.randn(opts.batch, side, side, 3):permute(1, 4, 2, 3)
end

ddp.manual_seed(0)
local model, x = make()
model:to(opts.device)
x = x:to(opts.device)
local y = ddp.randint(0, 10, { opts.batch }):to(opts.device)
local opt = ddp.optim.SGD(model:parameters(), { lr = 1e-3, momentum = .9, weight_decay = 5e-4 })
local function forward() return F.cross_entropy(model(x), y) end
local function step()
  local loss = amp and ddp.autocast(amp, forward) or forward()
  opt:zero_grad()
  loss:backward()
  opt:step()
  return loss
end

step():item()
step():item()
collectgarbage()
collectgarbage()
if opts.trace ~= "" then
  for _, p in ipairs(model:parameters()) do print("parameter " .. table.concat(p:size(), "x")) end
  local status = C.ddp_trace_start(opts.trace)
  if status < 0 then error("--trace " .. opts.trace .. " cannot be written", 0) end
  step():item()
  C.ddp_trace_stop()
else
  local host, whole = {}, {}
  ddp.reset_peak_memory_stats(opts.device)
  for i = 1, opts.steps do
    local begin = C.ddp_now()
    local loss = step()
    host[i] = C.ddp_now() - begin
    loss:item()
    whole[i] = C.ddp_now() - begin
  end
  table.sort(host)
  table.sort(whole)
  local median = math.floor((opts.steps + 1) / 2)
  print(("step_ms %.3f host_ms %.3f images_per_s %.1f peak_mb %.0f"):format(1e3 * whole[median], 1e3 * host[median], opts.batch / whole[median],
    ddp.memory_stats(opts.device).peak / 1e6))
end
