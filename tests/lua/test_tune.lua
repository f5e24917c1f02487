-- test_tune.lua -- DDP_TUNE=1: kernels chosen by measuring, kept in a file. Each run is a process of its own.
local t = require "harness"

local function run(folder, code, env)
  local file = os.tmpname()
  local f = assert(io.open(file, "w"))
  f:write([[
    local ddp, ops, checks = require "ddp", require "ddp.ops", require "op_checks"
    local x, w = ddp.randn(4, 16, 16, 32):permute(1, 4, 2, 3), ddp.randn(32, 32, 3, 3)
    local function conv() ddp.no_grad(ops.conv2d, x, w, nil, 1, 1) return checks.last_kernel() end
  ]] .. code)
  f:close()
  local pipe = io.popen(("env -u DDP_ISA -u DDP_AMX %s XDG_CACHE_HOME=%s DDP_TUNE=1 OMP_NUM_THREADS=1 luajit %s 2>&1"):format(env or "", folder, file))
  local out = pipe:read "*a"
  pipe:close()
  os.remove(file)
  return out
end
local folders = {}
local function folder()
  local name = os.tmpname()
  os.remove(name)
  os.execute("mkdir " .. name)
  folders[#folders + 1] = name
  return name
end
local function read(file)
  local f = io.open(file)
  local text = f and f:read "*a" or ""
  if f then f:close() end
  return text
end

-- A kernel that takes the call, other than the one measured.
local function another(kernel)
  local other = kernel:find "direct" and kernel:gsub("direct", "wino") or kernel:gsub("wino", "direct")
  if other == kernel then t.skip("one kernel only: " .. kernel) end
  return other
end
local function write(file, text)
  local f = assert(io.open(file, "w"))
  f:write(text)
  f:close()
end

t.test("the first call of a shape writes one line, later calls and processes none", function()
  local cache = folder()
  local first = run(cache, "print(conv() == conv())")
  local text = read(cache .. "/ddp/kernels")
  t.eq(first, "true\n")
  t.eq(select(2, text:gsub("\n", "")), 1)
  t.ok(text:match "^conv2d 1 threads f32.*\tconv2d%.%w+", text)
  run(cache, "conv()")
  t.eq(read(cache .. "/ddp/kernels"), text)
end)
t.test("what the file says is what runs", function()
  local cache = folder()
  local fast = run(cache, "io.write(conv())")
  local text = read(cache .. "/ddp/kernels")
  local other = another(fast)
  write(cache .. "/ddp/kernels", (text:gsub("\t.*", "\t" .. other .. "\n")))
  t.eq(run(cache, "io.write(conv())"), other)
end)
t.test("what another processor measured is not taken, and not lost", function()
  local cache = folder()
  local fast = run(cache, "io.write(conv())")
  local text = read(cache .. "/ddp/kernels")
  local here = text:match " on (.*), isa any\t"
  t.ok(here and here:match "%d+/%d+/%d+$", text)
  local foreign = text:gsub(" on .*, isa", function() return " on Some Processor 6/1/2, isa" end):gsub("\t.*", "\t" .. another(fast) .. "\n")
  write(cache .. "/ddp/kernels", foreign)
  t.ok(run(cache, "io.write(conv())"):match "^conv2d%.")
  local both = read(cache .. "/ddp/kernels")
  t.eq(both:sub(1, #foreign), foreign)
  t.ok(both:sub(#foreign + 1):find(" on " .. here .. ", isa any\t", 1, true), both)
end)
t.test("what was measured under another cap of the instruction set is not taken", function()
  local cache = folder()
  run(cache, "conv()")
  run(cache, "conv()", "DDP_ISA=avx2")
  run(cache, "conv()", "DDP_ISA=avx2")
  run(cache, "conv()", "DDP_AMX=emulate")
  local caps = {}
  for cap in read(cache .. "/ddp/kernels"):gmatch ", isa ([^\t]*)\t" do caps[#caps + 1] = cap end
  t.eq(caps, { "any", "avx2", "any, amx emulate" })
end)
t.test("a file of other content is passed over", function()
  local cache = folder()
  os.execute("mkdir " .. cache .. "/ddp")
  write(cache .. "/ddp/kernels", "nonsense\n\tx\nconv2d\tno.such.kernel\n" .. ("a"):rep(5000))
  t.ok(run(cache, "io.write(conv())"):match "^conv2d%.")
end)
t.test("a folder that can't be made costs a warning, not the run", function()
  local out = run("/proc/nowhere", "io.write(conv())")
  t.ok(out:find("can't be made", 1, true) and out:find "conv2d%.", out)
end)
t.test("a kernel that fails while it is measured is not chosen, and its failure is forgotten", function()
  for k = 1, 6 do -- the result is taken first, then workspaces of the kernels measured
    local cache = folder()
    local out = run(cache, [[
      local C = require "ddp.ffi".C
      C.ddp_memory_fail_at(]] .. k .. [[)
      local kernel = conv()
      io.write(C.ddp_error_peek(), " ", ddp.ones(3):sum():item(), " ", kernel)]])
    local kernel = out:match "^0 3 (.*)$"
    t.ok(kernel, k .. ": " .. out)
    t.eq(read(cache .. "/ddp/kernels"):match "\t(.*)\n$", kernel)
  end
end)
t.test("deterministic mode takes the usual kernels", function()
  local cache = folder()
  run(cache, "ddp.deterministic(true) conv()")
  t.eq(read(cache .. "/ddp/kernels"), "")
end)
for _, name in ipairs(folders) do os.execute("rm -rf " .. name) end
t.done()
