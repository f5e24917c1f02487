-- L11: forks after start-up: fork.lua KIND. The child says what it got; the parent goes on and waits for it.
local ddp = require "ddp"
local ffi = require "ffi"
ffi.cdef "int fork(void); int waitpid(int, int *, int); unsigned alarm(unsigned); void _exit(int);"
local kind = arg[1]

-- Runs fn in a forked child; its exit status, as a shell gives it: 142 for one that hung for five seconds.
local function in_child(fn)
  io.stdout:flush()
  local pid = ffi.C.fork()
  if pid == 0 then
    ffi.C.alarm(5)
    fn()
    io.stdout:flush()
    os.exit(0, true)
  end
  local status = ffi.new "int[1]"
  ffi.C.waitpid(pid, status, 0)
  local s = status[0]
  return s % 128 > 0 and 128 + s % 128 or math.floor(s / 256)
end
local function refused(what, fn)
  local ok, e = pcall(fn)
  print(("%s: %s"):format(what, ok and "no error" or tostring(e)))
end

local big = ddp.ones(1000, 1000)
ddp.all_reduce(big)
local loader
if kind == "loader" then
  loader = ddp.data.DataLoader(ddp.data.tensors(ddp.ones(64, 4)), { batch_size = 4, workers = 2 })
  loader:iter()()
end
local status = in_child(function()
  if kind == "raise" then error(ddp.ones(2)) end
  refused("collective", function() return ddp.all_reduce(big) end)
  refused("again", function() return ddp.barrier() end)
  refused("op", function() return big:matmul(big) end)
  refused("new", function() return ddp.ones(2) end)
  if loader then refused("loader", function() return loader:iter()() end) end
end)
print("child's status " .. status)
if ddp.all_reduce(ddp.ones(1)):item() ~= ddp.world_size() then error "the parent's sum is wrong" end
if loader then loader:close() end
ddp.finish()
print "fine"
