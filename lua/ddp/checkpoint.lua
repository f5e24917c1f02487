-- checkpoint.lua -- ddp.save and ddp.load: models, optimizers and all else that a run goes on from, in one safetensors file.
--
-- What the file holds. Tensors: of what is saved under the name `model` by their own names, of others behind `name.`; a wrapped
-- model is saved as what it wraps. Texts (the format's __metadata__): "ddp" (what was saved, by how many ranks), "name" for each
-- thing with a state that is not all tensors, "extra", and "ddp.ranks", what each rank has of its own: random state, place in
-- the data. With an optimizer, that is in a file to resume from, each rank's buffers are kept besides, under `ranks.`: a
-- model's own entries are the average over the ranks.
--
-- Saving: each rank looks at what it has, all hear whether that went well, rank 0 writes, all hear whether that went well.
local ffi = require "ffi"
local base = require "ddp.ffi"
local ops = require "ddp.ops"
local grad = require "ddp.grad"
local module = require "ddp.nn.module"
local parallel = require "ddp.parallel"
local json = require "ddp.json"
local C, check, fail, is_tensor = base.C, base.check, base.error, base.is_tensor

local M = {}
local VERSION = 1

-- ---- kinds of things ----------------------------------------------------------------------------------------------------

local function is_handle(x, ctype) return type(x) == "table" and type(rawget(x, "handle")) == "cdata" and ffi.istype(ctype, x.handle) end
local function wrapped(x) return type(x) == "table" and rawget(x, "_ddp") ~= nil and rawget(x, "module") end

local function all_tensors(x)
  if type(x) ~= "table" or getmetatable(x) ~= nil or next(x) == nil then return false end
  for k, v in pairs(x) do if type(k) ~= "string" or not is_tensor(v) then return false end end
  return true
end

-- "module", "tensors", "tensor", "loader", "generator", "optimizer" or "state" (what has state_dict and load_state_dict).
local function kind_of(what, name, x)
  if wrapped(x) or module.is_module(x) then return "module" end
  if is_tensor(x) then return "tensor" end
  if is_handle(x, "ddp_loader *") then return "loader" end
  if is_handle(x, "ddp_generator *") then return "generator" end
  if type(x) == "table" and getmetatable(x) ~= nil and x.state_dict and x.load_state_dict then return x.param_groups and "optimizer" or "state" end
  if all_tensors(x) then return "tensors" end
  if type(x) == "table" and x.flush and x.skip then
    fail(("%s: %s is a stepper, which has nothing to keep between windows; give its model, optimizer, scaler and schedule"):format(what, name))
  end
  fail(("%s: %s is a %s; expected a module, optimizer, scaler, schedule, loader, generator, a tensor or a table of tensors; plain values go into extra"):format(
    what, name, type(x)))
end

local function check_things(what, things)
  if type(things) ~= "table" or is_tensor(things) or getmetatable(things) ~= nil then
    local got = (wrapped(things) or module.is_module(things)) and "module" or is_tensor(things) and "tensor" or type(things)
    fail(("%s: expected a table { model =, optimizer =, ... }, got a %s"):format(what, got))
  end
  local names = {}
  for name in pairs(things) do
    if type(name) ~= "string" or not name:find "^[%a_][%w_]*$" then fail(("%s: the name %s: expected a word"):format(what, tostring(name))) end
    if name == "ddp" or name == "ranks" then fail(("%s: the name \"%s\" is taken"):format(what, name)) end
    if name ~= "extra" then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

-- Tensors of a module, a tensor or a table of tensors by their names in the thing.
local function tensors_of(kind, x)
  if kind == "module" then return (wrapped(x) or x):state_dict() end
  if kind == "tensors" then return x end
  return {}
end

local function full_name(name, inner) return name == "model" and inner or name .. "." .. inner end

-- ---- what a rank has of its own -----------------------------------------------------------------------------------------

local words = ffi.new "uint64_t[3]"

local function random_state(g)
  C.ddp_generator_state(g, words)
  local out = {}
  for i = 0, 2 do out[i + 1] = tostring(words[i]):match "%d+" end
  return out
end

local function set_random_state(g, state)
  for i = 0, 2 do
    local v = 0ULL
    for digit in state[i + 1]:gmatch "%d" do v = v * 10 + tonumber(digit) end
    words[i] = v
  end
  C.ddp_generator_set_state(g, words)
end

-- Samples that a loader's batch is, over all ranks.
local function samples_a_batch(loader)
  local world = loader.sampler and (loader.sampler.world or C.ddp_world_size()) or 1
  return (loader.collate and 1 or loader.batch_size) * world
end

local function own_state(kind, x)
  if kind == "generator" then return random_state(x.handle) end
  return { place = x:state_dict(), samples = samples_a_batch(x) }
end

-- Another number of ranks goes on after the samples that were seen, as near as whole batches come.
local function set_own_state(kind, x, state)
  if kind == "generator" then return set_random_state(x.handle, state) end
  local place, mine = state.place, samples_a_batch(x)
  if state.samples ~= mine then place = { epoch = place.epoch, batch = math.floor(place.batch * state.samples / mine) } end
  x:load_state_dict(place)
end

-- ---- saving -------------------------------------------------------------------------------------------------------------

local function add(c, what, name, t)
  if name:find "%z" then fail(("%s: the name of a tensor has a zero byte"):format(what)) end
  if c.tensors[name] then fail(("%s: two tensors are called \"%s\""):format(what, name)) end
  c.tensors[name] = t
end

local function collect_thing(c, name, x)
  local kind = kind_of("save", name, x)
  c.kinds[name] = kind
  if kind == "tensor" then add(c, "save", name, x)
  elseif kind == "loader" or kind == "generator" then c.own[name] = own_state(kind, x)
  elseif kind == "optimizer" or kind == "state" then
    c.texts[name] = json.encode(x:state_dict(), name, function(t, where)
      if not is_tensor(t) then return nil end
      add(c, "save", where, t)
      return where
    end)
  else
    for inner, t in module.sorted(tensors_of(kind, x)) do add(c, "save", full_name(name, inner), t) end
  end
end

-- Everything of this rank: {tensors = {name = tensor}, texts =, kinds =, own =}.
local function collect(things)
  local c = { tensors = {}, texts = {}, kinds = {}, own = {}, names = check_things("save", things) }
  for _, name in ipairs(c.names) do collect_thing(c, name, things[name]) end
  for name in pairs(things.model and tensors_of(c.kinds.model, things.model) or {}) do
    local first = name:match "^(.-)%." or name
    if first == "ranks" or first ~= "model" and c.kinds[first] then
      fail(("save: model has \"%s\", which would be taken for a part of \"%s\": give that another name"):format(name, first))
    end
  end
  c.texts.extra = json.encode(things.extra == nil and {} or things.extra, "extra")
  if type(things.extra) ~= "table" and things.extra ~= nil then fail("save: extra is a " .. type(things.extra) .. ", expected a table") end
  return c
end

-- Buffers of wrapped models: their average over the ranks under their own names, and each rank's where the run may go on.
local function share_buffers(c, things)
  local resume = false
  for _, kind in pairs(c.kinds) do resume = resume or kind == "optimizer" end
  for _, name in ipairs(c.names) do
    local m = wrapped(things[name])
    if m then
      for inner, b in m:named_buffers() do
        local full = full_name(name, inner)
        if resume then c.tensors["ranks." .. name .. "." .. inner] = parallel.all_gather(b) end
        if b:dtype() == "f32" or b:dtype() == "f64" then c.tensors[full] = parallel.all_reduce(b:clone(), "mean", { name = "buffers" }) end
      end
    end
  end
end

local function write(path, c, ranks)
  c.texts.ddp = json.encode({ version = VERSION, world_size = C.ddp_world_size(), kinds = c.kinds }, "save")
  c.texts["ddp.ranks"] = json.encode(ranks, "save")
  local function arrays(map, ctype)
    local names = {}
    for name in pairs(map) do names[#names + 1] = name end
    table.sort(names)
    local list, values = ffi.new("const char *[?]", #names + 1), ffi.new(ctype, #names + 1)
    for i, name in ipairs(names) do list[i - 1], values[i - 1] = name, map[name] end
    return #names, list, values, names
  end
  local n, names, tensors, alive = arrays(c.tensors, "ddp_tensor *[?]")
  local n_texts, keys, texts, alive_too = arrays(c.texts, "const char *[?]")
  check(C.ddp_file_write(path, n, names, tensors, n_texts, keys, texts))
  return alive, alive_too
end

-- What all ranks say about themselves; the first that failed is told on all.
local function agree(what, mine)
  local all = parallel.all_gather_object(mine)
  for r, theirs in ipairs(all) do
    if theirs.error then
      if r - 1 == C.ddp_rank() then error(theirs.error, 0) end
      fail(("%s: on rank %d: %s"):format(what, r - 1, theirs.error))
    end
  end
  return all
end

local function check_path(what, path)
  if type(path) == "string" and path ~= "" and not path:find "%z" then return end
  fail(("%s: expected the name of a file, got %s"):format(what, type(path) == "string" and "\"" .. path .. "\"" or "a " .. type(path)))
end

local function save_together(path, things)
  local ok, c = pcall(collect, things)
  local mine = ok and { path = path, names = table.concat(c.names, ", "), random = random_state(nil), own = c.own } or { error = tostring(c) }
  local all, ranks = agree("save", mine), {}
  for r, theirs in ipairs(all) do
    for _, k in ipairs { "path", "names" } do
      if theirs[k] ~= all[1][k] then fail(("save: rank 0 saves %s, rank %d %s"):format(all[1][k], r - 1, theirs[k])) end
    end
    ranks[r] = { random = theirs.random, own = theirs.own }
  end
  grad.no_grad(share_buffers, c, things)
  local result = { ok = true }
  if C.ddp_rank() == 0 then
    local written, why = pcall(write, path, c, ranks)
    result = { ok = written, why = not written and tostring(why) or nil }
  end
  result = parallel.broadcast_object(result)
  if result.ok then return end
  if C.ddp_rank() == 0 then error(result.why, 0) end
  fail("save: on rank 0: " .. result.why)
end

-- ddp.save(path, {model =, optimizer =, scaler =, schedule =, loader =, extra = {...}, ...}): collective, or with {collective = false}
-- from this rank alone. The file that stood there stays until the new one is on the disk.
function M.save(path, things, opts)
  opts = base.options("save", opts, { "collective", "async" })
  check_path("save", path)
  if opts.async then fail "save: async is not built yet" end
  if opts.collective ~= false and C.ddp_world_size() > 1 then save_together(path, things)
  else
    local c = collect(things)
    write(path, c, { { random = random_state(nil), own = c.own } })
  end
  C.ddp_stats_pause()
end

-- ---- loading ------------------------------------------------------------------------------------------------------------

local entry = ffi.new "ddp_file_entry[1]"

-- {f =, names = {name = number}, sizes = {name = "2,3"}, kinds =, ranks =}
local function open(path)
  local out = ffi.new "ddp_file *[1]"
  check(C.ddp_file_open(path, out))
  local file = { f = ffi.gc(out[0], C.ddp_file_free), path = path, number = {}, size = {} }
  for i = 0, C.ddp_file_len(file.f) - 1 do
    C.ddp_file_at(file.f, i, entry)
    local size, name = {}, ffi.string(entry[0].name)
    for d = 0, entry[0].ndim - 1 do size[d + 1] = tonumber(entry[0].size[d]) end
    file.number[name], file.size[name] = i, table.concat(size, ",")
  end
  return file
end

local function close(file) C.ddp_file_free(ffi.gc(file.f, nil)) end

local function text_of(file, key)
  local text = C.ddp_file_text(file.f, key)
  return text ~= nil and ffi.string(text) or nil
end

local function decoded(file, key, other)
  local text = text_of(file, key)
  return text and json.decode(text, ("load: %s: its \"%s\""):format(file.path, key), other)
end

-- A file of another program's is a model.
local function read_about(file)
  local about = decoded(file, "ddp")
  if about == nil then
    file.kinds, file.ranks, file.foreign = { model = "module" }, {}, true
    return
  end
  if type(about) ~= "table" or type(about.version) ~= "number" or type(about.kinds) ~= "table" then fail(("load: %s: its \"ddp\" is damaged"):format(file.path)) end
  if about.version > VERSION then fail(("load: %s is of version %g, this library reads %d"):format(file.path, about.version, VERSION)) end
  file.kinds, file.ranks = about.kinds, decoded(file, "ddp.ranks") or {}
end

local function extra_of(file)
  if not file.foreign then return decoded(file, "extra") or {} end
  local extra = {}
  for i = 0, C.ddp_file_texts(file.f) - 1 do
    local key = ffi.string(C.ddp_file_text_key(file.f, i))
    extra[key] = text_of(file, key)
  end
  return extra
end

local function tensor_in(file, name)
  return base.own(C.ddp_file_tensor(file.f, file.number[name]))
end

-- The names in the file that belong to `name`, as {inner = full}.
local function part_of(file, name)
  local part, others = {}, { ranks = not file.foreign }
  for k in pairs(file.kinds) do others[k] = k ~= "model" end
  for full in pairs(file.number) do
    if name == "model" then
      if not others[full:match "^(.-)%." or full] then part[full] = full end
    elseif full:sub(1, #name + 1) == name .. "." then part[full:sub(#name + 2)] = full end
  end
  return part
end

-- Copies, each {name in the file, tensor}, into plan; what is missing or unexpected into its lists. Sizes are checked.
local function plan_tensors(plan, file, name, kind, x)
  local mine = kind == "tensor" and { [""] = x } or tensors_of(kind, x)
  local theirs = kind == "tensor" and { [""] = file.number[name] and name or nil } or part_of(file, name)
  for inner, t in module.sorted(mine) do
    local full = theirs[inner]
    if not full then plan.missing[#plan.missing + 1] = kind == "tensor" and name or full_name(name, inner)
    else
      local size = table.concat(t:size(), ",")
      if size ~= file.size[full] then fail(("load: %s is [%s] here, [%s] in %s"):format(full, size, file.size[full], file.path)) end
      plan.copies[#plan.copies + 1] = { full, t }
    end
  end
  for inner, full in module.sorted(theirs) do if mine[inner] == nil then plan.unexpected[#plan.unexpected + 1] = full end end
end

-- The buffers that this rank had when a file to resume from was written by as many ranks.
local function plan_buffers(plan, file, name, m)
  if #file.ranks ~= C.ddp_world_size() then return end
  for inner, b in m:named_buffers() do
    local full = "ranks." .. name .. "." .. inner
    if file.number[full] and file.size[full] == table.concat({ #file.ranks, unpack(b:size()) }, ",") then
      plan.after[#plan.after + 1] = function()
        local all = tensor_in(file, full)
        ops.copy_(b, all:select(1, C.ddp_rank() + 1))
      end
    end
  end
end

local function plan_state(plan, file, name, x)
  local numbers = {}
  local state = decoded(file, name, function(full)
    if not file.number[full] then fail(("load: %s has no tensor \"%s\" for %s"):format(file.path, full, name)) end
    local t = tensor_in(file, full)
    numbers[t:id()] = file.number[full]
    return t
  end)
  if state == nil then
    plan.missing[#plan.missing + 1] = name
    return
  end
  if x.check_state_dict then x:check_state_dict(state) end
  plan.after[#plan.after + 1] = function()
    x:load_state_dict(state, function(t) C.ddp_file_forget(file.f, numbers[t:id()]) end)
  end
end

local function plan_own(plan, file, name, kind, x)
  local rank = file.ranks[C.ddp_rank() + 1] or file.ranks[1]
  local state = rank and rank.own and rank.own[name]
  if state == nil then plan.missing[#plan.missing + 1] = name
  else plan.after[#plan.after + 1] = function() set_own_state(kind, x, state) end end
end

local ORDER = { module = 1, tensors = 1, tensor = 1, optimizer = 2, state = 3, loader = 4, generator = 4 } -- a schedule sets its optimizer's rates

local function some(list)
  if #list == 0 then return "none" end
  local shown = {}
  for i = 1, math.min(#list, 20) do shown[i] = list[i] end
  return table.concat(shown, ", ") .. (#list > 20 and (" and %d more"):format(#list - 20) or "")
end

-- What is to be done, in order, all of it checked: nothing is changed where the file does not fit.
local function make_plan(file, things, strict)
  local names, kinds, plan = check_things("load", things), {}, { copies = {}, after = {}, missing = {}, unexpected = {} }
  for _, name in ipairs(names) do kinds[name] = kind_of("load", name, things[name]) end
  table.sort(names, function(a, b)
    if ORDER[kinds[a]] ~= ORDER[kinds[b]] then return ORDER[kinds[a]] < ORDER[kinds[b]] end
    return a < b
  end)
  for _, name in ipairs(names) do
    local kind, x = kinds[name], things[name]
    plan.resume = plan.resume or kind == "optimizer" and file.kinds[name] == "optimizer"
    if kind == "optimizer" or kind == "state" then plan_state(plan, file, name, x)
    elseif kind == "loader" or kind == "generator" then plan_own(plan, file, name, kind, x)
    else plan_tensors(plan, file, name, kind, x) end
  end
  for _, name in ipairs(names) do
    if plan.resume and wrapped(things[name]) then plan_buffers(plan, file, name, wrapped(things[name])) end
  end
  if strict and (#plan.missing > 0 or #plan.unexpected > 0) then
    fail(("load: %s: missing: %s; unexpected: %s"):format(file.path, some(plan.missing), some(plan.unexpected)))
  end
  return plan
end

local function carry_out(plan, file)
  for _, c in ipairs(plan.copies) do check(C.ddp_file_read(file.f, file.number[c[1]], c[2])) end
  grad.no_grad(function() for _, fn in ipairs(plan.after) do fn() end end)
  local rank = file.ranks[C.ddp_rank() + 1] or file.ranks[1] -- a rank that was not there draws like rank 0, its dropout by its own rank
  if plan.resume and rank then set_random_state(nil, rank.random) end
end

-- {name = tensor}, extra
local function load_all(path)
  local file, out = open(path), {}
  read_about(file)
  for name in pairs(file.number) do out[name] = tensor_in(file, name) end
  local extra = extra_of(file)
  close(file)
  return out, extra
end

-- ddp.load(path, {model =, optimizer =, ...}, {strict = true}) -> extra, {missing_keys =, unexpected_keys =}: collective, or with
-- {collective = false} on this rank alone. Nothing is changed where the file does not fit. Random numbers go on where they were
-- when an optimizer is loaded. ddp.load(path) -> {name = tensor}, extra: on this rank, over the mapped file.
function M.load(path, things, opts)
  opts = base.options("load", opts, { "strict", "collective" })
  check_path("load", path)
  if things == nil then return load_all(path) end
  local file, plan, extra
  local function prepare()
    file = open(path)
    read_about(file)
    plan, extra = make_plan(file, things, opts.strict ~= false), extra_of(file)
    return tostring(C.ddp_file_digest(file.f))
  end
  if opts.collective ~= false and C.ddp_world_size() > 1 then
    local ok, result = pcall(prepare)
    local all = agree("load", ok and { digest = result } or { error = tostring(result) })
    for r, theirs in ipairs(all) do
      if theirs.digest ~= all[1].digest then fail(("load: %s on rank %d is not the file that rank 0 has"):format(path, r - 1)) end
    end
  else prepare() end
  carry_out(plan, file)
  close(file)
  C.ddp_stats_pause()
  return extra, { missing_keys = plan.missing, unexpected_keys = plan.unexpected }
end

return M
