-- check_nan.lua -- ddp.check_nan: which op of which module made the first NaN or infinity.
local base = require "ddp.ffi"
local module = require "ddp.nn.module"
local C = base.C

local M = {}
local names, depth = nil, 0 -- of the modules below the outermost one that runs, by module

local function names_below(root)
  local map = {}
  for name, m in root:named_modules() do map[m] = name end
  return map
end

-- "layer1.0.conv1 (Conv2d)"; the outermost is known by its type alone.
local function label(m)
  local name = names[m]
  if name == nil or name == "" then return m:type() end
  return ("%s (%s)"):format(name, m:type())
end

local function leave(before, ok, ...)
  C.ddp_check_nan_leave(before)
  depth = depth - 1
  if not ok then error((...), 0) end
  return ...
end

local function trace(run, m, ...)
  if depth == 0 then names = names_below(m) end
  depth = depth + 1
  return leave(C.ddp_check_nan_enter(label(m)), pcall(run, m, ...))
end

-- ddp.check_nan(true): from now on the first op that makes a NaN or an infinity, in forward or backward, is an error that names
-- it and its module by its path in the module that was called. Slow; off (false) it costs nothing. Overflows that a GradScaler
-- would answer by skipping the step are errors too. Returns what was set before.
function M.check_nan(on)
  if type(on) ~= "boolean" then base.error("check_nan: expected true or false, got a " .. type(on)) end
  module.set_trace(on and trace or nil)
  depth = 0
  return C.ddp_set_check_nan(on and 1 or 0) == 1
end

return M
