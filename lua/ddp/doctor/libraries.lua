-- libraries.lua -- `ddprun doctor`: what can be loaded besides libddp. Nothing here is linked.
local ffi = require "ffi"

ffi.cdef [[
int cuInit(unsigned);
int cuDriverGetVersion(int *);
int cuDeviceGetCount(int *);
int cuDeviceGetName(char *, int, int);
int ncclGetVersion(int *);
]]

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

local function gpu_names(cuda)
  local n, names, text = ffi.new "int[1]", {}, ffi.new "char[128]"
  local status = cuda.cuInit(0)
  if status ~= 0 or cuda.cuDeviceGetCount(n) ~= 0 then return nil, status end
  for i = 0, n[0] - 1 do
    names[i + 1] = cuda.cuDeviceGetName(text, 127, i) == 0 and ffi.string(text) or "?"
  end
  return names
end

function M.gpus(r)
  local cuda = load "libcuda.so.1"
  local v = ffi.new "int[1]"
  if not cuda then
    r.say("GPU", "no driver (libcuda.so.1); not used in this build")
  else
    local names, status = gpu_names(cuda)
    cuda.cuDriverGetVersion(v)
    r.say("GPU", "%s, driver for CUDA %d.%d; not used in this build",
      not names and ("the driver does not start (error %d)"):format(status) or #names > 0 and table.concat(names, ", ") or "none", v[0] / 1000, v[0] % 1000 / 10)
  end
  local nccl = load "libnccl.so.2"
  if nccl and nccl.ncclGetVersion(v) == 0 then
    r.say("NCCL", "%d.%d.%d", v[0] / 10000, v[0] % 10000 / 100, v[0] % 100)
  else
    r.say("NCCL", "not there (libnccl.so.2)")
  end
end

return M
