-- test_ops.lua -- every op of the list through every check of the harness. A case is one check of one op over all its samples.
local t = require "harness"
local checks = require "op_checks"
local ops = require "ddp.ops"
local signatures = require "ddp.ops_sig"
local samples = require "samples"
local ddp = require "ddp"

-- Ops without a gradient, by nature; those of the list flagged so.
local NO_GRAD = {}
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "argmax", "full", "arange", "eye", "rand", "randn", "randint", "randperm", "uniform_", "normal_",
  "bernoulli_", "sgd_step", "adam_step", "grad_unscale_", "grad_clip_", "grad_norm", "all_gather", "reduce_scatter", "all_reduce_", "broadcast_" } do NO_GRAD[name] = true end

-- Elementwise: the samples' scalar function over broadcast flat elements.
local function elementwise(value)
  return function(...)
    local args, wide = { ... }, nil
    local function grown(a)
      if not ddp.is_tensor(a) then return a end
      return a:to "f64"
    end
    for i = 1, #args do
      args[i] = grown(args[i])
      if ddp.is_tensor(args[i]) then
        local z = args[i] * 0
        wide = wide and wide + z or z
      end
    end
    local n, flat, out = wide:numel(), {}, {}
    for i = 1, #args do flat[i] = ddp.is_tensor(args[i]) and (args[i] + wide):contiguous():reshape(n):tolist() or args[i] end
    for k = 1, n do
      local a = {}
      for i = 1, #args do a[i] = type(flat[i]) == "table" and flat[i][k] or flat[i] end
      out[k] = value(unpack(a))
    end
    return out
  end
end

local function each(entry, fn) for _, s in ipairs(entry.samples) do fn(s) end end

-- An op that writes into its lists gives them back too, so that what it wrote is compared.
local function callable(name, entry)
  local f = ops[name]
  if not entry.returns_first then return f end
  return function(...)
    local args = { ... }
    local result = f(...)
    local out = { ddp.is_tensor(result) and result or nil }
    for _, a in ipairs(args) do if type(a) == "table" then for _, x in ipairs(a) do out[#out + 1] = x end end end
    return unpack(out)
  end
end

-- f16 and bf16: the usual kernels and the reference, values that are not finite, layouts, in place, gradients.
local function halves(name, entry, op)
  local list = { false, "ref" }
  if #signatures[name].inputs == 0 then return end
  for _, dtype in ipairs { "f16", "bf16" } do
    local of = name .. " in " .. dtype .. ": "
    t.test(of .. "one rounding from f64", function()
      each(entry, function(s) for _, l in ipairs(list) do checks.half_against_reference(op, op, s, dtype, l or nil) end end)
    end)
    t.test(of .. "NaN and infinity as in f64", function()
      each(entry, function(s)
        for _, l in ipairs(list) do
          for _, with in ipairs { "nan", "inf" } do checks.half_against_reference(op, op, s, dtype, l or nil, with) end
        end
      end)
    end)
    if not entry.keeps_layout then
      t.test(of .. "layouts agree", function() each(entry, function(s) checks.layouts_agree(op, s, nil, dtype) end) end)
    end
    if signatures[name].in_place then
      t.test(of .. "in place equals out of place", function() each(entry, function(s) checks.in_place_agrees(op, ops[name .. "_"], s, dtype) end) end)
    end
    if not NO_GRAD[name] then
      t.test(of .. "gradients", function() each(entry, function(s) if not s.no_grad then checks.half_gradients(op, s, dtype) end end) end)
    end
  end
end

local names, wanted = {}, os.getenv "DDP_TEST_OPS" -- "add,sum": these alone
for name in pairs(signatures) do
  if not wanted or ("," .. wanted .. ","):find("," .. name .. ",", 1, true) then names[#names + 1] = name end
end
table.sort(names)

for _, name in ipairs(names) do
  local entry = samples[name]
  t.test(name .. " has samples", function() t.ok(entry and #entry.samples > 0, "none in tests/ops/samples.lua") end)
  if entry then
    local op = callable(name, entry)
    t.test(name .. ": the usual kernels agree with reference kernels in f64", function()
      each(entry, function(s) checks.against_reference(op, op, s) end)
    end)
    t.test(name .. ": reference kernels in f32 agree with f64", function() each(entry, function(s) if not s.draws then checks.against_reference(op, op, s, "ref") end end) end)
    if entry.value then
      t.test(name .. ": equals plain arithmetic", function() each(entry, function(s) checks.against_value(op, s, elementwise(entry.value)) end) end)
    end
    each(entry, function(s) if s.list_value then t.test(name .. ": equals plain loops", function() checks.against_value(op, s, s.list_value) end) end end)
    t.test(name .. ": twice the same", function() each(entry, function(s) checks.twice_the_same(op, s) end) end)
    if #signatures[name].inputs > 0 and not entry.keeps_layout then
      t.test(name .. ": layouts agree", function() each(entry, function(s) checks.layouts_agree(op, s) end) end)
    end
    if not entry.no_half then halves(name, entry, op) end
    if signatures[name].in_place then
      t.test(name .. ": in place equals out of place", function() each(entry, function(s) checks.in_place_agrees(op, ops[name .. "_"], s) end) end)
    end
    if not NO_GRAD[name] then
      t.test(name .. ": gradients equal differences", function() each(entry, function(s) if not s.no_grad then checks.gradients(op, s) end end) end)
      t.test(name .. ": second gradients equal differences", function() each(entry, function(s) if not s.no_grad then checks.second_gradients(op, s) end end) end)
    end
    for i, s in ipairs(entry.fail) do
      t.test(("%s: refuses bad input %d (%s)"):format(name, i, s.text), function() checks.must_fail(ops[name], s) end)
    end
  end
end
t.done()
