"""PyTorch's side of resnet.lua: torchvision's network with the CIFAR stem, alone or data parallel over gloo.
--layout eager, channels_last or compile (which is channels-last too). One line: img_s, rss_mb."""
import argparse
import os
import resource
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet18")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--amp", default="none", choices=["none", "bf16"])
parser.add_argument("--layout", default="eager", choices=["eager", "channels_last", "compile"])
args = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = getattr(torchvision.models, args.model)(num_classes=10)
model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
x, y, times = torch.randn(args.batch, 3, 32, 32), torch.randint(0, 10, (args.batch,)), []
if args.layout != "eager":
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
run = torch.compile(model) if args.layout == "compile" else model
for _ in range(args.steps):
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=args.amp == "bf16"):
        loss = F.cross_entropy(run(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    times.append(time.perf_counter() - begin)
if rank == 0:
    times = sorted(times[2:])
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"img_s {args.batch * world / times[len(times) // 2]:.1f} rss_mb {rss:.0f}")
if world > 1:
    dist.destroy_process_group()
