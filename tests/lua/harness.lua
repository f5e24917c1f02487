-- harness.lua -- tests in Lua: t.test("sentence", fn), comparisons that NaN fails, and a last line for tests/run.sh.
local M = { passed = 0, failed = 0, skipped = 0 }

function M.test(name, fn)
  local ok, err = xpcall(fn, function(e) return type(e) == "table" and e or debug.traceback(tostring(e), 2) end)
  if ok then
    M.passed = M.passed + 1
    print("ok " .. name)
  elseif type(err) == "table" and err.skip then
    M.skipped = M.skipped + 1
    print("skip " .. name .. ": " .. err.skip)
  else
    M.failed = M.failed + 1
    print("not ok " .. name .. ": " .. tostring(err))
  end
  io.stdout:flush()
end

-- Ends the test at hand as skipped, with the reason.
function M.skip(why) error({ skip = why }, 0) end

function M.ok(cond, message) if not cond then error(message or "not so", 2) end end

local function show(v)
  if type(v) ~= "table" then return tostring(v) end
  local parts = {}
  for i, x in ipairs(v) do parts[i] = show(x) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

local function same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for k, v in pairs(a) do if not same(v, b[k]) then return false end end
  for k in pairs(b) do if a[k] == nil then return false end end
  return true
end
function M.eq(got, want, message)
  if not same(got, want) then error(("%s: got %s, expected %s"):format(message or "differs", show(got), show(want)), 2) end
end

-- |a - b| <= atol + rtol |b|, written so that NaN fails.
function M.near(got, want, atol, message)
  local close = math.abs(got - want) <= (atol or 1e-6)
  if not close then error(("%s: got %.9g, expected %.9g"):format(message or "not near", got, want), 2) end
end

-- fn must raise an error whose text contains `text`.
function M.fails(fn, text)
  local ok, err = pcall(fn)
  if ok then error("no error where \"" .. text .. "\" was expected", 2) end
  if not tostring(err):find(text, 1, true) then error(("the error is \"%s\", expected \"%s\" in it"):format(tostring(err), text), 2) end
  return tostring(err)
end

-- Ends the file: status 1 after a failure, or when nothing ran.
function M.done()
  os.exit((M.failed > 0 or M.passed + M.skipped == 0) and 1 or 0)
end

return M
