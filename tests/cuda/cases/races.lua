-- races.lua -- runs ops whose kernels have threads that meet, on a GPU, for ThreadSanitizer to watch; tests/cuda/races.sh reads what
-- it says. Each case says its name on stderr before it runs. Sizes make blocks of one warp and of many, whole rows and parts.
local ddp = require "ddp"
local F, nn = ddp.nn.functional, ddp.nn
ddp.set_default_device "cuda"
ddp.manual_seed(3)

local function case(name, run)
  io.stderr:write("case ", name, "\n")
  local ok, why = pcall(run)
  if not ok then io.stderr:write("failed ", tostring(why):match "[^\n]*", "\n") end
  collectgarbage()
end
local function see(t) return t:to("cpu") end -- waits for the kernels
local function learn(x, f, amp) -- f(x), forward and backward
  x:requires_grad_(true)
  local y = amp and ddp.autocast("bf16", f, x) or f(x)
  y:sum():backward()
  see(x.grad)
end

local shapes = { { 3, 5 }, { 5, 700 }, { 300, 40 }, { 2, 9000 } }
for _, dtype in ipairs { "f32", "bf16" } do
  for _, shape in ipairs(shapes) do
    local n, m = shape[1], shape[2]
    local label = (" of %d x %d in %s"):format(n, m, dtype)
    local function rand() return ddp.randn(n, m):to(dtype) end
    case("sum" .. label, function() see(rand():sum()) see(rand():sum(1)) see(rand():sum(2)) end)
    case("max" .. label, function() see(rand():max()) end)
    case("argmax" .. label, function() see(rand():argmax(1)) see(rand():argmax(2)) end)
    case("softmax" .. label, function() learn(rand(), function(x) return F.softmax(x, 2) * 2 end) end)
    case("softmax by columns" .. label, function() learn(rand(), function(x) return F.log_softmax(x, 1) * 2 end) end)
    case("cross_entropy" .. label, function() learn(rand(), function(x) return F.cross_entropy(x, ddp.randint(0, m, { n })) end) end)
    case("layer_norm" .. label, function()
      local norm = nn.LayerNorm(m)
      learn(rand(), function(x) return norm(x) end, dtype == "bf16")
    end)
    case("linear" .. label, function()
      local layer = nn.Linear(m, 20)
      learn(rand(), function(x) return F.gelu(layer(x)) end, dtype == "bf16")
    end)
  end
end
for _, size in ipairs { { 2, 5, 3, 3 }, { 3, 40, 17, 9 }, { 1, 3, 80, 80 } } do
  local label = " of " .. table.concat(size, " x ")
  case("batch_norm" .. label, function()
    local norm = nn.BatchNorm2d(size[2])
    learn(ddp.randn(size), function(x) return F.relu(norm(x)) end)
  end)
  case("adaptive_avg_pool2d" .. label, function() learn(ddp.randn(size), function(x) return F.adaptive_avg_pool2d(x, 1) end) end)
end
case("embedding", function()
  learn(ddp.randn(50, 33), function(w) return F.embedding(ddp.randint(0, 50, { 700 }), w) end)
end)
case("clip_grad_norm_ and Adam", function()
  local layer = nn.Linear(300, 70)
  local opt = ddp.optim.AdamW(layer:parameters(), { lr = 0.1 })
  layer(ddp.randn(9, 300)):sum():backward()
  ddp.optim.clip_grad_norm_(layer:parameters(), 0.1)
  opt:step()
  see(layer:parameters()[1])
end)
case("the search for NaN", function()
  ddp.check_nan(true)
  see(ddp.randn(500, 30):exp())
  ddp.check_nan(false)
end)
case("the kernels are those that are watched", function()
  local maps = io.open("/proc/self/maps"):read "*a"
  assert(maps:find "libtsan" and maps:find "libddp_emulated_thread")
end)
case("end", function() end)
