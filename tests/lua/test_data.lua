-- test_data.lua -- data sets, samplers and loaders as scripts use them.
local ffi = require "ffi"
local t = require "harness"
local ddp = require "ddp"
local data = ddp.data

local function rows(n, width)
  local x, y = {}, {}
  for i = 1, n do
    x[i], y[i] = {}, i - 1
    for k = 1, width do x[i][k] = (i - 1) * width + k end
  end
  return ddp.tensor(x), ddp.tensor(y, { dtype = "i64" })
end

-- All of one epoch: the values of y in order.
local function labels(loader)
  local list = {}
  for _, y in loader:iter() do
    for _, v in ipairs(y:tolist()) do list[#list + 1] = v end
  end
  return list
end
local function sorted(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end
local function range(n)
  local list = {}
  for i = 1, n do list[i] = i - 1 end
  return list
end
local function take(loader, n)
  local x, y
  local step = loader:iter()
  for _ = 1, n or 1 do x, y = step() end
  return x, y
end

-- ---- sets ---------------------------------------------------------------------------------------------------------------

t.test("digits come with the library, as images in [0, 1]", function()
  local train, test = data.digits { train = true }, data.digits { train = false }
  t.eq({ train:len(), test:len() }, { 1437, 360 })
  local x, y = take(data.DataLoader(train, { batch_size = 64 }))
  t.eq(x:size(), { 64, 1, 8, 8 })
  t.eq({ x:dtype(), y:dtype() }, { "f32", "i64" })
  t.eq(y:size(), { 64 })
  t.eq(x:max():item(), 1)
  t.fails(function() data.digits { trian = true } end, "did you mean \"train\"?")
end)

t.test("cifar10 names the folder that lacks its files, at the user's line", function()
  local text = t.fails(function() data.cifar10("/nonexistent") end, "/nonexistent")
  t.ok(text:find("test_data.lua:", 1, true), text)
end)

t.test("tensors gives rows; without y there is x alone", function()
  local x, y = rows(5, 3)
  local list = {}
  for a, b in data.DataLoader(data.tensors(x, y), { batch_size = 2 }):iter() do list[#list + 1] = { a:tolist(), b:tolist() } end
  t.eq(list[1], { { { 1, 2, 3 }, { 4, 5, 6 } }, { 0, 1 } })
  t.eq(list[3], { { { 13, 14, 15 } }, { 4 } })
  local count = 0
  for a, b in data.DataLoader(data.tensors(x), { batch_size = 5 }):iter() do
    t.ok(b == nil)
    count = count + a:size(1)
  end
  t.eq(count, 5)
  t.fails(function() data.tensors(x, ddp.zeros(4)) end, "[5,3]")
  t.fails(function() data.tensors { 1, 2 } end, "expected a tensor")
end)

t.test("subset and random_split", function()
  local x, y = rows(10, 2)
  local set = data.tensors(x, y)
  t.eq(labels(data.DataLoader(data.subset(set, { 10, 1, 3 }), { batch_size = 2 })), { 9, 0, 2 })
  t.fails(function() data.subset(set, { 0 }) end, "count from 1")
  t.fails(function() data.subset(set, { 11 }) end, "10 samples")
  local parts = data.random_split(set, { .7, .3 }, { seed = 1 })
  t.eq({ parts[1]:len(), parts[2]:len() }, { 7, 3 })
  local all = labels(data.DataLoader(parts[1]))
  local again = labels(data.DataLoader(data.random_split(set, { 7, 3 }, { seed = 1 })[1]))
  t.eq(all, again)
  for _, v in ipairs(labels(data.DataLoader(parts[2]))) do all[#all + 1] = v end
  t.eq(sorted(all), range(10))
  t.fails(function() data.random_split(set, { .7, .2 }) end, "add up to 0.9")
  t.fails(function() data.random_split(set, { 7, 2 }) end, "add up to 9")
end)

t.test("from: the function counts from 1; whole numbers collate to i64, others to f32", function()
  for workers = 0, 2, 2 do
    local x, y = take(data.DataLoader(data.from(4, function(i) return i, i / 2 end), { batch_size = 4, workers = workers }))
    t.eq({ x:tolist(), y:tolist() }, { { 1, 2, 3, 4 }, { .5, 1, 1.5, 2 } })
    t.eq({ x:dtype(), y:dtype() }, { "i64", "f32" })
  end
  local x, y = take(data.DataLoader(data.from(2, function(i) return { i, i }, i > 0 end, { types = { "f64", "f32" } }), { batch_size = 2 }))
  t.eq({ x:dtype(), y:dtype() }, { "f64", "f32" })
  t.eq(x:tolist(), { { 1, 1 }, { 2, 2 } })
  t.fails(function() data.from(2, function() return 1 end, { types = { "float" } }) end, "no dtype \"float\"")
end)

t.test("from: tensors of other sizes in a batch are told", function()
  local loader = data.DataLoader(data.from(3, function(i) return require("ddp").zeros(i) end), { batch_size = 3 })
  t.fails(function() take(loader) end, "index 2: collate: x of this sample is [2], of the batch's first [1]")
end)

-- ---- what travels to workers -----------------------------------------------------------------------------------------------

local F = ddp.nn.functional

t.test("upvalues travel: numbers, texts, tables, tensors, functions, modules", function()
  local scale, name, flag, nothing = 3, "a\0b\n\r\"\\", true, nil
  local cfg = { 10, deep = { k = { 5 } } }
  cfg.self = cfg
  local shared = ddp.tensor { 1, 2 }
  local floor = math.floor
  local function twice(v) return 2 * v end
  local function count(n) if n == 0 then return 0 end return 1 + count(n - 1) end
  local function fn(i)
    assert(name == "a\0b\n\r\"\\" and flag == true and nothing == nil, "texts")
    assert(cfg.self == cfg and cfg[1] == 10 and cfg.deep.k[1] == 5, "tables")
    assert(ffi.sizeof "int64_t" == 8 and floor(2.5) == 2, "modules")
    return ddp.tensor { twice(i) * scale, count(4) } + F.relu(shared), i
  end
  for workers = 0, 2, 2 do
    local x = take(data.DataLoader(data.from(2, fn), { batch_size = 2, workers = workers }))
    t.eq(x:tolist(), { { 7, 6 }, { 13, 6 } })
  end
  shared:mul_(10) -- the same bytes, not a copy
  t.eq(take(data.DataLoader(data.from(2, fn), { batch_size = 2, workers = 1 })):tolist(), { { 16, 24 }, { 22, 24 } })
end)

t.test("other upvalues are errors that name them, when the set is made", function()
  local file, thing, box = io.stdout, setmetatable({}, {}), { inner = { io.stdout } }
  local number = ffi.new "int64_t"
  local routine = coroutine.create(function() end)
  local function uses_thing() return thing end
  local text = t.fails(function() data.from(2, function(i) return file, i end) end, "\"file\" is a userdata")
  t.ok(text:find("test_data.lua:", 1, true), text)
  t.fails(function() data.from(2, function(i) return uses_thing(i) end) end, "\"uses_thing > thing\" is a table with a metatable")
  t.fails(function() data.from(2, function() return box end) end, "\"box.inner[1]\" is a userdata")
  t.fails(function() data.from(2, function() return number end) end, "\"number\" is a cdata")
  t.fails(function() data.from(2, function() return routine end) end, "\"routine\" is a thread")
  t.fails(function() data.from(2, 5) end, "expected a function")
  t.fails(function() data.DataLoader(data.from(2, tostring), { transform = { fn = function() return file end } }) end, "transform.fn: upvalue \"file\"")
end)

t.test("a global that is not there in a worker is named", function()
  rawset(_G, "of_the_script", 1)
  local loader = data.DataLoader(data.from(2, function(i) return i + of_the_script end)) -- luacheck: ignore
  t.fails(function() take(loader) end, "global \"of_the_script\" is not there in a worker")
end)

t.test("an error in a function names rank, worker, epoch, index and the Lua line", function()
  local set = data.from(10, function(i) if i == 7 then error "seven" end return i, i end)
  for workers = 0, 1 do
    local loader = data.DataLoader(set, { batch_size = 5, workers = workers })
    local text = t.fails(function() labels(loader) end, ("rank 0, worker %d, epoch 0, index 7: "):format(workers))
    t.ok(text:find "test_data.lua:%d+: seven", text)
  end
  local loader = data.DataLoader(set, { batch_size = 5, workers = 2, on_error = "skip" })
  t.eq(labels(loader), { 1, 2, 3, 4, 5, 6, 8, 9, 10 })
  t.eq(loader:skipped(), 1)
end)

t.test("a function by the names of its module", function()
  package.path = package.path .. ";/tmp/?.lua"
  local f = assert(io.open("/tmp/ddp_test_reader.lua", "w"))
  f:write "return { read = function(i) return i * i end }"
  f:close()
  t.eq(take(data.DataLoader(data.from(3, "ddp_test_reader.read"), { batch_size = 3 })):tolist(), { 1, 4, 9 })
  t.eq(take(data.DataLoader(data.from(3, { "ddp_test_reader", "read" }), { batch_size = 3, workers = 1 })):tolist(), { 1, 4, 9 })
  os.remove "/tmp/ddp_test_reader.lua"
end)

-- ---- transforms -------------------------------------------------------------------------------------------------------------

t.test("transform.fn changes samples; its random numbers do not depend on workers", function()
  local set = data.digits { train = false }
  local function run(workers, fn)
    local loader = data.DataLoader(set, { batch_size = 50, workers = workers, shuffle = true, seed = 3,
      transform = { random_crop = { 8, padding = 1 }, flip = true, normalize = { mean = { .5 }, std = { .5 } }, fn = fn } })
    local sum, ys = {}, {}
    for _ = 1, 2 do
      for x, y in loader:iter() do
        sum[#sum + 1] = x:sum():item()
        ys[#ys + 1] = y:sum():item()
      end
    end
    loader:close()
    return sum, ys
  end
  local function noisy(x, y, rng)
    local k = rng:integer(1, 3)
    assert(k >= 1 and k <= 3 and x:size(1) == 1 and x:size(2) == 8 and y:dim() == 0)
    return x * rng:uniform() + ddp.randn(1, 8, 8), y * k
  end
  local sum, ys = run(0, noisy)
  local plain_sum, plain_ys = run(0)
  t.ok(sum[1] ~= plain_sum[1] and ys[1] ~= plain_ys[1])
  t.ok(sum[1] ~= sum[9] and plain_sum[1] ~= plain_sum[9], "epochs differ")
  for workers = 1, 4, 3 do
    local s, y = run(workers, noisy)
    t.eq(s, sum)
    t.eq(y, ys)
  end
end)

t.test("transform.fn that returns x alone keeps y", function()
  local x, y = rows(4, 2)
  local loader = data.DataLoader(data.tensors(x, y), { batch_size = 4, transform = { fn = function(a) return a:mul(2) end } })
  local a, b = take(loader)
  t.eq({ a:tolist(), b:tolist() }, { { { 2, 4 }, { 6, 8 }, { 10, 12 }, { 14, 16 } }, { 0, 1, 2, 3 } })
end)

t.test("options of transforms are checked", function()
  local set = data.digits()
  local function loader(transform) return function() data.DataLoader(set, { transform = transform }) end end
  t.fails(loader { flipp = true }, "did you mean \"flip\"?")
  t.fails(loader { random_crop = { 32 } }, "a window of 32x32 from images of 8x8")
  t.fails(loader { random_crop = { 8, paddin = 1 } }, "did you mean \"padding\"?")
  t.fails(loader { normalize = { mean = { 1, 2 }, std = { 1, 2 } } }, "2 means for images of 1 channels")
  t.fails(loader { normalize = { mean = { 1 }, std = { 0 } } }, "std[0] is 0")
  t.fails(loader { normalize = { mean = { 1 } } }, "normalize: std")
end)

t.test("collate puts samples together in the script", function()
  local loader = data.DataLoader(data.from(5, function(i) return ddp.full({ i }, i), i end), { batch_size = 2, workers = 2,
    collate = function(batch)
      local sizes = {}
      for k, s in ipairs(batch) do sizes[k] = s[1]:size(1) end
      return sizes, #batch
    end })
  local got = {}
  for sizes, n in loader:iter() do got[#got + 1] = { sizes, n } end
  t.eq(got, { { { 1, 2 }, 2 }, { { 3, 4 }, 2 }, { { 5 }, 1 } })
  t.eq(loader:len(), 3)
end)

-- ---- loaders ---------------------------------------------------------------------------------------------------------------------

t.test("options of loaders are checked", function()
  local set = data.digits()
  t.fails(function() data.DataLoader(set, { batchsize = 4 }) end, "did you mean \"batch_size\"?")
  t.fails(function() data.DataLoader(set, { batch_size = 0 }) end, "batch_size")
  t.fails(function() data.DataLoader(set, { workers = 1.5 }) end, "workers")
  t.fails(function() data.DataLoader(set, { on_error = "ignore" }) end, "\"fail\" or \"skip\"")
  t.fails(function() data.DataLoader({}, {}) end, "expected a data set")
  t.fails(function() data.DataLoader(set, { sampler = data.DistributedSampler(set), shuffle = true }) end, "shuffle is the sampler's")
  t.fails(function() data.DataLoader(set, { sampler = data.DistributedSampler(data.subset(set, { 1 })) }) end, "the sampler is over 1 samples")
  t.fails(function() data.DistributedSampler(set, { shufle = true }) end, "did you mean \"shuffle\"?")
end)

t.test("the order changes each epoch and epoch() counts", function()
  local x, y = rows(50, 1)
  local loader = data.DataLoader(data.tensors(x, y), { batch_size = 8, shuffle = true, workers = 1 })
  t.eq({ loader:len(), loader:epoch() }, { 7, 0 })
  local a, b = labels(loader), labels(loader)
  t.eq(loader:epoch(), 2)
  t.eq(sorted(a), range(50))
  t.eq(sorted(b), range(50))
  t.ok(table.concat(a, ",") ~= table.concat(b, ","))
end)

t.test("manual_seed rules the order, a seed of the loader wins", function()
  local x, y = rows(50, 1)
  local function order(seed, opts)
    ddp.manual_seed(seed)
    opts = opts or {}
    opts.shuffle = true
    return table.concat(labels(data.DataLoader(data.tensors(x, y), opts)), ",")
  end
  t.eq(order(1), order(1))
  t.ok(order(1) ~= order(2))
  t.eq(order(1, { seed = 5 }), order(2, { seed = 5 }))
end)

t.test("a sampler shares out; uneven sets without shuffle lose and repeat nothing", function()
  local x, y = rows(7, 1)
  local set = data.tensors(x, y)
  local all, lens = {}, {}
  for rank = 0, 2 do
    local sampler = data.DistributedSampler(set, { shuffle = false, rank = rank, num_replicas = 3 })
    lens[#lens + 1] = sampler:len()
    for _, v in ipairs(labels(data.DataLoader(set, { batch_size = 2, sampler = sampler }))) do all[#all + 1] = v end
  end
  t.eq(lens, { 3, 2, 2 })
  t.eq(sorted(all), range(7))
  local one = data.subset(set, { 1 })
  t.eq(labels(data.DataLoader(one, { sampler = data.DistributedSampler(one, { shuffle = false, rank = 1, num_replicas = 2 }) })), {})
  for _, drop in ipairs { false, true } do
    local n = 0
    for rank = 0, 2 do n = n + #labels(data.DataLoader(set, { sampler = data.DistributedSampler(set, { drop_last = drop, rank = rank, num_replicas = 3 }) })) end
    t.eq(n, drop and 6 or 9)
  end
end)

t.test("a sampler's set_epoch chooses the next epoch", function()
  local x, y = rows(30, 1)
  local set = data.tensors(x, y)
  local sampler = data.DistributedSampler(set, { seed = 2 })
  local loader = data.DataLoader(set, { sampler = sampler })
  labels(loader)
  local second = labels(loader)
  sampler:set_epoch(1)
  t.eq(labels(loader), second)
end)

t.test("state_dict: a loop goes on in another loader", function()
  local set = data.digits()
  local function make() return data.DataLoader(set, { batch_size = 100, shuffle = true, seed = 1, workers = 2, transform = { flip = true } }) end
  local a, b = make(), make()
  labels(a)
  take(a, 4)
  local state = a:state_dict()
  t.eq(state, { epoch = 1, batch = 4 })
  b:load_state_dict(state)
  local rest = {}
  for x in b:iter() do rest[#rest + 1] = x:sum():item() end
  local whole = {}
  a:load_state_dict { epoch = 1, batch = 0 }
  for x in a:iter() do whole[#whole + 1] = x:sum():item() end
  t.eq(rest, { unpack(whole, 5) })
  t.eq(b:state_dict(), { epoch = 2, batch = 0 })
  t.fails(function() b:load_state_dict { epoch = 1, bach = 2 } end, "did you mean \"batch\"?")
end)

t.test("loops that are left leave no thread; a second loop ends the first", function()
  local loader = data.DataLoader(data.digits(), { batch_size = 32, shuffle = true, workers = 3 })
  for _ = 1, 1000 do
    for x in loader:iter() do -- luacheck: ignore 512
      t.eq(x:size(1), 32)
      break
    end
  end
  local first = loader:iter()
  first()
  loader:iter()()
  t.fails(first, "this loop is over")
  loader:close()
  loader:close()
  t.fails(function() loader:iter() end, "it is closed")
end)

t.test("the last batch and the end of a loop are announced, a break is not", function()
  local last, ended = {}, 0
  local before = data.on_loop
  data.on_loop = function()
    return { batch = function(_, is_last) last[#last + 1] = is_last end, finish = function() ended = ended + 1 end }
  end
  local set = data.subset(data.digits(), (function() local ids = {} for i = 1, 5 do ids[i] = i end return ids end)())
  local loader = data.DataLoader(set, { batch_size = 2 })
  for _ in loader:iter() do break end -- luacheck: ignore 512
  t.eq(ended, 0)
  last = {}
  for _ in loader:iter() do ended = ended + 0 end
  t.eq(ended, 1)
  t.eq(last, { false, false, true })
  for _, case in ipairs { { { drop_last = true }, { false, true } }, { { workers = 2 }, { false, false, true } },
    { { collate = function(b) return b end }, { false, false, true } }, { { collate = function(b) return b end, drop_last = true }, { false, true } },
    { { on_error = "skip" }, { false, false, false } } } do
    last = {}
    case[1].batch_size = 2
    for _ in data.DataLoader(set, case[1]):iter() do ended = ended + 0 end
    t.eq(last, case[2])
  end
  data.on_loop = before
end)

t.test("loaders are collected, with their states and threads", function()
  local function threads()
    local n, f = 0, io.popen "ls /proc/$PPID/task"
    for _ in f:lines() do n = n + 1 end
    f:close()
    return n
  end
  collectgarbage()
  local before = threads()
  for _ = 1, 5 do take(data.DataLoader(data.from(8, function(i) return i end), { workers = 2 })) end
  collectgarbage()
  collectgarbage()
  t.ok(threads() <= before, "threads are left")
end)

t.done()
