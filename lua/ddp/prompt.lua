-- prompt.lua -- `ddprun -i`: reads chunks, runs them, prints what they give. core/host/prompt.c has the terminal.
local terminal = require "ddp.terminal"

local M = {}

-- The function of a text, which gives what it evaluates to `show`, its argument: of the expression it is, else of its
-- statements. Without one: whether more must come, and the error. (Not "return f(x)": a tail call leaves no line behind.)
local function compile(text)
  local f, why_value = loadstring("return " .. text, "=prompt")
  if f then return loadstring("(...)(" .. text .. "\n)", "=prompt") end
  local why
  f, why = loadstring(text, "=prompt")
  if f then return f end
  local function unfinished(e) return e:find("near '<eof>'", 1, true) ~= nil end
  return nil, unfinished(why) or unfinished(why_value), why
end

-- A whole chunk; nil when there are no more lines, false after Ctrl-C, else its function, or nothing and what is wrong with it.
local function read_chunk()
  local text
  while true do
    local line = terminal.read(text and ">> " or "> ")
    if line == false then return false end
    if line == nil and not text then return nil end
    text = text and line and text .. "\n" .. line or text or line:gsub("^%s*=", "")
    local f, more, why = compile(text)
    if f or not more or line == nil then return true, f, why end
  end
end

-- The traceback down to the chunk: what lies below it is this file.
local function with_traceback(e)
  if type(e) ~= "string" then return e end
  local text = debug.traceback(e, 2):gsub("\n\t%[builtin#[^\n]*", "")
  local stop
  for at in text:gmatch "prompt:%d+: in [^\n]*()" do stop = at end
  return stop and text:sub(1, stop - 1) or e
end

local function show(...)
  if select("#", ...) > 0 then print(...) end
end

local function run_chunk(f)
  terminal.running(true)
  local ok, e = xpcall(f, with_traceback, show)
  terminal.running(false)
  if not ok then print(tostring(e)) end
end

function M.run()
  jit.off() -- compiled loops do not look whether Ctrl-C came
  _G.ddp = require "ddp"
  if terminal.typed then print(("%s, %s: one rank; what is local ends with its line; Ctrl-D leaves"):format(_G.ddp.version(), jit.version)) end
  while true do
    local more, f, why = read_chunk()
    if more == nil then return end
    if f then run_chunk(f) elseif why then print(why) end
    io.stdout:flush()
  end
end

return M
