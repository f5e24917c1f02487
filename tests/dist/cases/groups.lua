-- Groups of ranks, and messages between two.
local ddp = require "ddp"
ddp.init()
local r, w = ddp.rank(), ddp.world_size()
local function expect(cond, what) if not cond then error(what, 0) end end
local function fails(fn, text)
  local ok, err = pcall(fn)
  expect(not ok and tostring(err):find(text, 1, true), ("expected \"%s\", got %s"):format(text, tostring(err)))
end

-- groups.lua mismatch: in a group, too, calls are compared.
if arg[1] == "mismatch" then
  local g = ddp.new_group { 0, 1 }
  if r == 0 then ddp.all_reduce(ddp.ones(4), "sum", { group = g, name = "loss" })
  elseif r == 1 then ddp.broadcast(ddp.ones(4), 0, { group = g }) end
  ddp.barrier()
  return
end
-- groups.lua silent N: the Nth message does not come.
if arg[1] == "silent" then
  for i = 1, tonumber(arg[2]) do
    if r == 2 then ddp.recv(ddp.zeros(3), 0, { name = "part" })
    elseif r == 0 and i < tonumber(arg[2]) then ddp.send(ddp.ones(3), 2, { name = "part" }) end
  end
  os.execute "sleep 20"
  return
end
-- groups.lua lists: all ranks give the same list.
if arg[1] == "lists" then ddp.new_group(r == 0 and { 0 } or { 1 }) return end

local last = w - 1
local all, ends = ddp.new_group { 0 }, ddp.new_group(w > 1 and { last, 0 } or { 0 })
local function list() local t = {} for i = 1, w do t[i] = w - i end return t end
local whole = ddp.new_group(list())
expect(all:size() == 1 and ends:size() == math.min(w, 2) and whole:size() == w, "sizes")
expect(whole:rank() == r and ends:rank() == (r == 0 and 0 or r == last and 1 or nil), "places")
expect(table.concat(ends:ranks(), " ") == (w > 1 and "0 " .. last or "0"), "ranks are ascending")

if r == 0 then expect(ddp.all_reduce(ddp.ones(3), "sum", { group = all })[1]:item() == 1, "a group of one") end
-- In the ends only, many times and large, while the others go on; then all together: the orders do not mix.
local n = w > 1 and 2 or 1
if ends:rank() then
  for i = 1, 20 do
    local t = ddp.full({ i == 20 and 300000 or i }, r + i)
    ddp.all_reduce(t, "sum", { group = ends })
    expect(t[i]:item() == (w > 1 and last + 2 * i or i), "all_reduce in a group")
  end
  local b = ddp.full({ 5 }, r)
  ddp.broadcast(b, last, { group = ends })
  expect(b[5]:item() == last, "broadcast from a rank of the job")
  local g = ddp.all_gather(ddp.tensor { r, r + 0.5 }, { group = ends })
  expect(g:size(1) == n and g[n][2]:item() == last + 0.5, "all_gather in a group")
  local s = ddp.reduce_scatter(ddp.arange(2 * n):float(), "sum", { group = ends })
  expect(s:size(1) == 2 and s[2]:item() == (2 * ends:rank() + 1) * n, "reduce_scatter in a group")
  ddp.barrier { group = ends }
  expect(ddp.all_gather_object(r * 10, { group = ends })[n] == last * 10, "all_gather_object in a group")
  expect(ddp.broadcast_object(r, last, { group = ends }) == last, "broadcast_object in a group")
  local h = ddp.all_reduce(ddp.full({ 70000 }, r), "max", { group = ends, async = true, name = "a" })
  local k = ddp.all_gather(ddp.full({ 4 }, r), { group = ends, async = true })
  expect(k:wait()[n][4]:item() == last and h:wait()[70000]:item() == last, "asynchronous in a group")
else
  fails(function() ddp.all_reduce(ddp.ones(1), "sum", { group = ends }) end, ("all_reduce: rank %d is not in the group {0, %d}"):format(r, last))
  fails(function() ddp.barrier { group = ends } end, "is not in the group")
  fails(function() ddp.all_gather_object(1, { group = ends }) end, "is not in the group")
end
if w > 2 and ends:rank() then fails(function() ddp.broadcast(ddp.ones(1), 1, { group = ends }) end, "root 1 is not in the group {0") end
local sum = ddp.all_reduce(ddp.full({ 3 }, r), "sum", { group = whole })
expect(sum[3]:item() == w * (w - 1) / 2, "a group of all")
expect(ddp.all_reduce(ddp.full({ 3 }, r))[1]:item() == w * (w - 1) / 2, "all, without a group")
fails(function() ddp.new_group { w } end, ("rank %d in a world of %d"):format(w, w))
fails(function() ddp.new_group { 0, 0 } end, w == 1 and "2 ranks in a world of 1" or "rank 0 after rank 0")
fails(function() ddp.all_reduce(ddp.ones(1), "sum", { group = { 0, 1 } }) end, "expected a group of new_group")

-- all_gather and reduce_scatter of all: asynchronous, named, and of several dimensions.
local h = ddp.all_gather(ddp.full({ 2, 3, 4, 5 }, r), { async = true, name = "x" })
local k = ddp.reduce_scatter(ddp.ones(w * 2, 3):mul(r + 1):t():contiguous():t(), "mean", { async = true, name = "y" })
local g, s = h:wait(), k:wait()
expect(g:dim() == 5 and g[w][2][3][4][5]:item() == last, "all_gather, asynchronous")
expect(s:size(1) == 2 and math.abs(s[2][3]:item() - (w + 1) / 2) < 1e-6, "reduce_scatter, asynchronous")

-- Messages around the ring, large ones too, and asynchronous ones in their order.
if w > 1 then
  local to, from = (r + 1) % w, (r - 1) % w
  for _, size in ipairs { 1, 200000 } do
    local mine, got = ddp.full({ size }, r), ddp.zeros(size)
    if r % 2 == 0 then
      ddp.send(mine, to)
      ddp.recv(got, from)
    else
      ddp.recv(got, from)
      ddp.send(mine, to)
    end
    expect(got[size]:item() == from, "send and recv")
  end
  if r < 2 then
    local works, tensors = {}, {}
    for i = 1, 10 do
      tensors[i] = r == 0 and ddp.full({ i }, 100 + i) or ddp.zeros(i)
      works[i] = r == 0 and ddp.send(tensors[i], 1, { async = true }) or r == 1 and ddp.recv(tensors[i], 0, { async = true })
    end
    for i = 10, 1, -1 do works[i]:wait() end
    for i = 1, 10 do expect(tensors[i][i]:item() == 100 + i, "asynchronous messages") end
  end
  fails(function() ddp.send(ddp.ones(1), r) end, ("send: rank %d on rank %d"):format(r, r))
  fails(function() ddp.recv(ddp.ones(1), w) end, ("recv: rank %d"):format(w))
end
for _, size in ipairs { 1, 100000 } do
  local t = ddp.arange(w):float():add(10 * r):reshape(w, 1):expand(w, size)
  local got = ddp.all_to_all(t)
  for rank = 0, w - 1 do expect(got[rank + 1][size]:item() == 10 * rank + r, "all_to_all") end
end
if ends:rank() then
  local got = ddp.all_to_all(ddp.arange(n):float():add(10 * r), { group = ends })
  expect(got[n]:item() == 10 * last + ends:rank(), "all_to_all in a group")
end
fails(function() ddp.all_to_all(ddp.ones(2 * w + (w > 1 and 1 or 0), w > 1 and 1 or nil):narrow(1, 1, w == 1 and 0 or 1)) end, w == 1 and "" or "must divide")
ddp.barrier()
ddp.finish()
if r == 0 then print "fine" end
