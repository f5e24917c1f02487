-- bench.lua -- what the benchmarks share: timing, this machine's limits, one kernel list at a time.
local ffi = require "ffi"
local ddp = require "ddp"
local base = require "ddp.ffi"
ffi.cdef [[
int ddp__kernels_only(const char *list);
const char *ddp__last_kernel(void);
]]
local C = base.C
local M = {}

-- Seconds of fn at its best: repeated until `budget` seconds are spent, three times at least. Its result is dropped at once.
function M.best(fn, budget)
  local best, spent, n = math.huge, 0, 0
  while n < 3 or (spent < (budget or .15) and n < 1000) do
    local begin = C.ddp_now()
    local a, b, c = fn()
    local took = C.ddp_now() - begin
    if ddp.is_tensor(a) then base.free(a) end
    if ddp.is_tensor(b) then base.free(b) end
    if ddp.is_tensor(c) then base.free(c) end
    best, spent, n = math.min(best, took), spent + took, n + 1
  end
  return best
end

-- fn() with only the kernels of `list`; nil, why, where they do not take it or are not there.
function M.with_list(list, fn)
  if C.ddp__kernels_only(list) < 0 then
    local text = ffi.new "const char *[1]"
    C.ddp_error_take(text)
    return nil, ffi.string(text[0])
  end
  local ok, result = pcall(fn)
  C.ddp__kernels_only(nil)
  if not ok then return nil, result end
  return result
end

function M.last_kernel() return ffi.string(C.ddp__last_kernel()) end

-- {f32 = GFLOP/s, pairs = and amx = those of bf16 or nil, copy = {{bytes, GB/s}, ...}}, from the program `peak`.
function M.limits(peak)
  local out = { copy = {} }
  local pipe = assert(io.popen(peak))
  for line in pipe:lines() do
    local bytes, rate = line:match "^copy (%d+) ([%d.]+)"
    local name, gflops = line:match "^(%w+) ([%d.]+)$"
    if bytes then out.copy[#out.copy + 1] = { tonumber(bytes), tonumber(rate) } elseif name then out[name] = tonumber(gflops) end
  end
  pipe:close()
  if #out.copy == 0 then error(peak .. " gave no limits; make roofline builds it", 0) end
  return out
end

-- GB/s of copying where source and destination together are `bytes`: the nearest measured size that is not smaller.
function M.copy_limit(limits, bytes)
  for _, c in ipairs(limits.copy) do if bytes <= c[1] * 1.5 then return c[2] end end
  return limits.copy[#limits.copy][2]
end

-- The layout that the models train in: channels last, under PyTorch's order of dims.
function M.channels_last(n, c, h, w) return ddp.randn(n, h, w, c):permute(1, 4, 2, 3) end

-- `steps` training steps of a network with the CIFAR stem under DistributedDataParallel, what torch_resnet.py does, by
-- opts.model, batch, steps and amp. Returns the report and the model.
function M.train(opts)
  local F = ddp.nn.functional
  ddp.init()
  ddp.manual_seed(0)
  local net = ddp.DistributedDataParallel(ddp.models[opts.model] { num_classes = 10, stem = "cifar" })
  local opt = ddp.optim.SGD(net:parameters(), { lr = 0.01, momentum = 0.9, weight_decay = 5e-4 })
  local x, y = M.channels_last(opts.batch, 3, 32, 32), ddp.randint(0, 10, { opts.batch })
  local function forward() return F.cross_entropy(net(x), y) end
  for _ = 1, opts.steps do
    local loss = ddp.autocast(opts.amp ~= "none" and opts.amp, forward)
    opt:zero_grad()
    loss:backward()
    opt:step()
    loss:item()
  end
  return ddp.report { batch = opts.batch, quiet = true }, net.module
end

return M
