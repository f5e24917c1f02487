-- Saving and loading in one process: what comes back, what is refused, what a file looks like (K3, K4).
local t = require "harness"
local ffi = require "ffi"
local ddp = require "ddp"
local nn, F = ddp.nn, ddp.nn.functional

local path = os.tmpname()
local function read_file(name)
  local f = assert(io.open(name, "rb"))
  local text = f:read "*a"
  f:close()
  return text
end
local function write_file(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end
local function u64(n)
  local out = {}
  for i = 1, 8 do out[i], n = string.char(n % 256), math.floor(n / 256) end
  return table.concat(out)
end
local function header_of(name)
  local text, n = read_file(name), 0
  for i = 8, 1, -1 do n = n * 256 + text:byte(i) end
  return text:sub(9, 8 + n), text:sub(9 + n)
end
local function net() return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)) end

local function train(model, opt, steps)
  for _ = 1, steps do
    opt:zero_grad()
    F.cross_entropy(model(ddp.randn(5, 1, 4, 4)), ddp.randint(0, 3, { 5 })):backward()
    opt:step()
  end
end
local function same(a, b)
  local want = b:state_dict()
  for name, p in ddp.sorted(a:state_dict()) do t.ok(p:equal(want[name]), name .. " differs") end
end

t.test("K3 a model's file has its plain names, row-major bytes and nothing else", function()
  local model = nn.Linear(3, 2)
  ddp.save(path, { model = model })
  local header, data = header_of(path)
  for _, part in ipairs { '"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', '"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]}' } do
    t.ok(header:find(part, 1, true), "no " .. part .. " in " .. header)
  end
  t.eq((#header + 8) % 8, 0, "the data is not aligned")
  t.eq(data, ffi.string(model.bias:data(), 8) .. ffi.string(model.weight:data(), 24))
end)

t.test("ddp.load of a file alone gives every tensor by name, and what extra held", function()
  local model = net()
  local extra = { epoch = 3, best = math.huge, note = "ünï \"x\"\n\0", losses = { 1.5, 0.1 + 0.2, -0 }, sparse = { [51] = 1, [52] = 2 }, deep = { a = { b = { true, false } } },
    ["#1"] = "text", empty = {}, ["1"] = "one", [1] = "number" }
  ddp.save(path, { model = model, extra = extra })
  local all, got = ddp.load(path)
  t.eq(got, extra)
  t.eq(got.losses[2], 0.1 + 0.2, "a number lost bits")
  for name, p in ddp.sorted(model:state_dict()) do t.ok(all[name]:equal(p), name) end
  local n = 0
  for _ in pairs(all) do n = n + 1 end
  t.eq(n, 9)
  ddp.no_grad(function() all["0.weight"]:fill_(7) end)
  t.ok(ddp.load(path)["0.weight"]:equal(model[1].weight), "a write to a loaded tensor reached the file")
  local nan = { v = 0 / 0 }
  ddp.save(path, { extra = nan })
  local _, back = ddp.load(path)
  t.ok(back.v ~= back.v, "NaN comes back")
end)

t.test("tensors keep their values whatever their layout and dtype", function()
  local x = ddp.randn(2, 3, 4, 5)
  local things = { laid = x:permute(1, 3, 4, 2), half = x:to "f16", b16 = x:to "bf16", double = x:to "f64", long = ddp.arange(5), flag = x:gt(0), scalar = ddp.tensor(3),
    none = ddp.zeros(0, 3), group = { a = ddp.ones(2), b = x:transpose(1, 4) } }
  ddp.save(path, things)
  local all = ddp.load(path)
  for name, v in pairs(things) do
    if name ~= "group" then
      t.eq(all[name]:dtype(), v:dtype())
      t.eq(all[name]:size(), v:size())
      t.ok(all[name]:equal(v), name)
    end
  end
  t.ok(all["group.b"]:equal(things.group.b))
  local into = { laid = ddp.zeros(2, 4, 5, 3), group = { a = ddp.zeros(2), b = ddp.zeros(2, 3, 4, 5):transpose(1, 4) } }
  ddp.load(path, into)
  t.ok(into.laid:equal(things.laid) and into.group.b:equal(things.group.b))
end)

-- A run that stops after `steps` and goes on in other objects.
local function resumes(make_optimizer, things_of)
  local function fresh()
    local model = net()
    local r = { model = model, optimizer = make_optimizer(model) }
    for name, x in pairs(things_of and things_of(r) or {}) do r[name] = x end
    return r
  end
  ddp.manual_seed(3)
  local a = fresh()
  train(a.model, a.optimizer, 3)
  ddp.save(path, a)
  train(a.model, a.optimizer, 3)
  local draw = ddp.rand(1):item()
  ddp.manual_seed(77)
  local b = fresh()
  train(b.model, b.optimizer, 1)
  ddp.load(path, b)
  train(b.model, b.optimizer, 3)
  same(b.model, a.model)
  t.eq(ddp.rand(1):item(), draw, "other random numbers")
  return a, b
end

t.test("K2 SGD with momentum goes on bit for bit", function()
  resumes(function(m) return ddp.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9, nesterov = true }) end)
end)
t.test("K2 AdamW in two groups goes on bit for bit", function()
  resumes(function(m)
    local p = m:parameters()
    return ddp.optim.AdamW({ { params = { p[1], p[2] }, lr = 0.01, betas = { 0.8, 0.99 } }, { params = { p[3], p[4], p[5], p[6] } } }, { weight_decay = 0.1 })
  end)
end)
t.test("K2 a schedule, a scaler and a generator go on where they were", function()
  local g = { ddp.generator(5), ddp.generator(6) }
  local n = 0
  local a, b = resumes(function(m) return ddp.optim.SGD(m:parameters(), { lr = 0.1 }) end, function(r)
    n = n + 1
    local s = ddp.optim.schedule.cosine { optimizer = r.optimizer, steps = 100 }
    for _ = 1, n do s:step() end
    ddp.rand(n, { generator = g[n] })
    return { schedule = s, scaler = ddp.amp.GradScaler { init_scale = n * 1024 }, generator = g[n] }
  end)
  t.eq(b.schedule:get_last_lr(), a.schedule:get_last_lr())
  t.eq(b.optimizer.param_groups[1].lr, a.optimizer.param_groups[1].lr)
  t.eq(b.scaler:get_scale(), 1024)
  t.eq(ddp.rand(3, { generator = b.generator }):tolist(), ddp.rand(3, { generator = a.generator }):tolist())
end)

t.test("D1 a loader that is loaded goes on in the middle of an epoch, in the same order", function()
  local set = ddp.data.tensors(ddp.arange(40))
  local function make() return ddp.data.DataLoader(set, { batch_size = 4, workers = 2, shuffle = true, seed = 9 }) end
  local function take(loader, n)
    local out = {}
    while #out < n do
      for x in loader:iter() do
        out[#out + 1] = x:tolist()
        if #out == n then break end
      end
    end
    return out
  end
  local a, seen = make(), nil
  for _ = 1, 2 do for _ in a:iter() do seen = true end end
  local i = 0
  for _ in a:iter() do
    i = i + 1
    if i == 3 then
      ddp.save(path, { loader = a })
      break
    end
  end
  local whole = make()
  local all = take(whole, 40)
  local b = make()
  ddp.load(path, { loader = b })
  t.ok(seen)
  t.eq(b:epoch(), 2)
  local rest = {}
  for x in b:iter() do rest[#rest + 1] = x:tolist() end
  t.eq(#rest, 7)
  for k = 1, 7 do t.eq(rest[k], all[23 + k]) end
  for _, l in ipairs { a, b, whole } do l:close() end
end)

t.test("a wrapped model and a plain one have the same file, and a model may be loaded without the rest", function()
  local model = net()
  local wrapped = ddp.DistributedDataParallel(model)
  local opt = ddp.optim.SGD(wrapped:parameters(), { lr = 0.1, momentum = 0.9 })
  train(wrapped, opt, 2)
  ddp.save(path, { model = model })
  local plain = read_file(path)
  ddp.save(path, { model = wrapped })
  t.eq(read_file(path), plain)
  ddp.save(path, { model = wrapped, optimizer = opt, extra = { step = 2 } })
  local other = net()
  ddp.manual_seed(4)
  local extra, report = ddp.load(path, { model = other })
  t.eq(extra, { step = 2 })
  t.eq(report, { missing_keys = {}, unexpected_keys = {} })
  same(other, model)
  local draw = ddp.rand(1):item()
  ddp.manual_seed(4)
  t.eq(ddp.rand(1):item(), draw, "a model alone moved the random state")
end)

t.test("strict: missing and unexpected names are listed and nothing is changed; not strict returns them", function()
  local a = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
  ddp.save(path, { model = a, other = nn.Linear(1, 1) })
  local Half = nn.Module "Half"
  function Half:init() self[1], self.more = nn.Linear(2, 2), nn.Linear(1, 1) end
  local b = Half()
  local before = b[1].weight:clone()
  local text = t.fails(function() ddp.load(path, { model = b, gone = nn.Linear(1, 1) }) end, "unexpected: 1.bias, 1.weight")
  t.ok(text:find("missing: gone.bias, gone.weight, more.bias, more.weight", 1, true), text)
  t.ok(b[1].weight:equal(before), "a refused file changed the model")
  local _, r = ddp.load(path, { model = b }, { strict = false })
  t.eq(r, { missing_keys = { "more.bias", "more.weight" }, unexpected_keys = { "1.bias", "1.weight" } })
  t.ok(b[1].weight:equal(a[1].weight))
  local opt = ddp.optim.SGD(b:parameters(), { lr = 1 })
  t.fails(function() ddp.load(path, { optimizer = opt }) end, "missing: optimizer")
end)

t.test("what does not fit is named, and nothing is changed", function()
  local a = nn.Linear(3, 2)
  local opt = ddp.optim.SGD(a:parameters(), { lr = 0.1, momentum = 0.9 })
  opt:zero_grad()
  a(ddp.ones(1, 3)):sum():backward()
  opt:step()
  ddp.save(path, { model = a, optimizer = opt })
  t.fails(function() ddp.load(path, { model = nn.Linear(4, 2) }) end, "load: weight is [2,4] here, [2,3] in " .. path)
  local b = nn.Linear(3, 2)
  local before = b.weight:clone()
  t.fails(function() ddp.load(path, { model = b, optimizer = ddp.optim.SGD({ b.weight }, { lr = 0.1 }) }) end, "group 1 has 2 parameters in the state, 1 here")
  t.fails(function() ddp.load(path, { model = b, optimizer = ddp.optim.SGD({ b.bias, b.weight }, { lr = 0.1 }) }) end, "momentum_buffer of parameter 1 is [2,3], the parameter [2]")
  t.fails(function() ddp.load(path, { model = b, optimizer = ddp.optim.Adam(b:parameters()) }) end, "not a state of Adam")
  t.ok(b.weight:equal(before), "a refused file changed the model")
end)

t.test("what cannot be kept is refused by name", function()
  local m = nn.Linear(1, 1)
  local opt = ddp.optim.SGD(m:parameters(), { lr = 1 })
  t.fails(function() ddp.save(path, { model = m, extra = { x = { y = ddp.ones(1) } } }) end, "extra.x.y is a tensor")
  t.fails(function() ddp.save(path, { model = m, extra = { f = print } }) end, "extra.f is a function")
  t.fails(function() ddp.save(path, { extra = { s = "\255" } }) end, "extra.s: byte 1 of the text is not UTF-8")
  local loop = {}
  loop.loop = loop
  t.fails(function() ddp.save(path, { extra = loop }) end, "inside itself")
  t.fails(function() ddp.save(path, { epoch = 3 }) end, "save: epoch is a number; expected a module")
  t.fails(function() ddp.save(path, { stepper = ddp.stepper { model = m, optimizer = opt } }) end, "nothing to keep between windows")
  t.fails(function() ddp.save(path, { ranks = m }) end, "the name \"ranks\" is taken")
  t.fails(function() ddp.save(path, m) end, "save: expected a table { model =, optimizer =, ... }, got a module")
  t.fails(function() ddp.save("", { model = m }) end, "save: expected the name of a file")
  t.fails(function() ddp.save(path, { model = m }, { async = true }) end, "async is not built yet")
  t.fails(function() ddp.save(path, { model = m }, { asynk = true }) end, "did you mean \"async\"")
  local Odd = nn.Module "Odd"
  function Odd:init() self.optimizer = nn.Linear(1, 1) end
  t.fails(function() ddp.save(path, { model = Odd(), optimizer = opt }) end, "taken for a part of \"optimizer\"")
end)

t.test("files that cannot be read or written say why", function()
  local m = nn.Linear(1, 1)
  t.fails(function() ddp.load("/nowhere/x", { model = m }) end, "load: cannot open /nowhere/x: No such file or directory")
  t.fails(function() ddp.load("/tmp", { model = m }) end, "load: cannot read /tmp: Is a directory")
  t.fails(function() ddp.save("/nowhere/x", { model = m }) end, "save: cannot write /nowhere/x: No such file or directory")
  t.fails(function() ddp.save("/tmp", { model = m }) end, "save: cannot write /tmp: Is a directory")
  ddp.save(path, { model = m })
  local whole = read_file(path)
  write_file(path, whole:sub(1, -2))
  t.fails(function() ddp.load(path, { model = m }) end, "the data at 7")
  write_file(path, whole:gsub("version", "versiom"))
  t.fails(function() ddp.load(path, { model = m }) end, "its \"ddp\" is damaged")
  write_file(path, whole:gsub('\\"kinds\\":{', '\\"kinds\\":['))
  t.fails(function() ddp.load(path, { model = m }) end, "its \"ddp\": damaged at byte")
end)

t.test("K3 a file of another program is a model, its metadata extra", function()
  local header = '{"__metadata__":{"format":"pt","by":"x"},"weight":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"bias":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
  write_file(path, u64(#header) .. header .. "\0\60\0\64" .. "\0\0\128\63") -- 1, 2 in f16; 1 in f32
  local m = nn.Linear(2, 1)
  local extra = ddp.load(path, { model = m })
  t.eq(extra, { format = "pt", by = "x" })
  t.eq(m.weight:tolist(), { { 1, 2 } })
  t.eq(m.bias:tolist(), { 1 })
  local odd = '{"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"f":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}}'
  write_file(path, u64(#odd) .. odd .. "\1\2\3\0\0\128\63")
  local all = ddp.load(path)
  t.eq(all.f:tolist(), { 1 }, "a tensor at an odd place")
  local into = { model = { b = ddp.zeros({ 3 }, { dtype = "u8" }), f = ddp.zeros(1) } }
  ddp.load(path, into)
  t.eq(into.model.f:tolist(), { 1 })
end)

t.test("a link is written through, rights stay, and remains of killed writers go", function()
  local dir = os.tmpname()
  os.remove(dir)
  assert(os.execute("mkdir " .. dir) == 0)
  local m = nn.Linear(1, 1)
  ddp.save(dir .. "/a", { model = m })
  os.execute(("chmod 640 %s/a; ln -s a %s/latest; touch %s/.a.0123abcd.part %s/.a.0123abcd.part2 %s/.b.0123abcd.part"):format(dir, dir, dir, dir, dir))
  m = nn.Linear(2, 2)
  ddp.save(dir .. "/latest", { model = m })
  local list = io.popen(("cd %s && stat -c '%%n %%F %%a' a latest && ls -A"):format(dir)):read "*a"
  t.eq(list, "a regular file 640\nlatest symbolic link 777\n.a.0123abcd.part2\n.b.0123abcd.part\na\nlatest\n")
  ddp.load(dir .. "/a", { model = nn.Linear(2, 2) })
  os.execute("rm -r " .. dir)
end)

-- Megabytes of /proc/self/status.
local function memory(key)
  for line in io.lines "/proc/self/status" do
    local kb = line:match("^" .. key .. ":%s+(%d+)")
    if kb then return tonumber(kb) / 1024 end
  end
end
local function resident()
  if (os.getenv "LD_PRELOAD" or ""):find "asan" then t.skip "a sanitizer keeps memory of its own" end
  return memory "VmRSS"
end

t.test("K4 loading takes at most the model's memory and 16 MB", function()
  local MB = 64
  local model = { a = ddp.rand(MB / 2 * 2 ^ 18), b = ddp.rand(MB / 2 * 2 ^ 18) }
  ddp.save(path, { model = model })
  collectgarbage()
  local before = resident()
  ddp.load(path, { model = model })
  local peak = resident() - before
  t.ok(peak <= 16, ("into the tensors there are: %.1f MB more"):format(peak))
  model = nil -- luacheck: ignore
  collectgarbage()
  collectgarbage()
  ddp.empty_cache()
  before = resident()
  local all = ddp.load(path)
  local sum = all.a:sum():item() + all.b:sum():item()
  peak = resident() - before
  t.ok(sum > 0 and peak <= MB + 16, ("alone: %.1f MB more"):format(peak))
end)

t.test("K4 loading a model and its momentum takes the momentum's memory and at most 16 MB on the way", function()
  local function run()
    local params = {}
    for i = 1, 8 do params[i] = nn.Parameter(ddp.rand(2 ^ 20)) end
    return { optimizer = ddp.optim.SGD(params, { lr = 0.1, momentum = 0.9 }), params = params }
  end
  local function things(r)
    local named = {}
    for i, p in ipairs(r.params) do named["p" .. i] = p end
    return { model = named, optimizer = r.optimizer }
  end
  local a = run()
  for _, p in ipairs(a.params) do p.grad = p:detach() * 2 end
  a.optimizer:step()
  ddp.save(path, things(a))
  local b = run()
  collectgarbage()
  collectgarbage()
  ddp.empty_cache()
  local clear = io.open("/proc/self/clear_refs", "w")
  if not clear then t.skip "no /proc/self/clear_refs" end
  clear:write "5" -- the peak begins here
  clear:close()
  local before = resident()
  ddp.load(path, things(b))
  local grown, peak = resident() - before, memory "VmHWM" - before
  t.ok(b.params[3]:equal(a.params[3]) and b.optimizer:state_dict().state[3].momentum_buffer:equal(a.optimizer:state_dict().state[3].momentum_buffer))
  t.ok(grown <= 32 + 8 and peak <= 32 + 16, ("%.1f MB more, %.1f at the peak"):format(grown, peak))
end)

os.remove(path)
t.done()
