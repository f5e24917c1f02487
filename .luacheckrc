std = "luajit"
max_line_length = 180
ignore = {
  "212", -- unused arguments of callbacks
  "581", -- not (a <= b): written so that NaN fails
}
exclude_files = { "tests/golden/toy.lua", "tests/golden/resnet*.lua", "tests/golden/scaler.lua", "tests/golden/one_cycle.lua" } -- numbers
files["scripts"] = { globals = { "arg" } }
files["tests/ops/samples.lua"] = { max_line_length = false } -- a table
files["tests/lua/test_memory.lua"] = { ignore = { "311", "331" } } -- dropped values are the point
