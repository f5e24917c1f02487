-- Who a rank is, before ddp.init and after it; then the ranks meet in a sum.
local ddp = require "ddp"
local function who()
  return ("%d/%d %d/%d %d/%d"):format(ddp.rank(), ddp.world_size(), ddp.local_rank(), ddp.local_world_size(), ddp.node_rank(), ddp.num_nodes())
end
local before = who()
ddp.init()
if who() ~= before then error(("before init %s, after it %s"):format(before, who()), 0) end
local sum = ddp.all_reduce(ddp.full({ 1 }, ddp.rank() + 1)):item()
if sum ~= ddp.world_size() * (ddp.world_size() + 1) / 2 then error("the sum of the ranks is " .. sum, 0) end
io.write("fine ", before, "\n")
ddp.finish()
