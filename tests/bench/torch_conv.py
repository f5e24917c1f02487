"""PyTorch's side of conv.lua: torch_conv.py SHAPES BATCH DTYPES SECONDS. SHAPES has a line `c h o k stride padding` a
convolution; a line `index dtype pass seconds` goes out for each, the best of both layouts."""
import sys
import time

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
path, batch, dtypes, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4])


def best(fn):
    low, spent, n = float("inf"), 0.0, 0
    while n < 3 or (spent < seconds and n < 1000):
        begin = time.perf_counter()
        fn()
        took = time.perf_counter() - begin
        low, spent, n = min(low, took), spent + took, n + 1
    return low


def passes(c, h, o, k, stride, padding, dtype, layout):
    out = (h + 2 * padding - k) // stride + 1
    x = torch.randn(batch, c, h, h).to(dtype).to(memory_format=layout)
    g = torch.randn(batch, o, out, out).to(dtype).to(memory_format=layout)
    w = torch.randn(o, c, k, k).to(dtype).to(memory_format=layout)

    def back(mask):
        return torch.ops.aten.convolution_backward(g, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)

    return {
        "forward": lambda: torch.conv2d(x, w, None, stride, padding),
        "grad_input": lambda: back([True, False, False]),
        "grad_weight": lambda: back([False, True, False]),
    }


with open(path) as lines, torch.no_grad():
    for i, line in enumerate(lines, 1):
        shape = [int(v) for v in line.split()]
        for dtype in dtypes:
            kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
            sets = [passes(*shape, kind, layout) for layout in (torch.contiguous_format, torch.channels_last)]
            for name in sets[0]:
                print(i, dtype, name, f"{min(best(s[name]) for s in sets):.6e}", flush=True)
