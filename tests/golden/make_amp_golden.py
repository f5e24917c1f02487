"""Records PyTorch's GradScaler and OneCycleLR step by step: scaler.lua and one_cycle.lua.

    python make_amp_golden.py            (torch 2.8.0)

The model is y = w x + b of 4 to 3 with the loss mean(y^2); weights and inputs come from the formula of make_golden.py.
Gradients are made infinite or NaN at some steps. At even steps they are unscaled and clipped first.
"""
import math
import torch


def draw(n, k):
    """As in make_golden.py: n numbers in [-1, 1) of stream k."""
    i = torch.arange(n, dtype=torch.float64)
    v = torch.sin(i * 12.9898 + k * 78.233) * 43758.5453
    return (v - torch.floor(v)) * 2 - 1


STEPS, BAD = 32, {3: math.inf, 4: math.nan, 11: -math.inf, 20: math.nan, 21: math.inf, 22: math.inf}


def trace(make_optimizer):
    w = draw(12, 1).reshape(3, 4).float().requires_grad_(True)
    b = draw(3, 2).float().requires_grad_(True)
    opt = make_optimizer([w, b])
    applied = []
    opt.register_step_post_hook(lambda *_: applied.append(True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=4)
    rows = []
    for step in range(1, STEPS + 1):
        x = draw(20, 100 + step).reshape(5, 4).float()
        loss = (torch.nn.functional.linear(x, w, b) ** 2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        if step in BAD:
            w.grad[1, 2] = BAD[step]
        if step % 2 == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_([w, b], 0.5)
        applied.clear()
        scaler.step(opt)
        scaler.update()
        values = ",".join("%.9g" % v for p in (w, b) for v in p.detach().reshape(-1))
        rows.append("{scale=%.9g,applied=%s,params={%s}},\n" % (scaler.get_scale(), "true" if applied else "false", values))
    state = scaler.state_dict()
    return "{steps={\n%s},tracker=%d},\n" % ("".join(rows), state["_growth_tracker"])


def rates(steps, **options):
    p = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], lr=0.3)
    s = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=steps, cycle_momentum=False, **options)
    out = [s.get_last_lr()[0]]
    for _ in range(steps - 1):
        opt.step()
        s.step()
        out.append(s.get_last_lr()[0])
    return "{%s},\n" % ",".join("%.12g" % v for v in out)


head = "-- made by make_amp_golden.py with torch %s\n" % torch.__version__
with open("scaler.lua", "w") as f:
    f.write(head + "return {\nsgd=" + trace(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)))
    f.write("adamw=" + trace(lambda p: torch.optim.AdamW(p, lr=0.01)) + "}\n")
with open("one_cycle.lua", "w") as f:
    f.write(head + "return {\nplain=" + rates(20) + "linear=" + rates(25, pct_start=0.2, anneal_strategy="linear", div_factor=10, final_div_factor=100) + "}\n")
