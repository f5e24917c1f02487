-- golden.lua -- the formula of make_golden.py on this side, and the comparison with its numbers.
local ffi = require "ffi"
local ddp = require "ddp"

local M = {}

-- n numbers in [-1, 1) of stream k, as an f64 tensor.
function M.draw(n, k)
  local buf = ffi.new("double[?]", n)
  for i = 0, n - 1 do
    local v = math.sin(i * 12.9898 + k * 78.233) * 43758.5453
    buf[i] = (v - math.floor(v)) * 2 - 1
  end
  return ddp.from_blob(buf, { n }, { dtype = "f64", owner = buf }):clone()
end

function M.fill(model, dtype)
  local k = 0
  ddp.no_grad(function()
    for name, p in model:named_parameters() do
      k = k + 1
      local v = M.draw(p:numel(), k):view(p:size())
      if p:dim() > 1 then v = v * math.sqrt(3 / (p:numel() / p:size(1)))
      elseif name:find "bn.*weight" or name:find "downsample%.1%.weight" then v = v * 0.1 + 1
      else v = v * 0.1 end
      p:copy_(v:float():to(dtype or "f32"))
    end
  end)
end

-- The largest difference over the largest value of the tensor.
function M.difference(t, golden)
  local flat = t:detach():contiguous():reshape(t:numel())
  local p = flat:data()
  local n, worst = #golden.values, 0
  assert(n > 0, "nothing to compare")
  for i = 0, n - 1 do
    local d = math.abs(p[math.floor(i * flat:numel() / n)] - golden.values[i + 1]) / math.max(golden.max, 1e-30)
    if not (d <= worst) then worst = d end
    if d ~= d then return 1 / 0 end
  end
  return worst
end

-- One step; returns the worst differences of loss, gradients, updated parameters and buffers, each with its name.
function M.step(model, golden, loss_of, opt)
  local loss = loss_of(model)
  loss:backward()
  local worst = { loss = math.abs(loss:item() - golden.loss) / math.abs(golden.loss) }
  local function compare(kind, named, get)
    worst[kind], worst[kind .. "_name"] = 0, "none"
    local n = 0
    for name, t in named do
      local g = golden[kind][name]
      if g then
        local d = M.difference(get(t), g)
        n = n + 1
        if not (d <= worst[kind]) then worst[kind], worst[kind .. "_name"] = d, name end
      end
    end
    local want = 0
    for _ in pairs(golden[kind]) do want = want + 1 end
    assert(n == want, ("%s: %d tensors of %d were compared"):format(kind, n, want))
  end
  compare("grads", model:named_parameters(), function(p) return p.grad end)
  opt:step()
  compare("params", model:named_parameters(), function(p) return p end)
  compare("buffers", model:named_buffers(), function(b) return b end)
  return worst
end

return M
