"""PyTorch's side of all_reduce.lua: gloo, f32, medians over calls after a barrier."""
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())


def median(n, calls):
    x, times = torch.randn(n), []
    for _ in range(calls):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(1e6 * (time.perf_counter() - begin))
    return sorted(times)[(calls - 1) // 2]


parts = []
for name, n, calls in (("4 B", 1, 2000), ("1 MB", 1 << 18, 200), ("25 MB", 25 << 18, 15), ("100 MB", 100 << 18, 7)):
    median(n, 2)
    parts.append(f"{name} {median(n, calls):.1f}")
if dist.get_rank() == 0:
    print("us " + ", ".join(parts))
dist.destroy_process_group()
