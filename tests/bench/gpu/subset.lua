-- subset.lua -- a little of everything on a GPU, for a checker that makes it slow: forward, backward and a step of a small network and of what
-- it has not, in f32 and bf16. The gradients are compared with the CPU's.
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional

local Net = nn.Module "Net"
function Net:init()
  self.conv, self.bn = nn.Conv2d(3, 8, 3, { padding = 1, bias = false }), nn.BatchNorm2d(8)
  self.embedding, self.norm, self.fc = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 5)
end
function Net:forward(x, ids)
  local y = F.relu(self.bn(self.conv(x)))
  y = F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1):flatten(2)
  return self.fc(F.gelu(self.norm(y + self.embedding(ids))))
end

-- The gradients, as tables by parameter, after a step on `device`.
local function gradients(device, amp)
  ddp.manual_seed(3)
  local net = Net()
  local x, ids, labels = ddp.randn(6, 3, 9, 9), ddp.randint(0, 10, { 6 }), ddp.randint(0, 5, { 6 })
  net:to(device)
  local opt = ddp.optim.AdamW(net:parameters(), { lr = 1e-3 })
  local function loss() return F.cross_entropy(net(x:to(device), ids:to(device)), labels:to(device)) end
  local l = amp and ddp.autocast("bf16", loss) or loss()
  l:backward()
  ddp.clip_grad_norm_(net:parameters(), 1)
  local out = {}
  for name, p in net:named_parameters() do out[name] = p.grad:to("cpu"):reshape(p.grad:numel()):tolist() end
  opt:step()
  return out, l:item()
end

local worst = 0
for _, amp in ipairs { false, true } do
  local want, want_loss = gradients("cpu", amp)
  local got, got_loss = gradients("cuda", amp)
  local limit = amp and .05 or 1e-4
  assert(math.abs(got_loss - want_loss) <= limit * (1 + math.abs(want_loss)), ("loss %g, on the cpu %g"):format(got_loss, want_loss))
  for name, g in pairs(want) do
    local top = 1e-3
    for _, v in ipairs(g) do top = math.max(top, math.abs(v)) end
    for i, v in ipairs(g) do
      local off = math.abs(got[name][i] - v) / top
      assert(off <= limit, ("%s[%d], amp %s: %g, on the cpu %g"):format(name, i, tostring(amp), got[name][i], v))
      worst = math.max(worst, off)
    end
  end
end
print(("gradients as on the cpu; the worst differs by %.2g of the largest"):format(worst))
os.exit(0)
