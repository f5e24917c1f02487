-- resnet.lua -- training steps of a network with the CIFAR stem: what torch_resnet.py does.
-- One line at the end: img_s, rss_mb.
package.path = "tests/bench/?.lua;" .. package.path
local ddp = require "ddp"
local bench = require "bench"
local n = bench.train(ddp.args({ model = "resnet18", batch = 64, steps = 10, amp = "none" }, { amp = { "none", "bf16" } }))
ddp.print(("img_s %.1f rss_mb %.0f"):format(n.images_per_second, n.peak_mb))
ddp.finish()
