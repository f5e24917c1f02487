-- report.lua -- the run in numbers: where each step's time went, throughput, memory, start-up.
local ffi = require "ffi"
local base = require "ddp.ffi"
local parallel = require "ddp.parallel"
local plain = require "ddp.plain"
local C = base.C

local M = {}
local SKIP = 2 -- the first steps are warming up
local PARTS = { "forward", "data", "backward", "comm", "optimizer" } -- in the order of DDP_PART_*

-- What this rank computed on: the GPU when there were tensors on it; and the most bytes in them.
local function computed_on()
  local text, name, mem = ffi.new "char[300]", ffi.new "const char *[1]", ffi.new "ddp_memory[1]"
  if C.ddp_gpu_library(0, 0, name, text, 300) ~= 1 then return "cpu", 0 end -- no GPU was asked for: none is woken
  local device = C.ddp_local_device()
  if device < 0 then C.ddp_error_take(nil) end
  if device <= 0 then return "cpu", 0 end
  C.ddp_memory_stats(device, mem)
  if mem[0].peak == 0 or C.ddp_device_text(device, text, 300) < 0 then return "cpu", 0 end
  return ffi.string(text):match "^[^,]*", tonumber(mem[0].peak) / 2 ^ 20
end

-- Of ddp, Lua and the vendor's libraries that were used.
local function versions()
  local v, name, text = { ddp = ffi.string(C.ddp_version()), luajit = jit.version }, ffi.new "const char *[1]", ffi.new "char[300]"
  for k = 0, 99 do
    local there = C.ddp_gpu_library(k, 0, name, text, 300)
    if there < 0 then return v end
    if there == 1 then v[ffi.string(name[0]):lower()] = ffi.string(text) end
  end
  return v
end

-- This rank's numbers.
local function local_numbers()
  local median, mean, parts = ffi.new "double[1]", ffi.new "double[1]", ffi.new("double[?]", C.DDP_PARTS)
  local n = tonumber(C.ddp_stats_summary(SKIP, median, mean, parts))
  local mem = ffi.new "ddp_memory[1]"
  C.ddp_memory_stats(0, mem)
  local rss = 0
  for line in io.lines "/proc/self/status" do
    local kb = line:match "^VmHWM:%s+(%d+)"
    if kb then rss = tonumber(kb) / 1024 end
  end
  local out = { steps = n, median = median[0], mean = mean[0], peak_mb = rss, tensors_mb = tonumber(mem[0].peak) / 2 ^ 20, parts = {},
    first_step_ms = C.ddp_stats_first_step_ms(), startup_ms = {} }
  out.device, out.gpu_peak_mb = computed_on()
  for i, name in ipairs(PARTS) do out.parts[name] = parts[i - 1] end
  local name, ms = ffi.new "const char *[1]", ffi.new "double[1]"
  local i = 0
  while C.ddp_stats_mark_get(i, name, ms) == 0 do
    out.startup_ms[ffi.string(name[0])] = ms[0]
    i = i + 1
  end
  return out
end

local function pick(all, key, fn)
  local v = all[1][key]
  for _, r in ipairs(all) do v = fn(v, r[key]) end
  return v
end

local function share(all, part)
  local time, total = 0, 0
  for _, r in ipairs(all) do time, total = time + r.parts[part], total + r.mean end
  return total > 0 and time / total or 0
end

-- The JSON of the API sheet. batch: samples a rank and step; extra: test_accuracy, loss.
local function numbers(all, opts)
  local median = pick(all, "median", math.max)
  local rates = {}
  for i, r in ipairs(all) do rates[i] = r.median > 0 and (opts.batch or 0) / r.median or 0 end
  local sum = median > 0 and (opts.batch or 0) * #all / median or 0
  return {
    images_per_second = sum, images_per_second_rank = rates, step_us = median * 1e6, first_step_ms = pick(all, "first_step_ms", math.max),
    peak_mb = pick(all, "peak_mb", math.max), comm_share = share(all, "comm"), data_share = share(all, "data"),
    startup_ms = all[1].startup_ms, test_accuracy = opts.test_accuracy, loss = opts.loss, world_size = #all, device = all[1].device,
    gpu_peak_mb = pick(all, "gpu_peak_mb", math.max), versions = versions(), steps = all[1].steps, parts_us = (function()
      local p = {}
      for _, name in ipairs(PARTS) do p[name] = share(all, name) * 1e6 * pick(all, "mean", math.max) end
      return p
    end)(),
  }
end

local function text(n, opts)
  local lines = { "" }
  local function add(...) lines[#lines + 1] = string.format(...) end
  if opts.test_accuracy then add("test accuracy %.2f %%", opts.test_accuracy) end
  if opts.loss then add("loss %.4f", opts.loss) end
  add("%.1f us/step (median of %d)", n.step_us, n.steps)
  add("  forward %.0f, backward %.0f, optimizer %.0f, waiting for data %.0f, exposed communication %.0f us", n.parts_us.forward, n.parts_us.backward,
    n.parts_us.optimizer, n.parts_us.data, n.parts_us.comm)
  local marks = {}
  for name, ms in pairs(n.startup_ms) do if name ~= "end" then marks[#marks + 1] = { name, ms } end end
  table.sort(marks, function(a, b) return a[2] < b[2] end)
  marks[#marks + 1] = { "first step done", n.first_step_ms }
  for i, m in ipairs(marks) do marks[i] = ("%s %.1f"):format(m[1], m[2]) end
  add("  since the launch: %s ms", table.concat(marks, ", "))
  add("+-----------------------+----------------------+")
  local function row(name, fmt, ...) add("| %-21s | %20s |", name, string.format(fmt, ...)) end
  row("throughput", opts.batch and "%.1f images/s" or "%.0f steps/s", opts.batch and n.images_per_second or (n.step_us > 0 and 1e6 / n.step_us or 0))
  row("memory, largest rank", "%.0f MB", n.peak_mb)
  if n.gpu_peak_mb > 0 then row("GPU, largest rank", "%.0f MB", n.gpu_peak_mb) end
  row("communication share", "%.1f %%", 100 * n.comm_share)
  row("start-up, first step", "%.0f ms", n.first_step_ms)
  add("+-----------------------+----------------------+")
  if opts.batch then add("%.1f images/s on %d rank%s (%s)", n.images_per_second, n.world_size, n.world_size == 1 and "" or "s", n.device) end
  if n.data_share > .1 then add("%.0f %% of the time went into waiting for data: more workers, or a cheaper transform", 100 * n.data_share) end
  return table.concat(lines, "\n")
end

-- Collective. Prints on rank 0 and returns the numbers; the launcher gets them for --report.
-- {batch = samples a rank and step, test_accuracy = percent, loss =, quiet = true}
function M.report(opts)
  opts = base.options("report", opts, { "batch", "test_accuracy", "loss", "quiet" })
  local all = parallel.all_gather_object(local_numbers())
  local n = numbers(all, opts)
  if C.ddp_rank() == 0 then
    if not opts.quiet then print(text(n, opts)) end
    base.check(C.ddp_report_send(plain.json(n)))
  end
  return n
end

-- ---- a progress line that works in a terminal and in a log ------------------------------------------------------------

ffi.cdef "int isatty(int fd);"
local tty, last_shown = ffi.C.isatty(1) == 1, 0

-- Rank 0 only. In a terminal the line is redrawn at most ten times a second; in a log a line is written every five
-- seconds, or when `done`.
function M.progress(line, done)
  if C.ddp_rank() ~= 0 then return end
  local now = C.ddp_now()
  if tty then
    if done or now - last_shown > .1 then
      io.stdout:write("\r\27[K", line, done and "\n" or "")
      io.stdout:flush()
      last_shown = now
    end
  elseif done or now - last_shown > 5 then
    io.stdout:write(line, "\n")
    io.stdout:flush()
    last_shown = now
  end
end

return M
