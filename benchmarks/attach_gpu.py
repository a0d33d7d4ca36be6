"""What does an attached model cost on a GPU beside the same model alone?

    python -m benchmarks.attach_gpu [--quick] [--rounds 10] [--only one,two] [--json FILE]

Needs one GPU and torch. An MLP of square layers trains with AdamW under autocast to bf16; weights,
gradients and states are float32.

    one     one process: plain torch with its fused AdamW, and attached
    two     two processes on the GPU, which takes turns with them: each for itself, and attached
            over peer pointers (NCCL refuses two ranks on one GPU)
    memory  the most that a step has allocated, each way in turn, with the host far ahead

"sliced" is `attach(reshard=True)`: weights are whole while their modules run.

A step is timed on the device, from event to event, over several steps; medians of rounds in which
all ways take their turn. Two that are attached must have the same weights in the end, and those of
one process that is attached must be those of plain torch.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.gpu import Report, ask
from benchmarks.lanes_gpu import ps, run_ranks

WIDTH, LAYERS, BATCH = 4096, 8, 8192
STEPS = 5


def made(name: str, size: int) -> tuple[nn.Module, Callable[[], None], Any]:
    """Return a model, its step, and what it is attached with."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    attached = None
    if name != "plain":
        over, *way = name.split()
        groups = ps.Groups(ps.mesh(dp=size), backend=over, shared="64MB")
        attached = ps.attach(model, optimizer, groups, reshard=way == ["sliced"])
    torch.manual_seed(1 + distributed.get_rank())
    x = torch.randn(BATCH, WIDTH, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()

    return model, step, attached


def times(rank: int, size: int, names: list[str], rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step of each way, and how far its weights are from the first."""
    with torch.enable_grad():
        ways = {name: made(name, size) for name in names}
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 2):
            for name, (_, step, _) in ways.items():
                distributed.barrier()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                torch.cuda.synchronize()
                if number >= 2:
                    found[name].append(1e3 * (time.perf_counter() - begin) / STEPS)
    flat = {}
    for name, (model, _, attached) in ways.items():
        with nullcontext() if attached is None else attached.whole():
            flat[name] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    apart = {n: (flat[n] - flat[names[0]]).abs().max().item() for n in names}
    # Ranks of one model agree to the bit.
    sums = {n: flat[n].view(torch.int32).sum(dtype=torch.int64).item() for n in names}
    return {"ms": found, "apart": apart, "sums": sums}


def peaks(rank: int, size: int, names: list[str]) -> dict[str, float]:
    """Return the most memory that steps of each way have had allocated, in models of float32."""
    found = {}
    with torch.enable_grad():
        for name in names:
            before = torch.cuda.memory_allocated()
            _, step, attached = made(name, size)
            step()  # the first one is made with whole weights
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(STEPS):
                step()
            peak_bytes = torch.cuda.max_memory_allocated() - before
            found[name] = peak_bytes / (4 * LAYERS * WIDTH * (WIDTH + 1))
            if attached is not None:
                attached.close()
            torch.cuda.synchronize()
            del step, attached
            gc.collect()
    return found


WAYS = {
    1: ["plain", "nccl", "nccl sliced", "peer", "peer sliced"],
    2: ["plain", "peer", "peer sliced"],
}
"""By number of processes."""


def _beside_plain(ms: dict[str, float]) -> str:
    others = [
        f"{n} {each:.2f} ms ({each / ms['plain']:.3f})" for n, each in ms.items() if n != "plain"
    ]
    return f"plain {ms['plain']:.2f} ms, attached over {', '.join(others)}"


def one(report: Report) -> None:
    (found,) = run_ranks("benchmarks.attach_gpu:times", 1, WAYS[1], report.rounds)
    ms = {name: median(each) for name, each in found["ms"].items()}
    assert max(found["apart"].values()) < 1e-3, found["apart"]
    report.say(
        f"one process, {LAYERS} layers of {WIDTH}²: {_beside_plain(ms)}; weights within "
        f"{max(found['apart'].values()):.1e}",
        one=ms,
    )


def two(report: Report) -> None:
    found = run_ranks("benchmarks.attach_gpu:times", 2, WAYS[2], report.rounds)
    ms = {n: max(median(each["ms"][n]) for each in found) for n in WAYS[2]}
    for name in WAYS[2][1:]:
        assert found[0]["sums"][name] == found[1]["sums"][name], "ranks have different weights"
    report.say(
        f"two processes on one GPU, each for itself: {_beside_plain(ms)}; same weights to the bit",
        two=ms,
    )


def memory(report: Report) -> None:
    for size, names in WAYS.items():
        by_rank = run_ranks("benchmarks.attach_gpu:peaks", size, names)
        found = {n: max(each[n] for each in by_rank) for n in names}
        text = ", ".join(f"{name} {each:.2f}" for name, each in found.items())
        report.say(
            f"memory of a step, {size} processes, in models: {text}", **{f"memory{size}": found}
        )


if __name__ == "__main__":
    questions = {"one": one, "two": two, "memory": memory}
    ask(__doc__.splitlines()[0], questions, rounds=10)
