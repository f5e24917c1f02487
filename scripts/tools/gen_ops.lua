-- gen_ops.lua -- reads core/op/ops.def and writes what follows from it.
--   luajit gen_ops.lua core/op/ops.def OUTDIR
-- OUTDIR gets ddp_ops.h (public prototypes and manual), op_attrs.h (attribute structs, op numbers),
-- ops_table.c (the table and the C functions), lua/ddp/ops_sig.lua (signatures for the Lua side).
local src, out = arg[1], arg[2]
local text = assert(io.open(src)):read "*a"

local C_TYPE = { int = "int64_t", dim = "int64_t", pos = "int64_t", float = "double", bool = "int", dtype = "int", device = "int" }
local ATTR = { int = "DDP_ATTR_INT", dim = "DDP_ATTR_INT", pos = "DDP_ATTR_INT", float = "DDP_ATTR_FLOAT", bool = "DDP_ATTR_BOOL",
  dtype = "DDP_ATTR_DTYPE", device = "DDP_ATTR_DEVICE", int2 = "DDP_ATTR_INT2", dims = "DDP_ATTR_INTS", shape = "DDP_ATTR_INTS" }

local function trim(s) return (s:gsub("^%s+", ""):gsub("%s+$", "")) end

local function parse(name, sig, flags, doc)
  local op = { name = name, sig = sig, flags = flags, doc = doc, inputs = {}, attrs = {}, outputs = {} }
  local left, right = sig:match "^(.-)%->(.*)$"
  local ins, attrs = left:match "^(.-);(.*)$"
  ins = ins or left
  for s in ins:gmatch "[^,]+" do
    s = trim(s)
    if s ~= "" then
      local n, mark = s:match "^([%w_]+)(%??%[?%]?)$"
      assert(n, name .. ": input " .. s)
      op.inputs[#op.inputs + 1] = { name = n, optional = mark == "?", list = mark == "[]" }
    end
  end
  for s in (attrs or ""):gmatch "[^,]+" do
    local ty, n, def = trim(s):match "^(%w+) ([%w_]+)=?(.*)$"
    assert(ty and ATTR[ty], name .. ": attribute " .. s)
    op.attrs[#op.attrs + 1] = { type = ty, name = n, default = def ~= "" and def or nil }
  end
  for s in right:gmatch "[^,]+" do op.outputs[#op.outputs + 1] = trim(s) end
  op.only_in_place = flags:find "ONLY_IN_PLACE" ~= nil
  op.in_place = not op.only_in_place and flags:find "IN_PLACE" ~= nil
  return op
end

local ops = {}
do
  local doc, in_comment, buf = nil, false, nil
  for line in text:gmatch "[^\n]*" do
    if in_comment then
      buf[#buf + 1] = line
      if line:find "%*/" then in_comment, doc = false, table.concat(buf, "\n") end
    elseif line:find "^/%*" then
      buf = { line }
      if line:find "%*/" then doc = line else in_comment = true end
    else
      local name, sig, flags = line:match '^OP%(([%w_]+), "(.-)", (.-)%)%s*$'
      if name then
        if not doc or doc:find "^/%* %-%-%-%-" then error(name .. " has no comment") end
        ops[#ops + 1], doc = parse(name, sig, flags, doc), nil
      end
    end
  end
end

local function proto(op, suffix)
  local p = {}
  local lists = 0
  for _, i in ipairs(op.inputs) do
    if i.list then
      if lists == 0 then p[#p + 1] = "int n" end
      lists = lists + 1
      p[#p + 1] = "ddp_tensor *const *" .. i.name
    else p[#p + 1] = "ddp_tensor *" .. i.name end
  end
  for _, a in ipairs(op.attrs) do
    if a.type == "int2" then p[#p + 1] = "const int64_t " .. a.name .. "[2]"
    elseif a.type == "dims" or a.type == "shape" then
      p[#p + 1] = "int n_" .. a.name; p[#p + 1] = "const int64_t *" .. a.name
    else p[#p + 1] = C_TYPE[a.type] .. " " .. a.name end
  end
  local in_place = suffix == "_" or op.only_in_place
  if #op.outputs > 1 then for _, o in ipairs(op.outputs) do p[#p + 1] = "ddp_tensor **" .. o end end
  local ret = (in_place or #op.outputs > 1 or lists > 1) and "int " or "ddp_tensor *"
  return ret .. "ddp_" .. op.name .. suffix .. "(" .. (#p > 0 and table.concat(p, ", ") or "void") .. ")", ret
end

local function write(path, s)
  local f = assert(io.open(out .. "/" .. path, "w")); f:write(s); f:close()
end

-- ddp_ops.h
local h = { [[
/* ddp_ops.h -- the ops. Made from core/op/ops.def by scripts/tools/gen_ops.lua; included by ddp.h.
 * Tensors first, attributes after; a list attribute is its length and its values, length -1 where it says "none".
 * A result is a new reference, NULL on error; with several results, or in place, a status is returned.
 * Threads: the compute thread, or any thread that works on tensors of its own. */
#ifndef DDP_OPS_H
#define DDP_OPS_H
]] }
for _, op in ipairs(ops) do
  local defaults = {}
  for _, a in ipairs(op.attrs) do if a.default then defaults[#defaults + 1] = a.name .. " " .. a.default end end
  local doc = op.doc
  if #defaults > 0 then doc = doc:gsub("%s*%*/$", "") .. "\n * Defaults elsewhere: " .. table.concat(defaults, ", ") .. ". */" end
  h[#h + 1] = doc
  h[#h + 1] = "DDP_API " .. proto(op, "") .. ";"
  if op.in_place then h[#h + 1] = "DDP_API " .. proto(op, "_") .. ";" end
end
h[#h + 1] = "#endif\n"
write("ddp_ops.h", table.concat(h, "\n"))

-- op_attrs.h
local a = { "/* op_attrs.h -- made from core/op/ops.def. */" }
for _, op in ipairs(ops) do
  if #op.attrs > 0 then
    a[#a + 1] = "typedef struct ddp_" .. op.name .. "_attrs {"
    for _, at in ipairs(op.attrs) do
      local t = at.type
      if t == "int2" then a[#a + 1] = "    int64_t " .. at.name .. "[2];"
      elseif t == "dims" or t == "shape" then a[#a + 1] = "    ddp_ints " .. at.name .. ";"
      elseif t == "float" then a[#a + 1] = "    double " .. at.name .. ";"
      else a[#a + 1] = "    int64_t " .. at.name .. ";" end
    end
    a[#a + 1] = "} ddp_" .. op.name .. "_attrs;"
  end
end
a[#a + 1] = "enum {"
for _, op in ipairs(ops) do a[#a + 1] = "    DDP_OP_" .. op.name .. "," end
a[#a + 1] = "    DDP_OP_COUNT\n};"
for _, op in ipairs(ops) do a[#a + 1] = "DDP_LOCAL extern const ddp_op_rules ddp__" .. op.name .. "_rules;" end
write("op_attrs.h", table.concat(a, "\n") .. "\n")

-- ops_table.c
local function flags_c(f)
  if trim(f) == "0" then return "0" end
  return (f:gsub("[%u_]+", "DDP_OPF_%0"))
end

local function body(op, in_place)
  local b = {}
  local nlists, ntens = 0, #op.inputs
  for _, i in ipairs(op.inputs) do if i.list then nlists = nlists + 1 end end
  local attrs = "NULL"
  if #op.attrs > 0 then
    attrs = "&at"
    b[#b + 1] = "    ddp_" .. op.name .. "_attrs at;"
    b[#b + 1] = "    memset(&at, 0, sizeof at);"
    for _, x in ipairs(op.attrs) do
      if x.type == "int2" then b[#b + 1] = ("    at.%s[0] = %s[0], at.%s[1] = %s[1];"):format(x.name, x.name, x.name, x.name)
      elseif x.type == "dims" or x.type == "shape" then
        b[#b + 1] = ("    if (ddp__ints_set(%q, %q, &at.%s, n_%s, %s) < 0) return FAIL;"):format(op.name, x.name, x.name, x.name, x.name)
      else b[#b + 1] = ("    at.%s = %s;"):format(x.name, x.name) end
    end
  end
  local fail = (in_place or #op.outputs > 1 or nlists > 1) and "ddp__pending()" or "NULL"
  for i = 1, #b do b[i] = b[i]:gsub("FAIL", fail) end
  local n, ins = tostring(ntens), "NULL"
  if nlists == 1 and ntens == 1 then n, ins = "n", op.inputs[1].name
  elseif nlists > 1 then
    b[#b + 1] = ("    ddp_tensor *const *lists[%d] = {"):format(nlists)
    for _, i in ipairs(op.inputs) do b[#b] = b[#b] .. i.name .. ", " end
    b[#b] = b[#b] .. "};"
    b[#b + 1] = ("    ddp_tensor **in = ddp__join_lists(%d, n, lists);"):format(nlists)
    b[#b + 1] = "    if (!in) return ddp__pending();"
    n, ins = "n * " .. nlists, "in"
  elseif ntens > 0 then
    local names = {}
    for _, i in ipairs(op.inputs) do names[#names + 1] = i.name end
    b[#b + 1] = ("    ddp_tensor *in[%d] = {%s};"):format(ntens, table.concat(names, ", "))
    ins = "in"
  end
  local o = ("&ddp__ops[DDP_OP_%s]"):format(op.name)
  if nlists > 1 then
    b[#b + 1] = ("    int st = ddp__call_in_place(%s, %s, %s, %s);"):format(o, attrs, n, ins)
    b[#b + 1] = "    free(in);\n    return st;"
  elseif in_place then
    b[#b + 1] = ("    return ddp__call_in_place(%s, %s, %s, %s);"):format(o, attrs, n, ins)
  elseif #op.outputs == 1 then
    b[#b + 1] = "    ddp_tensor *out = NULL;"
    b[#b + 1] = ("    ddp__call(%s, %s, %s, %s, &out);"):format(o, attrs, n, ins)
    b[#b + 1] = "    return out;"
  else
    b[#b + 1] = ("    ddp_tensor *out[%d] = {0};"):format(#op.outputs)
    b[#b + 1] = ("    int st = ddp__call(%s, %s, %s, %s, out);"):format(o, attrs, n, ins)
    for i, nm in ipairs(op.outputs) do
      b[#b + 1] = ("    if (%s) *%s = out[%d];\n    else ddp_release(out[%d]);"):format(nm, nm, i - 1, i - 1)
    end
    b[#b + 1] = "    return st;"
  end
  return table.concat(b, "\n")
end

local c = { "/* ops_table.c -- made from core/op/ops.def. */\n#include <stdlib.h>\n#include <string.h>\n#include \"op/op_build.h\"\n" }
for _, op in ipairs(ops) do
  if #op.attrs > 0 then
    c[#c + 1] = "static const ddp_attr_def " .. op.name .. "_attr_defs[] = {"
    for _, at in ipairs(op.attrs) do
      c[#c + 1] = ('    {"%s", %s, offsetof(ddp_%s_attrs, %s)},'):format(at.name, ATTR[at.type], op.name, at.name)
    end
    c[#c + 1] = "};"
  end
  if #op.inputs > 0 then
    local names = {}
    for _, i in ipairs(op.inputs) do names[#names + 1] = '"' .. i.name .. '"' end
    c[#c + 1] = ("static const char *const %s_in_names[] = {%s};"):format(op.name, table.concat(names, ", "))
  end
end
c[#c + 1] = "const ddp_op_def ddp__ops[] = {"
for id, op in ipairs(ops) do
  local optional, lists = 0, 0
  for i, inp in ipairs(op.inputs) do
    if inp.optional then optional = optional + 2 ^ (i - 1) end
    if inp.list then lists = lists + 2 ^ (i - 1) end
  end
  c[#c + 1] = ('    {"%s", "%s(%s)", %s, %d, %d, %d, %d, %d, %s, %s, %d, %s, &ddp__%s_rules},'):format(op.name, op.name, op.sig,
    flags_c(op.flags), id - 1, #op.inputs, #op.outputs, optional, lists, #op.inputs > 0 and op.name .. "_in_names" or "NULL",
    #op.attrs > 0 and "sizeof(ddp_" .. op.name .. "_attrs)" or "0", #op.attrs, #op.attrs > 0 and op.name .. "_attr_defs" or "NULL", op.name)
end
c[#c + 1] = "};"
for _, op in ipairs(ops) do
  c[#c + 1] = proto(op, "") .. " {\n" .. body(op, op.only_in_place) .. "\n}"
  if op.in_place then c[#c + 1] = proto(op, "_") .. " {\n" .. body(op, true) .. "\n}" end
end
write("ops_table.c", table.concat(c, "\n") .. "\n")

-- lua/ddp/ops_sig.lua
local l = { "-- made from core/op/ops.def\nreturn {" }
for _, op in ipairs(ops) do
  local function q(s) return s and string.format("%q", s) or "nil" end
  local i, at = {}, {}
  for _, x in ipairs(op.inputs) do i[#i + 1] = ("{name=%q%s%s}"):format(x.name, x.optional and ",optional=true" or "", x.list and ",list=true" or "") end
  for _, x in ipairs(op.attrs) do at[#at + 1] = ("{name=%q,type=%q,default=%s}"):format(x.name, x.type, q(x.default)) end
  local steps = op.inputs[2] and op.inputs[2].list -- several lists: written in place, a status comes back
  l[#l + 1] = ("  %s={inputs={%s},attrs={%s},n_out=%d%s%s},"):format(op.name, table.concat(i, ","), table.concat(at, ","), #op.outputs,
    op.in_place and ",in_place=true" or "", (op.only_in_place or steps) and ",only_in_place=true" or "")
end
l[#l + 1] = "}\n"
write("lua/ddp/ops_sig.lua", table.concat(l, "\n"))
