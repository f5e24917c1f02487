"""Makes the golden numbers: loss, gradients and updated parameters of one training step, by PyTorch in float64.

    python make_golden.py            (torch 2.8.0, torchvision 0.23.0)

Weights and inputs come from a formula that both sides compute (see golden.lua), so no weights are stored. Of each tensor
the largest magnitude and 48 elements, spread evenly, are kept. Inputs are the first stream for which every number that
relu sees is at least 1e-5 deviations from its kink: nearer ones would fall on either side by rounding alone, and one
flipped element moves whole gradients.
"""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models.resnet import BasicBlock, resnet18


def draw(n, k):
    """n numbers in [-1, 1) for stream k: the fraction of a large multiple of a sine."""
    i = torch.arange(n, dtype=torch.float64)
    v = torch.sin(i * 12.9898 + k * 78.233) * 43758.5453
    return (v - torch.floor(v)) * 2 - 1


def fill(model):
    for k, (name, p) in enumerate(model.named_parameters(), 1):
        v = draw(p.numel(), k).reshape(p.shape)
        if p.dim() > 1:
            v = v * math.sqrt(3 / (p.numel() / p.shape[0]))
        elif "bn" in name and "weight" in name or "downsample.1.weight" in name:
            v = 1 + 0.1 * v
        else:
            v = 0.1 * v
        with torch.no_grad():
            p.copy_(v.float().double())  # what float32 holds


def sample(t):
    flat = t.detach().reshape(-1)
    n = min(48, flat.numel())
    at = [i * flat.numel() // n for i in range(n)]
    return "{max=%.9g,values={%s}}" % (flat.abs().max().item(), ",".join("%.9g" % flat[i].item() for i in at))


margin = math.inf
plain_relu = F.relu


def watched_relu(x, inplace=False):
    global margin
    margin = min(margin, (x.detach().abs().min() / x.detach().std()).item())
    return plain_relu(x)


F.relu = watched_relu


def clear_of_kinks(model, x):
    global margin
    margin = math.inf
    with torch.no_grad():
        model(x)
    return margin > 1e-5


def step(name, model, shape, loss_of, optimizer):
    model.double()
    fill(model)
    fresh = {n: b.clone() for n, b in model.named_buffers()}
    for stream in range(1000, 1400):
        x = draw(math.prod(shape), stream).reshape(shape).float().double()
        if clear_of_kinks(model, x):
            break
    else:
        raise SystemExit("no stream of inputs keeps clear of the kinks")
    for n, b in model.named_buffers():
        b.copy_(fresh[n])
    loss = loss_of(model, x)
    loss.backward()
    grads = [(n, sample(p.grad)) for n, p in model.named_parameters()]
    optimizer(model.parameters()).step()
    with open(name + ".lua", "w") as f:
        f.write("-- made by make_golden.py with torch %s, float64\nreturn {stream=%d,size={%s},loss=%.12g,\ngrads={\n"
                % (torch.__version__, stream, ",".join(map(str, shape)), loss.item()))
        f.writelines('["%s"]=%s,\n' % g for g in grads)
        f.write("},\nparams={\n")
        f.writelines('["%s"]=%s,\n' % (n, sample(p)) for n, p in model.named_parameters())
        f.write("},\nbuffers={\n")
        f.writelines('["%s"]=%s,\n' % (n, sample(b)) for n, b in model.named_buffers() if b.dtype.is_floating_point)
        f.write("}}\n")


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        channels = 16
        for s, width in enumerate([16, 32, 64], 1):
            blocks = []
            for b in range(3):
                stride = 2 if s > 1 and b == 0 else 1
                down = None
                if stride != 1 or channels != width:
                    down = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
                blocks.append(BasicBlock(channels, width, stride, down))
                channels = width
            setattr(self, "layer%d" % s, nn.Sequential(*blocks))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def classify(model, x):
    return F.cross_entropy(model(x), torch.arange(x.shape[0]) * 7 % 10)


def sgd(p):
    return torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)


toy = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10))
step("toy", toy, (32, 10), lambda m, x: m(x).mean(), torch.optim.Adam)
step("resnet20", ResNet20(), (4, 3, 16, 16), classify, sgd)
r18 = resnet18(num_classes=10)
r18.conv1, r18.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
step("resnet18", r18, (8, 3, 8, 8), classify, sgd)
