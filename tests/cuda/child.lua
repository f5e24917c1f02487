-- child.lua -- tests on the double that need a process of their own: other GPUs, faults, other schedules.
local M = {}

local function quoted(s) return "'" .. s:gsub("'", "'\\''") .. "'" end

-- Runs Lua code with more in the environment ("NAME=value NAME=value"); everything it writes, and whether it ended well.
function M.run(env, code)
  local p = io.popen(("env %s DDP_DOUBLE_LEAKS=quiet luajit -e %s 2>&1; echo \"status $?\""):format(env, quoted(code)))
  local out = p:read "*a"
  p:close()
  return out, out:match "status 0\n$" ~= nil
end

-- Lines of a file that match a pattern.
function M.count(path, pattern)
  local n = 0
  for line in io.lines(path) do if line:find(pattern) then n = n + 1 end end
  return n
end

-- A name of a file that is removed when the test ends.
local names = {}
function M.file()
  names[#names + 1] = os.tmpname()
  return names[#names]
end
function M.clean() for _, name in ipairs(names) do os.remove(name) end end

return M
