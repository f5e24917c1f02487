-- data.lua -- data sets, samplers and loaders. The work is done by the C loader's threads; here are options and loops.
local ffi = require "ffi"
local base = require "ddp.ffi"
local ship = require "ddp.ship"
local C, own, check, fail = base.C, base.own, base.check, base.error

-- data.on_loop(loader) is called when a loop begins: it returns an object whose batch(last) is called with each batch (last: it is
-- known to be the last) and whose finish() is called where the loop finds no more data. ddp.parallel may set it.
local M = {}

-- ---- data sets -----------------------------------------------------------------------------------------------------

local Set = {}
Set.__index = Set
function Set:len() return tonumber(C.ddp_dataset_len(self.handle)) end
Set.__tostring = function(self) return ("data set %s of %d samples"):format(self.name, self:len()) end

local function new_set(handle, name)
  if handle == nil then base.raise() end
  return setmetatable({ handle = ffi.gc(handle, C.ddp_dataset_free), name = name }, Set)
end
local function need_set(what, set)
  if getmetatable(set) ~= Set then fail(("%s: expected a data set, got a %s"):format(what, type(set))) end
  return set
end
local function need_count(what, v, least)
  if type(v) ~= "number" or v % 1 ~= 0 or v < least then
    fail(("%s: expected a whole number from %d, got %s"):format(what, least, tostring(v)))
  end
  return v
end

-- cifar10(dir, {train = true}): images f32 [3,32,32] in [0, 1], labels i64.
function M.cifar10(dir, opts)
  if type(dir) ~= "string" then fail("cifar10: expected a folder, got a " .. type(dir)) end
  opts = base.options("cifar10", opts, { "train" })
  return new_set(C.ddp_dataset_cifar10(dir, opts.train == false and 0 or 1), "cifar10")
end

-- Where digits.bin may lie: DDP_DATA_DIR, else beside the scripts of the build or the install tree.
local function digits_file()
  local places = {}
  local function add(dir, rest) if dir and dir ~= "" then places[#places + 1] = dir .. rest .. "/digits.bin" end end
  add(os.getenv "DDP_DATA_DIR", "")
  add(os.getenv "DDP_SHARE", "/data")
  add(os.getenv "DDP_SHARE", "/scripts/data")
  add(os.getenv "DDP_LIB", "/../scripts/data")
  add(os.getenv "DDP_LIB", "/../share/ddp/scripts/data")
  add(debug.getinfo(1, "S").source:match "^@(.*)/lua/ddp/data%.lua$", "/scripts/data")
  add(debug.getinfo(1, "S").source:match "^@lua/ddp/data%.lua$" and ".", "/scripts/data")
  for _, path in ipairs(places) do
    local f = io.open(path, "rb")
    if f then
      f:close()
      return path
    end
  end
  fail("digits: no digits.bin; looked for " .. table.concat(places, ", "))
end

-- digits{train = true}: images f32 [1,8,8] in [0, 1], labels i64.
function M.digits(opts)
  opts = base.options("digits", opts, { "train", "file" })
  return new_set(C.ddp_dataset_digits(opts.file or digits_file(), opts.train == false and 0 or 1), "digits")
end

-- tensors(x, y): their rows.
function M.tensors(x, y)
  if not base.is_tensor(x) then fail("tensors: x is a " .. type(x) .. ", expected a tensor") end
  if y ~= nil and not base.is_tensor(y) then fail("tensors: y is a " .. type(y) .. ", expected a tensor") end
  return new_set(C.ddp_dataset_tensors(x, y), "tensors")
end

-- from(n, fn, {types = {"f32", "i64"}}): samples that fn(i) returns as x, y, with i from 1, in the workers' states.
function M.from(n, fn, opts)
  need_count("from: n", n, 0)
  opts = base.options("from", opts, { "types" })
  local types = opts.types or {}
  if type(types) ~= "table" then fail("from: types is a " .. type(types) .. ", expected a table of names, x's first") end
  for i = 1, 2 do if types[i] ~= nil then base.dtype(types[i], "from: types") end end
  local set = new_set(C.ddp_dataset_host(n, ship.hooks("from", fn, "get")), "from")
  set.types = types
  return set
end

function M.images() fail "data.images is not built yet" end
function M.tokens() fail "data.tokens is not built yet" end

-- ids from 1, as an array; or a tensor of i64 from 0.
function M.subset(set, ids)
  need_set("subset", set)
  local shift = 1
  if base.is_tensor(ids) then ids, shift = ids:tolist(), 0 end
  if type(ids) ~= "table" then fail("subset: ids is a " .. type(ids) .. ", expected an array or a tensor") end
  local list, len = ffi.new("int64_t[?]", math.max(#ids, 1)), set:len()
  for i, id in ipairs(ids) do
    if type(id) ~= "number" or id % 1 ~= 0 or id < shift or id >= len + shift then
      fail(("subset: id %s (at %d) of a set of %d samples, which count from %d"):format(tostring(id), i, len, shift))
    end
    list[i - 1] = id - shift
  end
  local sub = new_set(C.ddp_dataset_subset(set.handle, list, #ids), set.name)
  sub.types = set.types
  return sub
end

-- The sizes of the parts: given, or as fractions, rounded down, what is left going to the first ones.
local function part_sizes(n, parts)
  local sum, sizes, used = 0, {}, 0
  for _, p in ipairs(parts) do
    if type(p) ~= "number" or p < 0 then fail("random_split: a part is " .. tostring(p) .. ", expected a length or a fraction") end
    sum = sum + p
  end
  local fractions = sum <= 1 + 1e-9
  if fractions and math.abs(sum - 1) > 1e-6 then fail(("random_split: the fractions add up to %g, not 1"):format(sum)) end
  if not fractions and sum ~= n then fail(("random_split: the parts add up to %g, the set has %d samples"):format(sum, n)) end
  for i, p in ipairs(parts) do
    sizes[i] = fractions and math.floor(p * n + 1e-9) or p
    used = used + sizes[i]
  end
  for i = 1, n - used do sizes[(i - 1) % #sizes + 1] = sizes[(i - 1) % #sizes + 1] + 1 end
  return sizes
end

-- random_split(set, {.9, .1}, {seed = 0}) -> a table of sets; alike on all ranks.
function M.random_split(set, parts, opts)
  need_set("random_split", set)
  opts = base.options("random_split", opts, { "seed" })
  if type(parts) ~= "table" or #parts == 0 then fail "random_split: expected a table of fractions or lengths" end
  local n = set:len()
  local order, at, sets = ffi.new("int64_t[?]", math.max(n, 1)), 0, {}
  check(C.ddp_sampler_order(n, opts.seed or 0, 0, 1, 0, 0, 1, order))
  for i, size in ipairs(part_sizes(n, parts)) do
    sets[i] = new_set(C.ddp_dataset_subset(set.handle, order + at, size), set.name)
    sets[i].types = set.types
    at = at + size
  end
  return sets
end

-- ---- sampler --------------------------------------------------------------------------------------------------------

local Sampler = {}
Sampler.__index = Sampler

-- Samplers that share out over the job's ranks are numbered as they are made, alike on all ranks.
local samplers = 0
local function count_sampler(replicas)
  if replicas then return nil end
  samplers = samplers + 1
  return samplers
end

-- Shares a set out over the ranks. shuffle (default true): another order each epoch, and equal numbers for all ranks by
-- repeating a few samples, or dropping them (drop_last). shuffle = false: each sample exactly once over all ranks.
function M.DistributedSampler(set, opts)
  need_set("DistributedSampler", set)
  opts = base.options("DistributedSampler", opts, { "shuffle", "seed", "drop_last", "num_replicas", "rank" })
  if (opts.num_replicas == nil) ~= (opts.rank == nil) then fail "DistributedSampler: rank and num_replicas come together" end
  if opts.num_replicas then
    need_count("DistributedSampler: num_replicas", opts.num_replicas, 1)
    if need_count("DistributedSampler: rank", opts.rank, 0) >= opts.num_replicas then
      fail(("DistributedSampler: rank %d of %d"):format(opts.rank, opts.num_replicas))
    end
  end
  return setmetatable({ set = set, shuffle = opts.shuffle ~= false, seed = need_count("DistributedSampler: seed", opts.seed or 0, 0),
    drop_last = opts.drop_last or false, world = opts.num_replicas, of_rank = opts.rank, number = count_sampler(opts.num_replicas) }, Sampler)
end

-- Ranks that share out data must read the same set: each says under the sampler's number what it reads, and whoever finds that
-- another said otherwise raises. Nobody waits: a loader is not collective.
local function compare_sets(sampler)
  if not sampler.number or sampler.compared or C.ddp_is_initialized() == 0 then return end
  sampler.compared = true
  local fingerprint = tostring(C.ddp_dataset_fingerprint(sampler.set.handle)):match "%d+"
  check(C.ddp_job_compare("data set " .. sampler.number, ("%s, fingerprint %s"):format(tostring(sampler.set), fingerprint),
    "DistributedSampler: the ranks read different data"))
end

-- Samples of one epoch on this rank.
function Sampler:len()
  return tonumber(C.ddp_sampler_len(self.set:len(), self.shuffle and 1 or 0, self.drop_last and 1 or 0, self.of_rank or C.ddp_rank(),
    self.world or C.ddp_world_size()))
end

-- The order changes by itself; this makes the next pass of its loader that of `epoch`, for those who count themselves.
function Sampler:set_epoch(epoch) self.next_epoch = need_count("set_epoch", epoch, 0) end

-- ---- loader -----------------------------------------------------------------------------------------------------------

local Loader = {}
Loader.__index = Loader

-- A list of numbers, or one, into an array of doubles that `keep` keeps alive.
local function doubles(v, what, keep)
  if type(v) == "number" then v = { v } end
  if type(v) ~= "table" or type(v[1]) ~= "number" then fail(what .. ": expected a number or a table of numbers") end
  local buf = ffi.new("double[?]", #v, v)
  keep[#keep + 1] = buf
  return buf, #v
end

local function crop_options(c, crop)
  if type(crop) ~= "table" then crop = { crop } end
  local size, padding = crop[1] or crop.size, crop.padding
  for k in pairs(crop) do
    if k ~= 1 and k ~= 2 then base.options("random_crop", { [k] = true }, { "size", "padding" }) end
  end
  local height, width = size, crop[2] or size
  if type(size) == "table" then height, width = size[1], size[2] end
  c.crop_h = need_count("random_crop: size", height, 1)
  c.crop_w = need_count("random_crop: size", width, 1)
  c.crop_padding = need_count("random_crop: padding", padding or 0, 0)
end

local function transform_options(c, transform, keep)
  local t = base.options("transform", transform, { "random_crop", "flip", "normalize", "fn" })
  if t.random_crop then crop_options(c, t.random_crop) end
  c.flip = t.flip and 1 or 0
  if t.normalize then
    local n = base.options("normalize", t.normalize, { "mean", "std" })
    local n_mean, n_std
    c.mean, n_mean = doubles(n.mean, "normalize: mean", keep)
    c.std, n_std = doubles(n.std, "normalize: std", keep)
    if n_mean ~= n_std then fail(("normalize: %d means and %d stds"):format(n_mean, n_std)) end
    c.n_norm = n_mean
  end
  if t.fn ~= nil then
    keep[#keep + 1] = ship.hooks("transform.fn", t.fn, "map")
    c.transform = keep[#keep]
  end
end

local function sampler_options(c, set, sampler, shuffle)
  if getmetatable(sampler) ~= Sampler then fail("DataLoader: sampler is a " .. type(sampler) .. ", expected a DistributedSampler") end
  if shuffle then fail "DataLoader: shuffle is the sampler's: give DistributedSampler(set, {shuffle = true})" end
  if sampler.set:len() ~= set:len() then
    fail(("DataLoader: the sampler is over %d samples, the set has %d"):format(sampler.set:len(), set:len()))
  end
  c.distributed = 1
  c.shuffle = sampler.shuffle and 1 or 0
  c.pad_drop = sampler.drop_last and 1 or 0
  c.order_seed = sampler.seed
  if sampler.world then c.rank, c.world = sampler.of_rank, sampler.world end
end

local OPTIONS = { "batch_size", "shuffle", "workers", "prefetch", "drop_last", "on_error", "device", "collate", "sampler", "transform",
  "seed", "num_workers" }
local ON_ERROR = { fail = 0, skip = 1 }

-- The C options of a DataLoader; `keep` holds what they point to.
local function loader_options(set, opts, keep)
  local c = ffi.new("ddp_loader_opts", { size = ffi.sizeof "ddp_loader_opts", order_seed = -1, seed = -1, index_from = 1 })
  c.batch_size = need_count("DataLoader: batch_size", opts.batch_size or 1, 1)
  c.workers = need_count("DataLoader: workers", opts.workers or opts.num_workers or 0, 0)
  c.prefetch = need_count("DataLoader: prefetch", opts.prefetch or 2, 1)
  c.shuffle = opts.shuffle and 1 or 0
  c.drop_last = opts.drop_last and 1 or 0
  if opts.seed then c.seed = need_count("DataLoader: seed", opts.seed, 0) end
  local on_error = ON_ERROR[opts.on_error or "fail"]
  if not on_error then fail(("DataLoader: on_error is \"%s\", expected \"fail\" or \"skip\""):format(tostring(opts.on_error))) end
  c.skip_errors = on_error
  if opts.device and not opts.collate then c.device = base.device(opts.device, "DataLoader") end
  if opts.sampler then sampler_options(c, set, opts.sampler, opts.shuffle) end
  for i, field in ipairs { "x_dtype", "y_dtype" } do
    local name = set.types and set.types[i]
    if name then c[field] = 1 + base.dtype(name, "from: types") end
  end
  if opts.transform then transform_options(c, opts.transform, keep) end
  return c
end

-- DataLoader(set, options): see API. device: batches are given out there, copied one ahead of their use where workers build them.
-- With `collate` the loader gives single samples, which are put together here; tensors that it returns then go to the device.
function M.DataLoader(set, opts)
  need_set("DataLoader", set)
  opts = base.options("DataLoader", opts, OPTIONS)
  if opts.collate ~= nil and type(opts.collate) ~= "function" then fail("DataLoader: collate is a " .. type(opts.collate) .. ", expected a function") end
  local keep = {}
  local c = loader_options(set, opts, keep)
  local self = setmetatable({ set = set, sampler = opts.sampler, batch_size = tonumber(c.batch_size), collate = opts.collate,
    drop_last = opts.drop_last or false, skips = opts.on_error == "skip", pass = 0, x_out = ffi.new "ddp_tensor *[1]", y_out = ffi.new "ddp_tensor *[1]" }, Loader)
  if opts.collate then
    self.device = opts.device
    c.prefetch = c.prefetch * self.batch_size
    c.batch_size, c.drop_last = 1, 0
  end
  local out = ffi.new "ddp_loader *[1]"
  check(C.ddp_loader_new(set.handle, c, out))
  self.handle = ffi.gc(out[0], C.ddp_loader_free)
  return self
end

local function need_open(self)
  if self.handle == nil then fail "loader: it is closed" end
  return self.handle
end

-- The next batch of C: x, y; nothing at the end.
local function next_batch(self, pass)
  if self.ended == pass then return nil end
  if pass ~= self.pass or self.handle == nil then fail "loader: this loop is over: another one began, or the loader was closed" end
  local r = C.ddp_loader_next(self.handle, self.x_out, self.y_out)
  if r == 1 then
    local x, y = self.x_out[0], self.y_out[0]
    if y == nil then return own(x) end
    return own(x), own(y)
  end
  if r < 0 then base.raise() end
  self.ended = pass
end

local function on_device(v, device)
  return device and base.is_tensor(v) and v:to(device) or v
end

-- With collate: batch[i] = {x, y} of single samples.
local function next_collated(self, pass)
  local batch = {}
  while #batch < self.batch_size do
    local x, y = next_batch(self, pass)
    if x == nil then break end
    batch[#batch + 1] = { x:select(1, 1), y and y:select(1, 1) }
  end
  if #batch == 0 or (#batch < self.batch_size and self.drop_last) then return nil end
  local x, y = self.collate(batch)
  return on_device(x, self.device), on_device(y, self.device)
end

-- Was the batch that C gave last the last of the pass? Only where it is sure; bad samples that are skipped may end it early.
local function is_last(self)
  if self.ended == self.pass then return true end
  if self.skips or self.handle == nil then return false end
  local left = tonumber(C.ddp_loader_len(self.handle) - C.ddp_loader_batch(self.handle))
  return left == 0 or (self.collate ~= nil and self.drop_last and left < self.batch_size)
end

-- for x, y in loader:iter() do ... end: one epoch.
function Loader:iter()
  local handle = need_open(self)
  local sampler = self.sampler
  if sampler and sampler.next_epoch then
    check(C.ddp_loader_set_epoch(handle, sampler.next_epoch))
    sampler.next_epoch = nil
  end
  if sampler then compare_sets(sampler) end
  check(C.ddp_loader_start(handle))
  self.pass = self.pass + 1
  local pass, step, loop = self.pass, self.collate and next_collated or next_batch, M.on_loop and M.on_loop(self)
  return function()
    local x, y = step(self, pass)
    if x ~= nil then
      if loop then loop:batch(is_last(self)) end
      return x, y
    end
    local ended = loop
    loop = nil
    if ended then ended:finish() end
  end
end

-- Batches of one epoch on this rank.
function Loader:len()
  local n = tonumber(C.ddp_loader_len(need_open(self)))
  if not self.collate then return n end
  return self.drop_last and math.floor(n / self.batch_size) or math.ceil(n / self.batch_size)
end

-- Epochs that have ended: the number of the one under way, from 0.
function Loader:epoch() return tonumber(C.ddp_loader_epoch(need_open(self))) end
-- Samples left out by on_error = "skip".
function Loader:skipped() return tonumber(C.ddp_loader_skipped(need_open(self))) end

-- Where the loop is: {epoch =, batch =}.
function Loader:state_dict()
  local handle = need_open(self)
  return { epoch = tonumber(C.ddp_loader_epoch(handle)), batch = tonumber(C.ddp_loader_batch(handle)) }
end
-- The next loop goes on from there.
function Loader:load_state_dict(state)
  local s = base.options("load_state_dict", state, { "epoch", "batch" })
  check(C.ddp_loader_load_state(need_open(self), need_count("load_state_dict: epoch", s.epoch, 0), need_count("load_state_dict: batch", s.batch, 0)))
  self.pass = self.pass + 1
end

-- Ends the workers now instead of when the loader is collected.
function Loader:close()
  if self.handle == nil then return end
  C.ddp_loader_free(ffi.gc(self.handle, nil))
  self.handle = nil
end

return M
