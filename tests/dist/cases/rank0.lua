-- ddp.rank0 outlasts the timeout, gives its values to all ranks, and its errors too. Run with --timeout 1.
local ddp = require "ddp"
ddp.init()
local begun = os.time()
local a, b = ddp.rank0(function(x)
  os.execute "sleep 3"
  return x + 1, { name = "made by " .. ddp.rank() }
end, 41)
assert(a == 42 and b.name == "made by 0", "values")
assert(os.time() - begun >= 2, "nobody waited")
local ok, why = pcall(ddp.rank0, function() error "deliberate" end)
assert(not ok and tostring(why):find "deliberate", tostring(why))
ok, why = pcall(ddp.rank0, function() ddp.barrier() end)
assert(not ok and tostring(why):find "the other ranks do not come", tostring(why))
ddp.barrier()
ddp.print "fine"
ddp.finish()
