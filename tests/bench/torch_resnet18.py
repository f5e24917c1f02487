"""PyTorch's side of resnet18.lua: torchvision's network with the CIFAR stem, alone or data parallel over gloo."""
import os
import resource
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = resnet18(num_classes=10)
model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
x, y, times = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)), []
for _ in range(10):
    begin = time.perf_counter()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    times.append(time.perf_counter() - begin)
if rank == 0:
    times = sorted(times[2:])
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"img_s {64 * world / times[len(times) // 2]:.1f} rss_mb {rss:.0f}")
if world > 1:
    dist.destroy_process_group()
