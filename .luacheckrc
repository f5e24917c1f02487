std = "luajit"
max_line_length = 180
ignore = { "212" } -- unused arguments of callbacks
files["scripts"] = { globals = { "arg" } }
