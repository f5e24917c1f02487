-- plain.lua -- plain values (nil, booleans, numbers, strings, tables of them) to text and back, for objects between ranks.
local base = require "ddp.ffi"

local M = {}

local function write(v, out, what)
  local t = type(v)
  if v == nil then out[#out + 1] = "nil"
  elseif t == "boolean" then out[#out + 1] = tostring(v)
  elseif t == "number" then
    out[#out + 1] = v ~= v and "0/0" or v == math.huge and "1/0" or v == -math.huge and "-1/0" or ("%.17g"):format(v)
  elseif t == "string" then out[#out + 1] = ("%q"):format(v)
  elseif t == "table" then
    out[#out + 1] = "{"
    local keys = {}
    for k in pairs(v) do keys[#keys + 1] = k end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    for _, k in ipairs(keys) do
      out[#out + 1] = "["
      write(k, out, what)
      out[#out + 1] = "]="
      write(v[k], out, what)
      out[#out + 1] = ","
    end
    out[#out + 1] = "}"
  else base.error(("%s: a %s does not travel between ranks; numbers, strings, booleans and tables of them do"):format(what, t)) end
end

function M.encode(v, what)
  local out = {}
  write(v, out, what)
  return table.concat(out)
end

function M.decode(text)
  local f = loadstring("return " .. text)
  return setfenv(f, {})()
end

-- JSON of a plain value; arrays are tables with a first element or marked {_array = true}.
function M.json(v)
  local t = type(v)
  if t == "number" then return (v ~= v or v == math.huge or v == -math.huge) and "null" or ("%.10g"):format(v) end
  if t == "string" then
    return '"' .. v:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
  end
  if t ~= "table" then return tostring(v) end
  local parts = {}
  if v[1] ~= nil then
    for i, x in ipairs(v) do parts[i] = M.json(x) end
    return "[" .. table.concat(parts, ", ") .. "]"
  end
  local keys = {}
  for k in pairs(v) do keys[#keys + 1] = k end
  table.sort(keys)
  for i, k in ipairs(keys) do parts[i] = ("%s: %s"):format(M.json(k), M.json(v[k])) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

return M
