-- network.lua -- `ddprun doctor`: interfaces, and the loopback that the launcher's store is reached by.
local ffi = require "ffi"
local system = require "ddp.doctor.system"

ffi.cdef [[
typedef struct { unsigned short family, port; unsigned char addr[4], rest[8]; } ddp_doctor_address;
typedef struct ddp_doctor_interface {
  struct ddp_doctor_interface *next; char *name; unsigned flags; ddp_doctor_address *addr; void *more[3];
} ddp_doctor_interface;
int getifaddrs(ddp_doctor_interface **);
void freeifaddrs(ddp_doctor_interface *);
int socket(int, int, int);
int bind(int, ddp_doctor_address *, unsigned);
int listen(int, int);
int getsockname(int, ddp_doctor_address *, unsigned *);
int connect(int, ddp_doctor_address *, unsigned);
]]
local C = ffi.C
local AF_INET, SOCK_STREAM, UP, LOOPBACK = 2, 1, 1, 8

local M = {}

-- Interfaces that are up and have an IPv4 address: {name, address, loopback}.
local function interfaces()
  local out, list = ffi.new "ddp_doctor_interface *[1]", {}
  if C.getifaddrs(out) ~= 0 then return list end
  local i = out[0]
  while i ~= nil do
    if i.addr ~= nil and i.addr.family == AF_INET and i.flags % 2 == UP then
      local a = i.addr.addr
      list[#list + 1] = { name = ffi.string(i.name), address = ("%d.%d.%d.%d"):format(a[0], a[1], a[2], a[3]), loopback = math.floor(i.flags / LOOPBACK) % 2 == 1 }
    end
    i = i.next
  end
  C.freeifaddrs(out[0])
  return list
end

-- The interface that ranks on other hosts would be talked to through, and why that one.
local function chosen(list)
  local iface, master = os.getenv "DDP_IFACE", os.getenv "MASTER_ADDR"
  if iface and iface ~= "" then return iface, "DDP_IFACE" end
  for _, i in ipairs(list) do if i.address == master then return i.name, "MASTER_ADDR" end end
  return system.find("/proc/net/route", "^(%S+)%s+00000000%s"), "the default route"
end

function M.interfaces(r)
  local list, shown, found = interfaces(), {}, false
  local name, why = chosen(list)
  for k, i in ipairs(list) do
    shown[k] = i.name .. " " .. i.address
    found = found or i.name == name
  end
  r.say("network", "%s; to other hosts: %s", #shown > 0 and table.concat(shown, ", ") or "no interface is up",
    name and ("%s (%s)"):format(name, why) or "no way")
  if why == "DDP_IFACE" and not found then r.broken("DDP_IFACE is \"%s\", no interface that is up with an IPv4 address: take one of those above", name) end
end

-- A connection to ourselves; what failed, or nil.
local function connect_to_self(server, client)
  local a = ffi.new("ddp_doctor_address[1]", { { family = AF_INET, addr = { 127, 0, 0, 1 } } })
  local size = ffi.new("unsigned[1]", 16)
  if server < 0 or client < 0 then return "socket" end
  if C.bind(server, a, 16) ~= 0 then return "bind" end
  if C.listen(server, 1) ~= 0 or C.getsockname(server, a, size) ~= 0 then return "listen" end
  if C.connect(client, a, 16) ~= 0 then return "connect" end
end

function M.loopback(r)
  local server, client = C.socket(AF_INET, SOCK_STREAM, 0), C.socket(AF_INET, SOCK_STREAM, 0)
  local failed = connect_to_self(server, client)
  local why = system.why()
  C.close(server)
  C.close(client)
  r.say("loopback", "%s", failed and ("%s to 127.0.0.1 fails: %s"):format(failed, why) or "works")
  if failed then r.broken "the launcher and its ranks meet on 127.0.0.1: ip link set lo up" end
end

return M
