"""What does fusing elementwise code bring on one core, and is it as fast as torch's own kernel?

    OMP_NUM_THREADS=1 python -m benchmarks.elementwise [--rounds 9] [--quick]

Adam on float32, as plain operations of torch, in tiles, compiled, and as `torch._fused_adam_`, in
turns, on one thread, by the time that this thread has run. The limit is a copy of as many bytes: 28
of each element. Values are compared with the interpreter's in float64 before anything is timed.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from penstock.step.kernels.regions import Kernel, kernel_of
from penstock.step.program import R, interpret, mesh, program
from penstock.step.program.language import update

BACKENDS = ("eager", "tiled", "native", "compile")
CHECKED = 10_007
BYTES = 28


@program
def adam(g: R["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return update(w, w - lr * step)


def kernel(n: int, backend: str) -> Kernel:
    made = adam.on(mesh(dp=1), n=n)
    names = [x.name for x in made.nodes if x.op not in ("input", "scalar", "const")]
    return kernel_of(made, names, backend=backend)


def tensors(n: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(7)
    out = {k: torch.from_numpy(rng.normal(size=n).astype(np.float32)) for k in "gwmv"}
    out["v"].abs_()
    return out


def run(made: Kernel, given: dict[str, torch.Tensor], t: int) -> None:
    targets = dict(made.body.targets)
    out = [given[targets[name]] for name in made.outputs]
    made([given[name] for name in made.inputs], {"t": t, "lr": 1e-3}, out=out)


def fused(given: dict[str, torch.Tensor], t: int) -> None:
    g, w, m, v = ([given[name]] for name in "gwmv")
    torch._fused_adam_(
        w, g, m, v, [], [torch.tensor(float(t))], lr=1e-3, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def check() -> None:
    """Compare three steps of each with the interpreter's."""
    start = {name: x.double().numpy() for name, x in tensors(CHECKED).items()}
    numbers = {"t": lambda i: i + 1, "lr": 1e-3}
    want = interpret(adam.on(mesh(dp=1), n=CHECKED), start | numbers, iterations=3).states
    ways: dict[str, Callable[[dict[str, torch.Tensor], int], None]] = {"torch._fused_adam_": fused}
    for name in BACKENDS:
        made = kernel(CHECKED, name)
        ways[name] = lambda given, t, made=made: run(made, given, t)  # type: ignore[misc]
    for name, way in ways.items():
        given = tensors(CHECKED)
        for t in (1, 2, 3):
            way(given, t)
        off = max(np.abs(given[s].double().numpy() - want[s][0]).max() for s in "wmv")
        assert off < 1e-5, f"{name} is off by {off:.1e}"
        print(f"{name}: off by at most {off:.1e} after three steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check()
    n = 1 << (20 if options.quick else 23)
    given, other = tensors(n), torch.empty(n)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: other.copy_(given["g"])}
    for name in BACKENDS:
        made = kernel(n, name)
        begin = time.perf_counter()
        run(made, given, 1)
        print(f"{name}: the first call took {time.perf_counter() - begin:.1f} s")
        ways[name] = lambda made=made: run(made, given, 2)  # type: ignore[misc]
    ways["torch._fused_adam_"] = lambda: fused(given, 2)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            begin = time.thread_time()
            way()
            taken[name].append(time.thread_time() - begin)
    limit = median(taken.pop("copy")) / 8 * BYTES
    best = median(taken["torch._fused_adam_"])
    print(f"Adam, {n:,} elements, one thread; a copy of {BYTES} B each takes {limit * 1e3:.1f} ms")
    for name, times in taken.items():
        ms, eager = median(times) * 1e3, median(taken["eager"]) * 1e3
        print(
            f"{name:>20}: {ms:6.1f} ms, {eager / ms:5.1f}× eager, {best * 1e3 / ms:.2f}× torch's "
            f"own, {n * BYTES / ms / 1e6:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
