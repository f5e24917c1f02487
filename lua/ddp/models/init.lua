-- ddp.models: networks by name.
local M = {}
for name, make in pairs(require "ddp.models.resnet") do M[name] = make end
return M
