-- test_real_libraries.lua -- NVIDIA's own libraries, on a machine without a GPU: they have every function of api.def, and what
-- they answer without a driver becomes a sentence with cause and remedy.
local t = require "harness"
local ffi = require "ffi"
ffi.cdef [[
void *dlopen(const char *file, int flags);
void *dlsym(void *lib, const char *name);
char *dlerror(void);
]]

local function shell(command)
  local pipe = io.popen(command .. " 2>&1")
  local out = pipe:read "*a"
  pipe:close()
  return out
end
local function exists(path)
  local f = io.open(path)
  if f then f:close() end
  return f ~= nil
end

local home = os.getenv "CUDA_HOME" or shell("realpath $(command -v nvcc || echo /usr/local/cuda/bin/nvcc)"):match "(.*)/bin/nvcc"
local libs = home and home .. "/lib64"
local function need() if not libs or not exists(libs .. "/libcudart.so") then t.skip "CUDA's libraries are not here" end end

-- ---- functions -------------------------------------------------------------------------------------------------------------

local FILES = { CUDART = "cudart", CUBLAS = "cublas", CUBLASLT = "cublasLt", CUDNN = "cudnn", NCCL = "nccl", NVRTC = "nvrtc" }
local functions, n = {}, 0
for line in io.lines "kernels/cuda/api.def" do
  local lib, name = line:match "^([A-Z]+)%(([%w_]+)%)"
  if lib then
    functions[lib] = functions[lib] or {}
    table.insert(functions[lib], name)
    n = n + 1
  end
end
for lib, names in pairs(functions) do
  t.test(("the real %s has every function that api.def names"):format(FILES[lib]), function()
    need()
    local path = ("%s/lib%s.so"):format(libs, FILES[lib])
    if not exists(path) then t.skip(path .. " is not here") end
    local handle = ffi.C.dlopen(path, 1)
    t.ok(handle ~= nil, handle == nil and ffi.string(ffi.C.dlerror()))
    local missing = {}
    for _, name in ipairs(names) do if ffi.C.dlsym(handle, name) == nil then missing[#missing + 1] = name end end
    t.eq(table.concat(missing, " "), "", "missing")
    t.ok(#names > 0 and ffi.C.dlsym(handle, "no_such_function") == nil, "dlsym finds anything")
  end)
end

-- ---- without a driver --------------------------------------------------------------------------------------------------------
-- The core asks whether libcuda.so.1 is there, then the real cudart asks that library. Ours answers as a driver does that is too old
-- or sees no GPU.

local dir = shell("mktemp -d"):gsub("%s", "")
local function driver(version, init)
  local f = io.open(dir .. "/driver.c", "w")
  f:write(([[
#include <string.h>
int cuInit(unsigned flags) { (void)flags; return %d; }
int cuDriverGetVersion(int *v) { *v = %d; return 0; }
static int answers(void) { return %d; }
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long flags, void *status) {
    (void)version; (void)flags;
    *out = !strcmp(name, "cuInit") ? (void *)cuInit : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
         : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2 : (void *)answers;
    if (status) *(int *)status = 0;
    return 0;
}
int cuGetProcAddress(const char *name, void **out, int version, unsigned long flags) { return cuGetProcAddress_v2(name, out, version, flags, 0); }
int cuGetExportTable(const void **out, const void *id) { (void)id; *out = 0; return %d; }
]]):format(init, version, init == 0 and 100 or init, init == 0 and 100 or init))
  f:close()
  return shell(("gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o %s/libcuda.so.1 %s/driver.c"):format(dir, dir))
end

-- What is said of "cuda" in a process that has only the real libraries, and this driver.
local function said(settings)
  local script = [[local ddp = require "ddp"; print(pcall(function() return ddp.zeros({ 2 }):to "cuda" end))]]
  return shell(("env -u DDP_CUDA_LIBS %s luajit -e '%s'"):format(settings, script))
end

local function here() need() if exists "/proc/driver/nvidia/version" then t.skip "this machine has a driver" end end
local CASES = {
  { "without a driver's library", nil, "no NVIDIA driver (libcuda.so.1 is not there): install it until `nvidia-smi` lists a GPU, or compute on \"cpu\"" },
  { "with a driver's library that does not answer", { 0, 34 }, "install it until `nvidia-smi` lists a GPU" },
  { "with a driver that is too old", { 12000, 0 }, "the NVIDIA driver is too old: it is for CUDA 12.0, this build for CUDA" },
  { "with a driver that sees no GPU", { 13000, 100 }, "no GPU: `nvidia-smi -L` must list one; in a container start it with --gpus all" },
  { "with CUDA_VISIBLE_DEVICES that names none", { 13000, 100 }, "no GPU: CUDA_VISIBLE_DEVICES=7 names none that is here; `nvidia-smi -L` lists them", "CUDA_VISIBLE_DEVICES=7" },
}
for _, case in ipairs(CASES) do
  t.test("the real cudart " .. case[1] .. ": the error says what is missing and what to do", function()
    here()
    if case[2] then driver(case[2][1], case[2][2]) end
    local out = said((case[2] and "LD_LIBRARY_PATH=" .. dir or "") .. " " .. (case[4] or ""))
    t.ok(out:find("false", 1, true) and out:find(case[3], 1, true), out)
  end)
end
shell("rm -r " .. dir)

t.done()
