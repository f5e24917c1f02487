-- test_images.lua -- the kernels' images as built: every kernel of kernels.def in every architecture, with the argument size that
-- args.h says, and what it uses of registers, shared memory and stack. `luajit tests/cuda/test_images.lua list` prints all of it.
local t = require "harness"
local bit = require "bit"
local ffi = require "ffi"
local build = os.getenv "DDP_BUILD" or "build"

local function shell(command)
  local pipe = io.popen(command)
  local out = pipe:read "*a"
  pipe:close()
  return out
end
local function whole(path)
  local f = io.open(path, "rb")
  local data = f and f:read "*a"
  if f then f:close() end
  return data
end
local function number(data, at, bytes) -- little-endian, at from 0
  local v = 0
  for i = bytes, 1, -1 do v = v * 256 + data:byte(at + i) end
  return v
end

-- ---- what should be there: { family = { { name, args, flags, bytes }, ... } } ----------------------------------------------

local function expected()
  local source = os.tmpname()
  local f = io.open(source .. ".c", "w")
  f:write [[
#include <stdio.h>
#include "kernels/cuda/args.h"
enum { FLAT, MEET };
#define KERNEL(name, args, flags) printf("%s %zu\n", #name, sizeof(args));
#define KERNEL_FLOATS(name, args, flags) \
    KERNEL(name##_f32, args, flags) KERNEL(name##_f64, args, flags) KERNEL(name##_f16, args, flags) KERNEL(name##_bf16, args, flags)
#define KERNEL_ALL(name, args, flags) KERNEL_FLOATS(name, args, flags) \
    KERNEL(name##_i64, args, flags) KERNEL(name##_i32, args, flags) KERNEL(name##_u8, args, flags) KERNEL(name##_bool, args, flags)
#define FAMILY(f) printf("family %s\n", #f);
int main(void) {
#include "kernels/cuda/kernels.def"
    return 0;
}
]]
  f:close()
  local out = shell(("gcc -I. -o %s %s.c && %s; rm -f %s %s.c"):format(source, source, source, source, source))
  local families, order = {}, {}
  for line in out:gmatch "[^\n]+" do
    local name, bytes = line:match "^(%S+) (%S+)$"
    if name == "family" then
      order[#order + 1] = bytes
      families[bytes] = {}
    else
      table.insert(families[order[#order]], { name = name, bytes = tonumber(bytes) })
    end
  end
  return families, order
end

-- ---- what is there ------------------------------------------------------------------------------------------------------------

local REGISTERS, FRAME, ARGUMENTS, MOST_THREADS = 0x2f, 0x11, 0x19, 0x05

-- Calls fn(attribute, bytes or value) for each entry of an .nv.info section.
local function each_attribute(data, fn)
  local at = 0
  while at + 4 <= #data do
    local format, attribute, value = data:byte(at + 1), data:byte(at + 2), number(data, at + 2, 2)
    at = at + 4
    if format == 4 then
      fn(attribute, data:sub(at + 1, at + value))
      at = at + value
    else
      fn(attribute, value)
    end
  end
end

-- The kernels of a cubin: { name = { registers, stack, shared, arguments, threads } }.
local function kernels_of(elf)
  local sections, kernels, of_symbol = {}, {}, {}
  local first, count, names = number(elf, 40, 8), number(elf, 60, 2), number(elf, 62, 2)
  local function text(table_at, at) return elf:match("^[^%z]*", table_at + at + 1) end
  local names_at = number(elf, first + 64 * names + 24, 8)
  for i = 0, count - 1 do
    local h = first + 64 * i
    local offset, size = number(elf, h + 24, 8), number(elf, h + 32, 8)
    sections[#sections + 1] = { name = text(names_at, number(elf, h, 4)), offset = offset, size = size, type = number(elf, h + 4, 4), link = number(elf, h + 40, 4) }
  end
  for _, s in ipairs(sections) do
    local name = s.name:match "^%.text%.(.*)"
    if name then kernels[name] = { shared = 0 } end
  end
  for _, s in ipairs(sections) do
    if s.type == 2 then
      local strings = sections[s.link + 1].offset
      for k = 0, s.size / 24 - 1 do of_symbol[k] = text(strings, number(elf, s.offset + 24 * k, 4)) end
    end
    local k = kernels[s.name:match "^%.nv%.shared%.(.*)" or ""]
    if k then k.shared = s.size end
    k = kernels[s.name:match "^%.nv%.info%.(.*)" or ""]
    if k then
      each_attribute(elf:sub(s.offset + 1, s.offset + s.size), function(a, v)
        if a == ARGUMENTS then k.arguments = v end
        if a == MOST_THREADS then k.threads = number(v, 0, 4) end
      end)
    end
  end
  for _, s in ipairs(sections) do
    if s.name == ".nv.info" then
      each_attribute(elf:sub(s.offset + 1, s.offset + s.size), function(a, v)
        if a ~= REGISTERS and a ~= FRAME then return end
        local k = kernels[of_symbol[number(v, 0, 4)]]
        if not k then return end
        if a == REGISTERS then k.registers = bit.band(number(v, 4, 4), 0xffff) else k.stack = number(v, 4, 4) end
      end)
    end
  end
  return kernels
end

-- An entry's bytes, which are packed by zstd where they do not begin as ELF does.
ffi.cdef "size_t ZSTD_decompress(void *dst, size_t room, const void *src, size_t n); unsigned ZSTD_isError(size_t code);"
local function unpacked(data, at, header, size)
  if data:sub(at + header + 1, at + header + 4) == "\127ELF" then return data:sub(at + header + 1, at + header + size) end
  local packed, room = number(data, at + 16, 4), number(data, at + 56, 8)
  local out = ffi.new("char[?]", room)
  local zstd = ffi.load "libzstd.so.1"
  local n = zstd.ZSTD_decompress(out, room, data:sub(at + header + 1, at + header + packed), packed)
  if zstd.ZSTD_isError(n) ~= 0 then return "" end
  return ffi.string(out, n)
end

-- { [arch] = kernels }, and the architectures that have PTX, of a .fatbin.
local function image_of(path)
  local data = whole(path)
  if not data then return nil end
  if number(data, 0, 4) ~= 0xba55ed50 then error(path .. " is not a fatbin", 0) end
  local at, stop, archs, ptx = number(data, 6, 2), number(data, 6, 2) + number(data, 8, 8), {}, {}
  while at < stop do
    local kind, header, size, arch = number(data, at, 2), number(data, at + 4, 4), number(data, at + 8, 8), number(data, at + 28, 4)
    if kind == 2 then
      local elf = unpacked(data, at, header, size)
      if elf:sub(1, 4) ~= "\127ELF" then error(path .. ": no cubin for " .. arch, 0) end
      archs[arch] = kernels_of(elf)
    elseif kind == 1 then ptx[arch] = true end
    at = at + header + size
  end
  return archs, ptx
end

-- ---- the tests ---------------------------------------------------------------------------------------------------------------

local families, order = expected()
local images = {}
local why = not whole(build .. "/libddp_cuda.so") and "libddp_cuda.so is not built (CUDA's compiler is missing)"
for _, family in ipairs(order) do
  local archs, ptx = image_of(("%s/cuda/%s.fatbin"):format(build, family))
  images[family] = { archs = archs or {}, ptx = ptx or {} }
end
local function need() if why then t.skip(why) end end
local function sorted(set)
  local list = {}
  for k in pairs(set) do list[#list + 1] = k end
  table.sort(list)
  return list
end

-- fn(family, arch, kernel's name, what it uses)
local function each(fn)
  local n = 0
  for _, family in ipairs(order) do
    for _, arch in ipairs(sorted(images[family].archs)) do
      local kernels = images[family].archs[arch]
      for _, name in ipairs(sorted(kernels)) do
        fn(family, arch, name, kernels[name])
        n = n + 1
      end
    end
  end
  t.ok(n > 0, "no kernel was looked at")
end

if arg[1] == "list" then
  if why then print(why) os.exit(1) end
  each(function(family, arch, name, k)
    print(("%-12s sm_%-4d %-28s %3d registers %6d bytes shared %4d stack %5d arguments%s"):format(
      family, arch, name, k.registers, k.shared, k.stack, k.arguments,
      k.threads and (" %d threads at most"):format(k.threads) or ""))
  end)
  os.exit(0)
end

t.test("every family is built for the same architectures, and has PTX for GPUs that come later", function()
  need()
  local want = sorted(images[order[1]].archs)
  t.ok(#want > 0, "no architecture")
  for _, family in ipairs(order) do
    t.eq(sorted(images[family].archs), want, family)
    t.eq(sorted(images[family].ptx), { want[#want] }, "PTX of " .. family)
  end
end)

t.test("every kernel of kernels.def is in every image with the arguments of args.h, and no other is", function()
  need()
  for _, family in ipairs(order) do
    for arch, kernels in pairs(images[family].archs) do
      local left = {}
      for name in pairs(kernels) do left[name] = true end
      for _, k in ipairs(families[family]) do
        local is = kernels[k.name]
        t.ok(is, ("%s is not in %s for sm_%d"):format(k.name, family, arch))
        t.eq(is.arguments, k.bytes, ("argument bytes of %s for sm_%d"):format(k.name, arch))
        left[k.name] = nil
      end
      t.ok(next(left) == nil, ("%s is in %s for sm_%d and not in kernels.def"):format(tostring(next(left)), family, arch))
    end
  end
end)

t.test("no kernel spills or uses a stack; at most 128 registers, and what its launch bounds allow", function()
  need()
  local bad = {}
  each(function(_, arch, name, k)
    local most = k.threads and math.min(128 * 256 / math.min(k.threads, 256), 65536 / k.threads, 255) or 128
    if not (k.stack == 0 and k.registers > 0 and k.registers <= most) then
      bad[#bad + 1] = ("%s for sm_%d: %s registers (at most %d), %s bytes of stack"):format(name, arch, tostring(k.registers), most, tostring(k.stack))
    end
  end)
  t.eq(table.concat(bad, "; "), "", "beyond the limits")
end)

t.test("shared memory of a kernel fits into what every GPU gives a block without asking, 48 KB", function()
  need()
  each(function(_, arch, name, k)
    local reserved = arch >= 80 and 1024 or 0 -- of each block, by the system
    t.ok(k.shared - reserved <= 48 * 1024, ("%s for sm_%d: %d bytes"):format(name, arch, k.shared))
  end)
end)

t.done()
