-- follow.lua -- what follows the steps of a run: optimizers, schedules, scalers, by the order in which they were made, which
-- is the same on all ranks. join.lua gives those that a rank used to one that missed steps.
local M = {}
local made = setmetatable({}, { __mode = "v" })
local n, loops = 0, 0

-- object has state_dict and load_state_dict; kind: its name in messages.
function M.add(object, kind)
  n = n + 1
  made[n] = object
  object.follow = { number = n, kind = kind, at = 0 }
  return object
end

-- The object was used for a step.
function M.used(object)
  local f = object.follow
  if f then f.at = loops end
end

-- A loop over data begins: what since() takes.
function M.mark()
  loops = loops + 1
  return loops
end

-- Those used since `mark`, in the order of their making.
function M.since(mark)
  local list = {}
  for i = 1, n do
    local object = made[i]
    if object and object.follow.at >= mark then list[#list + 1] = object end
  end
  return list
end

function M.find(number) return made[number] end

return M
