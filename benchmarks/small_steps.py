"""What does `attach` cost where a step is short: beside the plain model, and beside DDP?

    python -m benchmarks.small_steps [--rounds 12] [--ranks 2] [--quick] [--only tiny,gpt]
    python -m benchmarks.small_steps --ranks 1        # one rank has nothing to send

Ranks are processes of this host with one thread each. A model's ways take turns of many steps in
the same processes; a time is that of a step on the slower rank, and ratios are of one round. With
one rank the baseline is the plain loop, otherwise DDP as it is by default. After each turn weights
are compared with those of the baseline.

    tiny    an MLP of 3 layers, 64 wide: 9 thousand weights
    wide    an MLP of 4 layers, 512 wide: a million weights
    deep    an MLP of 24 layers with norms, 64 wide: 147 thousand weights
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_ranks import Way, main, parser_of
from penstock.step.attached.attach import attach

QUESTION = __doc__.splitlines()[0]
SIZES = {"tiny": (64, 3, 16, 100), "wide": (512, 4, 32, 20), "deep": (64, 24, 16, 20)}
"""Width, layers, samples in a batch, steps in a turn."""
CLIP = 0.5
CLOSE = 1e-4
"""Clipping adds up norms in another order, and Adam makes much of little."""


def made(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.LayerNorm(width)] if layers > 4 else []
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), *norms, nn.ReLU())]
    return nn.Sequential(*parts)


def way(name: str, kind: str, base: str, seen: dict[str, list[torch.Tensor]]) -> Way:
    """Return one way to train a model; each has its own. `seen` has weights after each turn."""
    width, layers, batch, steps = SIZES[name]
    model = made(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    attached = None
    called: nn.Module = model
    if kind.startswith("attach"):
        more = {"clip": CLIP} if "clip" in kind else {}
        attached = attach(model, optimizer, reshard="reshard" in kind, **more)
    elif kind.startswith("DDP"):
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(1 + distributed.get_rank())
    data = [torch.randn(batch, width) for _ in range(8)]

    def run() -> None:
        for number in range(steps):
            x = data[number % len(data)]
            optimizer.zero_grad()
            (called(x) - x).square().mean().backward()
            if kind.endswith("clip") and attached is None:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        if attached is not None:
            attached.synchronize()

    def check() -> None:
        with nullcontext() if attached is None else attached.whole():
            now = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        seen[f"{name}: {kind}"].append(now)
        turn = len(seen[f"{name}: {kind}"]) - 1
        expected = seen[base][turn] if len(seen[base]) > turn else now
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=CLOSE)

    return Way(run=run, check=check, repeats=steps, against=base)


def ways(options: argparse.Namespace) -> dict[str, Way]:
    """Return all ways of all models."""
    kinds = ["plain", "DDP", "attach", "attach, reshard", "plain, clip", "attach, clip"]
    if options.ranks > 1:
        kinds = ["DDP", "attach", "attach, reshard", "DDP, clip", "attach, clip"]
    found: dict[str, Way] = {}
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name in options.only.split(","):
        for kind in kinds:
            base = kinds[0] + (", clip" if kind.endswith("clip") else "")
            found[f"{name}: {kind}"] = way(name, kind, f"{name}: {base}", seen)
    return found


def parser() -> argparse.ArgumentParser:
    found = parser_of(QUESTION, is_host=True, rounds=12)
    found.add_argument("--only", default=",".join(SIZES), help="models")
    return found


if __name__ == "__main__":
    main("benchmarks.small_steps", QUESTION, parser(), "DDP")
