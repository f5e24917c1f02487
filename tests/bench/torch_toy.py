"""PyTorch's side of the toy: Linear 10-100-10, Adam, batch 32, loss = mean of the outputs, data parallel over gloo."""
import os
import resource
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

launched = float(os.environ.get("LAUNCHED", time.time()))
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)))
optimizer = torch.optim.Adam(model.parameters())


def step():
    loss = model(torch.randn(32, 10)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


step()
first, times = time.time(), []
for _ in range(1000):
    begin = time.perf_counter()
    step()
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    times.sort()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"first_step_ms {1e3 * (first - launched):.0f} step_us {1e6 * times[500]:.1f} rss_mb {rss:.0f}")
dist.destroy_process_group()
