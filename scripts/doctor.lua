-- What `ddprun doctor` runs: what is there, what works, what is slow, and why. Status 1 when training can't work here.
local system, network, libraries, compute = require "ddp.doctor.system", require "ddp.doctor.network", require "ddp.doctor.libraries", require "ddp.doctor.compute"

local slow, broken = {}, {}
local report = {
  say = function(what, fmt, ...) print(("%-14s"):format(what) .. fmt:format(...)) end,
  slow = function(fmt, ...) slow[#slow + 1] = fmt:format(...) end,
  broken = function(fmt, ...) broken[#broken + 1] = fmt:format(...) end,
}

local loaded = compute.start(report)
local checks = { compute.processor, system.cores, system.memory, system.shared_memory, system.clock, network.interfaces, network.loopback, libraries.others, libraries.gpus }
if loaded then checks[#checks + 1] = compute.kernels end
for _, check in ipairs(checks) do
  local ok, why = pcall(check, report)
  if not ok then broken[#broken + 1] = tostring(why) end
end

for _, text in ipairs(slow) do report.say("slow", "%s", text) end
for _, text in ipairs(broken) do report.say("broken", "%s", text) end
if #slow + #broken == 0 then report.say("slow", "nothing") end
io.stdout:flush()
if #broken > 0 then os.exit(1) end
