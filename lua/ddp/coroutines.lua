-- coroutines.lua -- the modes of no_grad, enable_grad and autocast belong to the coroutine that set them: C keeps one state a
-- thread, and it is exchanged where a coroutine is resumed and where that returns (it yielded, ended or failed). Nothing is
-- added to an op. A coroutine begins in the modes of the one that resumes it first. Replaces coroutine.resume and
-- coroutine.wrap; copies of them that a script took before it required ddp, and lua_resume from C, do not switch.
local ffi = require "ffi"
local base = require "ddp.ffi"
local C = base.C
local create, resume, status = coroutine.create, coroutine.resume, coroutine.status

-- Of coroutines that were resumed and did not end: their modes while they are suspended, their resumer's while they run.
local others = setmetatable({}, { __mode = "k" })

-- A coroutine that nobody resumes any more takes its open regions with it.
local function new_state()
  local autocast = ffi.gc(ffi.new("ddp_autocast_state", C.ddp_autocast_dtype(), 0), C.ddp_autocast_abandon)
  return { grad = C.ddp_grad_mode(), autocast = autocast }
end

local function swap(state)
  state.grad = C.ddp_set_grad_mode(state.grad)
  C.ddp_autocast_swap(state.autocast)
end

local function back(state, co, ...)
  swap(state)
  if status(co) == "dead" then others[co] = nil end
  return ...
end

local function resume_in_modes(co, ...)
  if type(co) ~= "thread" or status(co) ~= "suspended" then return resume(co, ...) end -- it says what is wrong
  local state = others[co]
  if not state then
    state = new_state()
    others[co] = state
  end
  swap(state)
  return back(state, co, resume(co, ...))
end

local function results(ok, ...)
  if not ok then error((...), 0) end
  return ...
end

coroutine.resume = resume_in_modes -- luacheck: ignore 122
function coroutine.wrap(fn) -- luacheck: ignore 122
  local co = create(fn)
  return function(...) return results(resume_in_modes(co, ...)) end
end

return true
