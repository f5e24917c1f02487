-- args.lua -- a script's options from the command line; their types come from the defaults.
local base = require "ddp.ffi"

local function usage(defaults, choices)
  local names = {}
  for name in pairs(defaults) do names[#names + 1] = name end
  table.sort(names)
  local lines = { "options of " .. (arg and arg[0] or "this script") .. ":" }
  for _, name in ipairs(names) do
    local d = defaults[name]
    lines[#lines + 1] = ("  --%-14s %s"):format(name, choices[name] and table.concat(choices[name], "|") .. " (default " .. tostring(d) .. ")"
      or type(d) == "boolean" and "flag" or "default " .. (d == "" and "none" or tostring(d)))
  end
  return table.concat(lines, "\n")
end

-- One clear sentence and status 2, on every rank alike; only rank 0 speaks.
local function refuse(text)
  if base.C.ddp_rank() == 0 then io.stderr:write(text, "\n") end
  os.exit(2, true)
end

-- ddp.args{lr = .1, epochs = 30, resume = "", amp = false}; a second table gives allowed words by name.
return function(defaults, choices)
  choices = choices or {}
  local out, known = {}, {}
  for name, d in pairs(defaults) do
    out[name] = d
    known[#known + 1] = name
  end
  local argv, i = arg or {}, 1
  while argv[i] do
    local word = argv[i]
    if word == "--help" or word == "-h" then
      if base.C.ddp_rank() == 0 then print(usage(defaults, choices)) end
      os.exit(0, true)
    end
    local name, value = word:match "^%-%-([%w_-]+)=?(.*)$"
    if not name then refuse(("unexpected argument \"%s\"; options begin with --"):format(word)) end
    name = name:gsub("-", "_")
    local d = defaults[name]
    if d == nil then
      local near = base.suggest(name, known)
      refuse(("no option --%s%s; --help lists them"):format(name, near and ", did you mean --" .. near .. "?" or ""))
    end
    local inline = word:find "=" ~= nil
    if type(d) == "boolean" and not inline then value = "true"
    elseif not inline then
      i = i + 1
      value = argv[i]
      if value == nil then refuse(("--%s: a value is missing"):format(name)) end
    end
    if type(d) == "number" then
      out[name] = tonumber(value)
      if not out[name] then refuse(("--%s is \"%s\", expected a number"):format(name, value)) end
    elseif type(d) == "boolean" then
      if value ~= "true" and value ~= "false" then refuse(("--%s is \"%s\", expected true or false"):format(name, value)) end
      out[name] = value == "true"
    else
      out[name] = value
    end
    if choices[name] then
      local found = false
      for _, c in ipairs(choices[name]) do found = found or c == value end
      if not found then refuse(("--%s is \"%s\", expected %s"):format(name, value, table.concat(choices[name], ", "))) end
    end
    i = i + 1
  end
  return out
end
