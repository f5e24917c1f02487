-- system.lua -- `ddprun doctor`: cores, memory, what ranks share it through, and the clock. Needs nothing of libddp.
local ffi = require "ffi"

ffi.cdef [[
int getpid(void);
int close(int);
int ftruncate(int, long);
int memfd_create(const char *, unsigned);
int shm_open(const char *, int, unsigned);
int shm_unlink(const char *);
char *strerror(int);
typedef struct { long s, ns; } ddp_doctor_time;
int clock_gettime(int, ddp_doctor_time *);
typedef struct { unsigned long bsize, frsize, blocks, bfree, bavail, more[6]; int spare[6]; } ddp_doctor_space;
int statvfs(const char *, ddp_doctor_space *);
]]
local C = ffi.C

local M = {}

-- The first match of pattern in the lines of a file; nil without the file.
function M.find(path, pattern)
  local f = io.open(path)
  if not f then return nil end
  for line in f:lines() do
    local found = line:match(pattern)
    if found then
      f:close()
      return found
    end
  end
  f:close()
end
local find = M.find

function M.why() return ffi.string(C.strerror(ffi.errno())) end
local function gigabytes(bytes) return ("%.1f GB"):format(bytes / 2 ^ 30) end

-- What fn finds in the folder of this process's cgroup and in those above it; `controller`: of version 1, nil: of version 2.
local function in_cgroups(controller, fn)
  local values, root = {}, "/sys/fs/cgroup" .. (controller and "/" .. controller or "")
  local path = find("/proc/self/cgroup", controller and "^%d+:[%w,]*%f[%w]" .. controller .. "%f[%W][^:]*:(/.*)" or "^0::(/.*)")
  while path do
    values[#values + 1] = fn(root .. path .. "/")
    if path == "/" or path == "" then break end
    path = path:match "^(.*)/[^/]*$"
  end
  return values
end

local function least(...)
  local v
  for _, list in ipairs { ... } do for _, x in ipairs(list) do v = math.min(v or x, x) end end
  return v
end

-- Cores that the cgroup's quota comes to; nil: no quota.
local function quota_cores()
  return least(in_cgroups(nil, function(folder)
    local q, period = (find(folder .. "cpu.max", ".*") or ""):match "^(%d+) (%d+)"
    return q and q / period
  end), in_cgroups("cpu", function(folder)
    local q, period = find(folder .. "cpu.cfs_quota_us", "^%d+"), find(folder .. "cpu.cfs_period_us", "^%d+")
    return q and period and q / period
  end))
end

-- Bytes that the cgroup allows; nil: no limit. Version 1 writes 2^63 less a page for none.
local function memory_limit()
  local limit = least(in_cgroups(nil, function(folder) return tonumber(find(folder .. "memory.max", "^%d+")) end),
    in_cgroups("memory", function(folder) return tonumber(find(folder .. "memory.limit_in_bytes", "^%d+")) end))
  return limit and limit < 2 ^ 60 and limit or nil
end

-- "0-3,8" -> 5
local function count_cores(list)
  local n = 0
  for a, b in list:gmatch "(%d+)%-?(%d*)" do n = n + (b == "" and 1 or b - a + 1) end
  return n
end

function M.cores(r)
  local list = find("/proc/self/status", "^Cpus_allowed_list:%s*(%S+)") or "0"
  local quota = quota_cores()
  local cores = count_cores(list)
  r.say("cores", "%d (%s); %s", cores, list, quota and ("the cgroup grants %.2g of them"):format(quota) or "no quota of a cgroup")
  if quota and quota < 1 then r.slow("the cgroup grants %.2g cores: a step is stopped in its midst; raise its cpu.max (docker run --cpus)", quota) end
end

function M.memory(r)
  local free = tonumber(find("/proc/meminfo", "^MemAvailable:%s*(%d+)") or 0) * 1024
  local limit = memory_limit()
  local pages = find("/sys/kernel/mm/transparent_hugepage/enabled", "%[(%w+)%]")
  r.say("memory", "%s free, %s; huge pages: %s", gigabytes(free), limit and "limit of the cgroup " .. gigabytes(limit) or "no limit of a cgroup", pages or "unknown")
  if math.min(free, limit or free) < 2 ^ 29 then r.slow "less than half a GB of memory: end other programs, raise the cgroup's memory.max, or train with a small batch" end
  if pages == "never" then r.slow "huge pages are off: large tensors cost more (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)" end
end

-- Whether another process of this user may open fd through /proc, as the ranks of a host do.
local function opens(fd)
  local f = io.popen(("{ exec 9<>/proc/%d/fd/%d && echo yes; } 2>/dev/null"):format(C.getpid(), fd))
  local said = f and f:read "*a" or ""
  if f then f:close() end
  return said:find "yes" ~= nil
end

local function named_segment()
  local name = "/ddp-doctor-" .. C.getpid()
  local fd = C.shm_open(name, 66 + 128, 384) -- O_RDWR | O_CREAT, O_EXCL; 0600
  if fd < 0 then return false, M.why() end
  local sized = C.ftruncate(fd, 4096) == 0
  local why = M.why()
  C.close(fd)
  C.shm_unlink(name)
  return sized, why
end

-- Ranks of a host share memory by memfd, opened through /proc; where that is forbidden, by a name in /dev/shm.
function M.shared_memory(r)
  local space, size = ffi.new "ddp_doctor_space[1]", "missing"
  if C.statvfs("/dev/shm", space) == 0 then size = gigabytes(tonumber(space[0].bavail * space[0].frsize)) .. " free" end
  local fd = C.memfd_create("ddp-doctor", 0)
  local why = M.why()
  local works = fd >= 0 and C.ftruncate(fd, 4096) == 0
  local opened = works and opens(fd)
  if fd >= 0 then C.close(fd) end
  local named, why_named = named_segment()
  r.say("shared memory", "memfd %s; /dev/shm %s, %s", not works and "fails: " .. why or opened and "works, other ranks may open it" or "works, but other ranks may not open it",
    named and "works" or "fails: " .. why_named, size)
  if not works then
    r.broken "several ranks need memfd_create: allow it (seccomp profile of the container, kernel 3.17 or newer)"
  elseif not opened and not named then
    r.broken "several ranks can share no memory: mount /proc without hidepid for ranks of one user, or mount /dev/shm (docker run --shm-size=1g)"
  elseif not opened and tonumber(space[0].bavail * space[0].frsize) < 2 ^ 28 then
    r.slow "/dev/shm is small and other ranks may not open /proc/PID/fd: large models on several ranks need docker run --shm-size=1g"
  end
end

function M.clock(r)
  local a, b, n = ffi.new "ddp_doctor_time[1]", ffi.new "ddp_doctor_time[1]", 1000
  local fails = C.clock_gettime(1, a) ~= 0 -- CLOCK_MONOTONIC
  for _ = 1, n do fails = C.clock_gettime(1, b) ~= 0 or fails end
  local ns = (tonumber(b[0].s - a[0].s) * 1e9 + tonumber(b[0].ns - a[0].ns)) / n
  local source = find("/sys/devices/system/clocksource/clocksource0/current_clocksource", "%S+") or "unknown"
  r.say("clock", "%s, %.0f ns a reading; %s", source, ns, os.date "!%Y-%m-%d %H:%M:%S UTC")
  if fails or not (ns > 0) then r.broken "the monotonic clock stands still or fails: timeouts and measurements rest on it" end
  if ns > 500 then r.slow("reading the clock takes %.0f ns by %s: echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource", ns, source) end
end

return M
