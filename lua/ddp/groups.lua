-- groups.lua -- groups of ranks, and messages between two: ddp.new_group, send, recv, all_to_all.
local ffi = require "ffi"
local base = require "ddp.ffi"
local tensor = require "ddp.tensor"
local C, check, fail = base.C, base.check, base.error

local M = {}
local Group = {}
Group.__index = Group
Group.__tostring = function(self) return "group {" .. table.concat(self.members, ", ") .. "}" end

-- new_group{0, 1}: ranks of the job, in any order. Collective of all ranks, with the same list. Roots and peers of a call with
-- {group = g} are ranks of the job; results stand by the rank's place in the group.
function M.new_group(ranks)
  if type(ranks) ~= "table" then fail("new_group: expected a list of ranks, got a " .. type(ranks)) end
  local members = {}
  for i, r in ipairs(ranks) do
    if type(r) ~= "number" or r % 1 ~= 0 then fail(("new_group: member %d is %s, expected a rank"):format(i, tostring(r))) end
    members[i] = r
  end
  table.sort(members)
  C.ddp_set_where(base.user_line() or "")
  local out = ffi.new "ddp_group *[1]"
  check(C.ddp_group_new(ffi.new("int[?]", math.max(#members, 1), members), #members, out))
  return setmetatable({ members = members, handle = ffi.gc(out[0], C.ddp_group_free) }, Group)
end

-- This rank's place in the group, from 0; nil outside of it.
function Group:rank()
  local place = C.ddp_group_rank(self.handle)
  if place >= 0 then return place end
end
function Group:size() return #self.members end
function Group:ranks() return { unpack(self.members) } end

function M.check(what, g)
  if g ~= nil and getmetatable(g) ~= Group then fail(("%s: group is a %s, expected a group of new_group"):format(what, type(g))) end
  return g
end

-- fn(...) with the collectives inside among g's ranks; g nil: among all.
function M.within(g, fn, ...)
  if not g then return fn(...) end
  local before = C.ddp_group_use(g.handle)
  local function finish(ok, ...)
    C.ddp_group_use(before)
    if not ok then error((...), 0) end
    return ...
  end
  return finish(pcall(fn, ...))
end

-- A contiguous tensor to write into.
function M.empty(shape, dtype, device)
  local n = 1
  for _, s in ipairs(shape) do n = n * s end
  return tensor.empty(n, { dtype = dtype, device = device }):view(shape)
end

local work_out = ffi.new "ddp_work *[1]"
-- An asynchronous call's handle: wait() ends it and gives t, test() asks. keep: what must live as long.
function M.handle(work, t, keep)
  local w = ffi.gc(work, C.ddp_work_free)
  return {
    keep = keep,
    wait = function()
      check(C.ddp_work_wait(w))
      return t
    end,
    test = function() return check(C.ddp_work_test(w)) == 1 end,
  }
end

local function message(what, call, t, peer, opts)
  if not tensor.is_tensor(t) then fail(("%s: expected a tensor, got a %s"):format(what, type(t))) end
  if type(peer) ~= "number" then fail(("%s: the rank is a %s, expected a number"):format(what, type(peer))) end
  opts = base.options(what, opts, { "async", "name" })
  C.ddp_set_where(base.user_line() or "")
  check(call(t, peer, opts.name, opts.async and work_out or nil))
  return opts.async and M.handle(work_out[0], t) or t
end
-- send(t, to), recv(t, from): recv writes into t. Both ranks call, with the same shape; a send ends when it is received.
-- {async = true}: a handle with wait(). The first call between two ranks waits for the other.
function M.send(t, to, opts) return message("send", C.ddp_send, t, to, opts) end
function M.recv(t, from, opts) return message("recv", C.ddp_recv, t, from, opts) end

-- all_to_all(t): part r of t's first dimension goes to rank r; the result has the parts for this rank, by rank.
function M.all_to_all(t, opts)
  if not tensor.is_tensor(t) then fail("all_to_all: expected a tensor, got a " .. type(t)) end
  opts = base.options("all_to_all", opts, { "name", "group" })
  C.ddp_set_where(base.user_line() or "")
  local out = M.empty(t:size(), t:dtype())
  M.within(M.check("all_to_all", opts.group), function() check(C.ddp_all_to_all_into(out, t, opts.name)) end)
  return out
end

return M
