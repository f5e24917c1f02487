-- libraries.lua -- `ddprun doctor`: what can be loaded besides libddp. Nothing here is linked.
local ffi = require "ffi"

local M = {}

-- The first of these sonames that loads.
local function load(...)
  for _, name in ipairs { ... } do
    local ok, lib = pcall(ffi.load, name)
    if ok then return lib, name end
  end
end

-- Engines over a library are files beside libddp.so.
local function plugin(name)
  local f = io.open((os.getenv "DDP_LIB" or ".") .. "/libddp_" .. name .. ".so")
  if f then f:close() end
  return f and name
end
local function engines(r)
  local mpis = {}
  for _, name in ipairs { "openmpi", "mpich" } do mpis[#mpis + 1] = plugin(name) end
  r.say("engines", "shm%s%s", plugin "gloo" and ", gloo, hier" or "", #mpis > 0 and (", mpi (%s)"):format(table.concat(mpis, ", ")) or "")
end

function M.others(r)
  engines(r)
  local list = { { "gloo", "libgloo.so.0", "libgloo.so" }, { "Open MPI", "libmpi.so.40" }, { "MPICH", "libmpich.so.12" },
    { "libjpeg", "libjpeg.so.62", "libjpeg.so.8" }, { "libpng", "libpng16.so.16" } }
  local found, missing = {}, {}
  for _, l in ipairs(list) do
    local _, name = load(unpack(l, 2))
    table.insert(name and found or missing, name and ("%s (%s)"):format(l[1], name) or l[1])
  end
  r.say("libraries", "%s; not there: %s", #found > 0 and table.concat(found, ", ") or "none", #missing > 0 and table.concat(missing, ", ") or "none")
end

-- The libraries that computing on a GPU needs: what is missing is broken, with what to install.
local function gpu_libraries(r, C, gpus)
  local name, text = ffi.new "const char *[1]", ffi.new "char[500]"
  for k = 0, 99 do
    local there = C.ddp_gpu_library(k, 1, name, text, 500)
    if there < 0 then return end
    local called, what = ffi.string(name[0]), ffi.string(text)
    r.say(called, "%s", what)
    if there == 0 and (called ~= "NCCL" or gpus > 1) then r.broken("%s", what) end
  end
end

-- Which GPUs reach one another without the host's memory.
local function gpu_peers(r, C, gpus)
  local apart = {}
  for i = 0, gpus - 1 do
    for j = 0, gpus - 1 do
      if i ~= j and C.ddp_gpu_peer(i, j) == 0 then apart[#apart + 1] = ("cuda:%d to cuda:%d"):format(i, j) end
    end
  end
  if #apart == 0 then r.say("GPU to GPU", "direct") return end
  r.say("GPU to GPU", "by way of the host: %s", table.concat(apart, ", ", 1, math.min(#apart, 6)) .. (#apart > 6 and " and more" or ""))
end

function M.gpus(r)
  local ok, base = pcall(require, "ddp.ffi")
  if not ok then r.say("GPU", "not looked for: libddp cannot be loaded") return end
  local C, text = base.C, ffi.new "char[500]"
  local gpus = C.ddp_num_gpus(text, 500)
  if gpus == 0 then
    r.say("GPU", "none: %s", ffi.string(text))
    r.say("NCCL", "needs a GPU")
    return
  end
  for i = 1, gpus do
    if C.ddp_device_text(i, text, 500) < 0 then base.raise() end
    r.say(i == 1 and "GPU" or "", "cuda:%d %s", i - 1, ffi.string(text))
  end
  gpu_libraries(r, C, gpus)
  if gpus > 1 then gpu_peers(r, C, gpus) end
  r.say("ranks", "one a GPU: ddprun -n gpu, which is %d here", gpus)
end

return M
