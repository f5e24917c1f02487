-- profile.lua -- where the time of a stretch of code goes, by kernel and shape.
local ffi = require "ffi"
local base = require "ddp.ffi"
local C = base.C

local M = {}

local function rows_of(wall)
  local rows, row = { wall = wall, inside = 0 }, ffi.new "ddp_profile_row[1]"
  local i = 0
  while C.ddp_profile_read(i, row) == 0 do
    local r = row[0]
    rows[i + 1] = { kernel = ffi.string(r.kernel), op = ffi.string(r.op), shape = ffi.string(r.shape), calls = tonumber(r.calls),
      seconds = r.seconds, gflops_per_s = r.flops / r.seconds / 1e9, gb_per_s = r.bytes / r.seconds / 1e9 }
    rows.inside = rows.inside + r.seconds
    i = i + 1
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  return rows
end

-- Runs fn(...) and returns what its kernels took, the longest first: {kernel, op, shape = "64x64x32x32 w 64x64x3x3", calls,
-- seconds, gflops_per_s, gb_per_s} a row; .wall seconds in all, .inside of them in kernels. fn's own results follow.
-- GB/s count inputs read and results written once; operations are the useful ones, a multiply-add is two. One profile at a
-- time: within fn another is refused.
local running = false
function M.profile(fn, ...)
  if running then base.error "profile: another one is running" end
  base.check(C.ddp_profile_start())
  running = true
  local begin = C.ddp_now()
  local function finish(ok, ...)
    local wall = C.ddp_now() - begin
    running = false
    C.ddp_profile_stop()
    if not ok then error((...), 0) end
    return rows_of(wall), ...
  end
  return finish(pcall(fn, ...))
end

return M
