-- errors.lua -- what a user of a GPU can get wrong, provoked: each line is `ok WHAT: the sentence`, or `not ok` where it says something else, or
-- nothing. The GPU computes on afterwards.
local ddp = require "ddp"
local F = ddp.nn.functional
local failed = 0

local function report(what, text, want)
  text = tostring(text):gsub("\n.*", "")
  local good = text:find(want, 1, true)
  if not good then failed = failed + 1 end
  print(("%s %s: %s%s"):format(good and "ok" or "not ok", what, text, good and "" or (" (expected: %s)"):format(want)))
end
local function expect(what, want, fn)
  local ok, err = pcall(fn)
  report(what, ok and "no error" or err, want)
end
-- The same in a process of its own, with an environment.
local function expect_in(environment, what, want)
  local script = [[local ok, e = pcall(function() return require("ddp").ones(2):to "cuda" end) print(ok and "no error" or e)]]
  local pipe = io.popen(("env %s luajit -e '%s' 2>&1"):format(environment, script))
  local text = pipe:read "*a"
  pipe:close()
  report(what, text, want)
end

local x = ddp.ones(4, 3):to "cuda"
expect("more memory than there is", "out of", function() ddp.empty(2 ^ 40, { device = "cuda" }) end)
expect("an id out of range", "index_select: id 7, expected 0 to 3", function() x:index_select(1, ddp.tensor({ 1, 7 }, { dtype = "i64" }):to "cuda"):sum():item() end)
expect("a label out of range", "cross_entropy", function() F.cross_entropy(x, ddp.tensor({ 0, 1, 2, 9 }, { dtype = "i64" }):to "cuda"):item() end)
expect("tensors on two devices", "move one with :to()", function() return x + ddp.ones(4, 3) end)
expect("shapes that do not fit", "matmul", function() return x:matmul(x) end)
expect("a GPU that is not there", "cuda:63", function() return ddp.ones(2):to "cuda:63" end)
expect_in("DDP_DEVICE=cpu", "a process kept on the CPU", "DDP_DEVICE=cpu")
expect_in("CUDA_VISIBLE_DEVICES=", "no visible GPU", "CUDA_VISIBLE_DEVICES")
expect_in("DDP_CUDA_LIBS=/nowhere", "libraries that are not there", "libcudart")
local sum = (x + 1):sum():item()
report("and the GPU goes on", "a sum of " .. sum, "a sum of 24")
os.exit(failed > 0 and 1 or 0)
