"""PyTorch's side of step.lua: torch_steps.py MODEL STEM BATCH AMP [STEPS] [DEVICE]. The same networks (torchvision's shapes), random data, SGD with
momentum, channels-last, cuDNN's benchmark mode. The best of eager and, with COMPILE=1, torch.compile. One line as step.lua's."""
import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, i, width, stride, deep):
        super().__init__()
        o = width * (4 if deep else 1)
        kernels = [(i, width, 1, 1), (width, width, 3, stride), (width, o, 1, 1)] if deep else [(i, width, 3, stride), (width, o, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in kernels)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in kernels)
        self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if stride != 1 or i != o else nn.Identity()

    def forward(self, x):
        y = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            if k + 1 < len(self.convs):
                y = F.relu(y, inplace=True)
        return F.relu(y + self.down(x), inplace=True)


def network(name, stem):
    if name == "toy":
        return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)), (10,)
    deep, depths, widths = {"resnet18": (False, (2, 2, 2, 2), (64, 128, 256, 512)), "resnet50": (True, (3, 4, 6, 3), (64, 128, 256, 512)),
                            "resnet20": (False, (3, 3, 3), (16, 32, 64))}[name]
    channels = widths[0]
    front = [nn.Conv2d(3, channels, 3, 1, 1, bias=False)] if stem == "cifar" else [nn.Conv2d(3, channels, 7, 2, 3, bias=False)]
    layers = front + [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)] + ([] if stem == "cifar" else [nn.MaxPool2d(3, 2, 1)])
    for s, depth in enumerate(depths):
        for b in range(depth):
            layers.append(Block(channels, widths[s], 2 if s and not b else 1, deep))
            channels = widths[s] * (4 if deep else 1)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10 if stem == "cifar" else 1000)]
    return nn.Sequential(*layers), (3, 32, 32) if stem == "cifar" else (3, 224, 224)


name, stem, batch, amp = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
steps = int(sys.argv[5]) if len(sys.argv) > 5 else 20
device = sys.argv[6] if len(sys.argv) > 6 else "cuda"
cuda = device == "cuda"
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = amp == "tf32"
torch.manual_seed(0)
model, shape = network(name, stem)
x = torch.randn(batch, *shape)
if len(shape) == 3:
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
model, x, y = model.to(device), x.to(device), torch.randint(0, 10, (batch,)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(amp)


def measure(run):
    def step():
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(run(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step().item()
    host, whole = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = step()
        host.append(time.perf_counter() - begin)
        loss.item()
        whole.append(time.perf_counter() - begin)
    middle = (steps - 1) // 2
    return sorted(whole)[middle], sorted(host)[middle]


best = measure(model)
if os.environ.get("COMPILE") == "1":
    best = min(best, measure(torch.compile(model)))
peak = torch.cuda.max_memory_allocated() / 1e6 if cuda else 0
print(f"step_ms {1e3 * best[0]:.3f} host_ms {1e3 * best[1]:.3f} images_per_s {batch / best[0]:.1f} peak_mb {peak:.0f}")
