-- json.lua -- plain values (booleans, numbers, strings, tables of them) to JSON and back without loss. An array is a table with
-- the keys 1..n. In other tables a key that is a number stands as "#5", and a text that begins with # has one more. Infinity and
-- NaN stand as Python writes them.
local base = require "ddp.ffi"
local fail = base.error

local M = {}
local DEEPEST = 100

-- ---- writing ------------------------------------------------------------------------------------------------------------

-- Bytes of the UTF-8 character at i, nil when there is none. (C looks closer when a file is written.)
local function character(s, i)
  local n = s:match("^[%z\1-\127]()", i) or s:match("^[\194-\223][\128-\191]()", i) or s:match("^[\224-\239][\128-\191][\128-\191]()", i)
    or s:match("^[\240-\244][\128-\191][\128-\191][\128-\191]()", i)
  return n and n - i
end

local function write_string(s, out, where)
  if s:find "[\128-\255]" then
    local i = 1
    while i <= #s do
      local n = character(s, i)
      if not n then fail(("%s: byte %d of the text is not UTF-8"):format(where, i)) end
      i = i + n
    end
  end
  out[#out + 1] = '"' .. s:gsub('[%z\1-\31"\\]', function(c)
    return (c == '"' or c == "\\") and "\\" .. c or ("\\u%04x"):format(c:byte())
  end) .. '"'
end

local function is_array(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  for i = 1, n do if t[i] == nil then return false end end
  return n > 0
end

-- Keys in a fixed order: numbers, then texts.
local function keys_of(t, where)
  local keys = {}
  for k in pairs(t) do
    if type(k) ~= "string" and type(k) ~= "number" then fail(("%s: a key is a %s, expected a text or a number"):format(where, type(k))) end
    keys[#keys + 1] = k
  end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) == "number" end
    return a < b
  end)
  return keys
end

local write

local function write_table(t, out, where, depth, other)
  if depth > DEEPEST then fail(("%s: more than %d tables deep, or inside itself"):format(where, DEEPEST)) end
  if is_array(t) then
    for i, v in ipairs(t) do
      out[#out + 1] = i == 1 and "[" or ","
      write(v, out, ("%s.%d"):format(where, i), depth + 1, other)
    end
    out[#out + 1] = "]"
    return
  end
  out[#out + 1] = "{"
  for i, k in ipairs(keys_of(t, where)) do
    if i > 1 then out[#out + 1] = "," end
    write_string(type(k) == "number" and ("#%.17g"):format(k) or k:gsub("^#", "##"), out, where)
    out[#out + 1] = ":"
    write(t[k], out, where .. "." .. tostring(k), depth + 1, other)
  end
  out[#out + 1] = "}"
end

function write(v, out, where, depth, other)
  local t = type(v)
  if t == "boolean" then out[#out + 1] = tostring(v)
  elseif t == "number" then
    out[#out + 1] = v ~= v and "NaN" or v == math.huge and "Infinity" or v == -math.huge and "-Infinity" or ("%.17g"):format(v)
  elseif t == "string" then write_string(v, out, where)
  elseif t == "table" and getmetatable(v) == nil then write_table(v, out, where, depth, other)
  else
    local name = other and other(v, where)
    if not name then fail(("%s is a %s; numbers, strings, booleans and plain tables of them are kept"):format(where, base.is_tensor(v) and "tensor" or t)) end
    out[#out + 1] = '{"#tensor":'
    write_string(name, out, where)
    out[#out + 1] = "}"
  end
end

-- where: what v is, for messages. other(value, where): a name for a value of another type, which stands in its place; nil: an error.
function M.encode(v, where, other)
  local out = {}
  write(v, out, where, 0, other)
  return table.concat(out)
end

-- ---- reading ------------------------------------------------------------------------------------------------------------

local function utf8(c)
  if c < 0x80 then return string.char(c) end
  if c < 0x800 then return string.char(0xc0 + math.floor(c / 64), 0x80 + c % 64) end
  if c < 0x10000 then return string.char(0xe0 + math.floor(c / 4096), 0x80 + math.floor(c / 64) % 64, 0x80 + c % 64) end
  return string.char(0xf0 + math.floor(c / 262144), 0x80 + math.floor(c / 4096) % 64, 0x80 + math.floor(c / 64) % 64, 0x80 + c % 64)
end

local ESCAPES = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }
local WORDS = { { "true", true }, { "false", false }, { "NaN", 0 / 0 }, { "Infinity", math.huge }, { "-Infinity", -math.huge } }

local function damaged(r, at) fail(("%s: damaged at byte %d"):format(r.where, at)) end

-- The text whose first quote is at i, and where it ends.
local function read_string(r, i)
  local parts, text = {}, r.text
  if text:sub(i, i) ~= '"' then damaged(r, i) end
  i = i + 1
  while true do
    local plain, stop = text:match('^([^"\\%z\1-\31]*)()', i)
    parts[#parts + 1] = plain
    local c = text:sub(stop, stop)
    if c == '"' then return table.concat(parts), stop + 1 end
    if c ~= "\\" then damaged(r, stop) end
    local e = text:sub(stop + 1, stop + 1)
    i = stop + 2
    if ESCAPES[e] then parts[#parts + 1] = ESCAPES[e]
    else
      local hex = e == "u" and text:match("^%x%x%x%x", i)
      if not hex then damaged(r, stop) end
      local code = tonumber(hex, 16)
      i = i + 4
      if code >= 0xd800 and code < 0xe000 then
        local low = tonumber(text:match("^\\u(%x%x%x%x)", i) or "x", 16)
        if code >= 0xdc00 or not low or low < 0xdc00 or low > 0xdfff then damaged(r, stop) end
        code, i = 0x10000 + (code - 0xd800) * 1024 + low - 0xdc00, i + 6
      end
      parts[#parts + 1] = utf8(code)
    end
  end
end

local read

local function past_space(r, i) return r.text:match("^[ \t\r\n]*()", i) end

local function read_array(r, i, depth)
  local out = {}
  i = past_space(r, i)
  if r.text:sub(i, i) == "]" then return out, i + 1 end
  while true do
    out[#out + 1], i = read(r, i, depth + 1)
    i = past_space(r, i)
    local c = r.text:sub(i, i)
    i = i + 1
    if c == "]" then return out, i end
    if c ~= "," then damaged(r, i - 1) end
  end
end

local function read_object(r, i, depth)
  local out = {}
  i = past_space(r, i)
  if r.text:sub(i, i) == "}" then return out, i + 1 end
  while true do
    local key, value
    key, i = read_string(r, past_space(r, i))
    i = past_space(r, i)
    if r.text:sub(i, i) ~= ":" then damaged(r, i) end
    value, i = read(r, i + 1, depth + 1)
    if key == "#tensor" then out = r.other and r.other(value) or damaged(r, i)
    else
      local number = key:match "^#([^#].*)$"
      out[number and (tonumber(number) or damaged(r, i)) or key:gsub("^##", "#")] = value
    end
    i = past_space(r, i)
    local c = r.text:sub(i, i)
    i = i + 1
    if c == "}" then return out, i end
    if c ~= "," or key == "#tensor" then damaged(r, i - 1) end
  end
end

function read(r, i, depth)
  if depth > DEEPEST then damaged(r, i) end
  i = past_space(r, i)
  local c = r.text:sub(i, i)
  if c == '"' then return read_string(r, i) end
  if c == "{" then return read_object(r, i + 1, depth) end
  if c == "[" then return read_array(r, i + 1, depth) end
  for _, w in ipairs(WORDS) do
    if r.text:sub(i, i + #w[1] - 1) == w[1] then return w[2], i + #w[1] end
  end
  local number, stop = r.text:match("^(%-?%d+%.?%d*[eE]?[+-]?%d*)()", i)
  local v = number and tonumber(number)
  if not v then damaged(r, i) end
  return v, stop
end

-- other(name): the value that encode gave a name. An error where the text is no JSON of this kind.
function M.decode(text, where, other)
  local r = { text = text, where = where, other = other }
  local v, i = read(r, 1, 0)
  if past_space(r, i) <= #text then damaged(r, i) end
  return v
end

return M
