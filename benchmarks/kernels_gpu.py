"""How close do generated CUDA kernels come to the memory's own speed, and to torch's kernels?

    python -m benchmarks.kernels_gpu [--quick] [--rounds 20] [--only D1,D4] [--json FILE]

Needs one GPU, torch and Triton; of Penstock only the rooms `program` and `step`, so the packages of
data loading may be missing. The limit is a copy on the same device in the same run: bytes that a
kernel must move, over the rate of that copy. Values are checked before anything is timed.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.gpu import Report, ask, stand_alone

stand_alone()

from penstock.step.kernels.regions import Kernel, kernel_of  # noqa: E402
from penstock.step.program import P, R, S, bf16, mesh, program  # noqa: E402
from penstock.step.program.language import (  # noqa: E402
    all_gather,
    cast,
    dropout,
    layer_norm,
    minimum,
    norm,
    reduce_scatter,
    update,
    where,
)
from penstock.step.program.nodes import Program  # noqa: E402

HYPER = {"lr": 1e-3, "t": 3}
SLEEP_CYCLES = 4_000_000


@program
def adam(g: R["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return update(w, w - lr * step)


@program
def clipped(
    g: R["n"], w: R["n"], m: R["n"], v: R["n"], half: R["n", bf16], size: R[()], t, lr, unscale
):
    g = g * (unscale * minimum(1.0 / (size * unscale + 1e-6), 1.0))
    m = update(m, 0.9 * m + (1 - 0.9) * g)
    v = update(v, 0.999 * v + (1 - 0.999) * g * g)
    w = update(w, w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
    return update(half, cast(w, bf16))


@program
def sharded(g: P["n", bf16], w: S(0)["n"], m: S(0)["n"], v: S(0)["n"], half: R["n", bf16], t, lr):
    g = reduce_scatter(g, "mean")
    m = update(m, 0.9 * m + (1 - 0.9) * g)
    v = update(v, 0.999 * v + (1 - 0.999) * g * g)
    w = update(w, w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
    return update(half, all_gather(cast(w, bf16)))


@program
def epilogue(
    x: R["t", "d", bf16],
    bias: R["d", bf16],
    rest: R["t", "d", bf16],
    scale: R["d", bf16],
    shift: R["d", bf16],
    seed: int,
):
    return layer_norm(dropout(x + bias, 0.1, seed) + rest, scale, shift)


@program
def lamb(g: R["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, decay=0.01):
    m = update(m, 0.9 * m + (1 - 0.9) * g)
    v = update(v, 0.999 * v + (1 - 0.999) * g * g)
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * w
    a, b = norm(w), norm(u)
    trust = where(a > 0.0, where(b > 0.0, a / b, 1.0), 1.0)
    return update(w, w - lr * trust * u)


def computed(made: Program) -> list[str]:
    return [n.name for n in made.nodes if n.op not in ("input", "scalar", "const")]


def whole_kernel(made: Program, backend: str) -> Kernel:
    return kernel_of(made, computed(made), backend=backend)


def run(kernel: Kernel, given: dict[str, Any], scalars: dict[str, float]) -> list[Any]:
    """Run a kernel in place: what it updates lies where the state lies."""
    targets = dict(kernel.body.targets)
    out = [given.get(targets.get(name, "")) for name in kernel.outputs]
    return kernel([given[name] for name in kernel.inputs], scalars, out=out)


# -- measuring ---------------------------------------------------------------------------------


def timed(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each, measured in turns."""
    for function in functions.values():
        function()
        function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # While the device sleeps the host runs ahead: what it takes to start is not counted.
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            function()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: median(times) for name, times in taken.items()}


class Beside(Report):
    """What was found, beside the time of a copy."""

    def __init__(self, rounds: int, quick: bool) -> None:
        super().__init__(rounds, quick)
        size = 1 << (26 if quick else 29)
        a, b = (torch.empty(size, dtype=torch.float32, device="cuda") for _ in range(2))
        ms = timed({"copy": lambda: b.copy_(a)}, rounds)["copy"]
        self.bytes_per_ms = 2 * 4 * size / ms
        print(
            f"limit: a copy moves {self.bytes_per_ms / 1e9:.2f} TB/s ({2 * 4 * size / 1e9:.1f} GB)"
        )
        self.data["copy_TB_s"] = self.bytes_per_ms / 1e9

    def show(self, name: str, what: str, size_bytes: int, times: dict[str, float]) -> None:
        limit = size_bytes / self.bytes_per_ms
        ours = times["ours"]
        others = ", ".join(
            f"{key} {ms:.3f} ms ({ms / ours:.2f}×)" for key, ms in times.items() if key != "ours"
        )
        print(
            f"{name} {what}: ours {ours:.3f} ms = {limit / ours:.1%} of the copy limit "
            f"({limit:.3f} ms); {others}"
        )
        self.data[name] = {"of_copy": limit / ours, "ms": times, "limit_ms": limit}


def close(got: torch.Tensor, want: torch.Tensor, limit: float, what: str) -> str:
    got, want = got.double().cpu(), want.double().cpu()
    off = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    assert off <= limit, f"{what}: off by {off:.2e}, allowed {limit:.0e}"
    return f"{what} {off:.1e}"


def tensors(n: int, names: str = "gwmv", seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    out = {name: torch.randn(n, device="cuda") for name in names}
    out["v"].abs_()
    return out


def copied(given: dict[str, Any], device: str = "cuda", dtype: Any = None) -> dict[str, Any]:
    return {
        name: [x.to(device, dtype, copy=True) for x in one]
        if isinstance(one, list)
        else one.to(device, dtype, copy=True)
        for name, one in given.items()
    }


def check(made: Program, given: dict[str, Any], scalars: dict[str, float], limit: float) -> None:
    """Compare our kernel's states with the same kernel's in eager float64 on the CPU."""
    ours, theirs = copied(given), copied(given, "cpu")
    first = run(whole_kernel(made, "triton"), ours, scalars)
    second = run(whole_kernel(made, "eager"), theirs, scalars)
    said = []
    for name, a, b in zip(whole_kernel(made, "eager").outputs, first, second, strict=True):
        for x, y in zip(
            a if isinstance(a, list) else [a], b if isinstance(b, list) else [b], strict=True
        ):
            said.append(close(x, y, limit, name))
            same = torch.equal(x.cpu(), y)
        said[-1] += " (same bits)" if same else ""
    print(f"   values of {made.name}, ours on CUDA against eager on the CPU: {', '.join(said)}")


# -- the questions -----------------------------------------------------------------------------


def d1(report: Beside) -> None:
    n = 1 << (24 if report.quick else 28)
    check(adam.on(mesh(dp=1), n=(1 << 20) + 17), tensors((1 << 20) + 17), HYPER, 1e-6)
    made = adam.on(mesh(dp=1), n=n)
    ours, given = whole_kernel(made, "triton"), tensors(n)
    g, w, m, v = (given[name] for name in "gwmv")
    step = torch.tensor(3.0, device="cuda")

    def fused() -> None:
        torch._fused_adam_(
            [w], [g], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def plain(g: Any, w: Any, m: Any, v: Any, c1: float = 0.271, c2: float = 0.002997) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        w.sub_(1e-3 * (m / c1) / ((v / c2).sqrt() + 1e-8))

    compiled = torch.compile(plain)
    times = timed(
        {
            "ours": lambda: run(ours, given, HYPER),
            "torch._fused_adam_": fused,
            "torch.compile": lambda: compiled(g, w, m, v),
            "eager": lambda: plain(g, w, m, v),
        },
        report.rounds,
    )
    report.show("D1", f"Adam, float32, {n:,} elements, 28 B each", 28 * n, times)


def d2(report: Beside) -> None:
    small = (1 << 20) + 3
    scalars = HYPER | {"unscale": 1 / 1024}

    def of(n: int) -> dict[str, Any]:
        given = tensors(n)
        given["g"] *= 1024
        size = given["g"].norm()
        return given | {"half": given["w"].bfloat16(), "size": size}

    check(clipped.on(mesh(dp=1), n=small), of(small), scalars, 1e-5)
    n = 1 << (24 if report.quick else 28)
    made, given = clipped.on(mesh(dp=1), n=n), of(n)
    ours = whole_kernel(made, "triton")
    g, w, m, v, half, size = (given[k] for k in ("g", "w", "m", "v", "half", "size"))
    step = torch.tensor(3.0, device="cuda")

    def separate() -> None:
        g.mul_(1.0)
        g.mul_((1.0 / (size + 1e-6)).clamp(max=1.0).clamp(min=1.0))
        torch._fused_adam_(
            [w], [g], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        half.copy_(w)

    times = timed(
        {"ours": lambda: run(ours, given, scalars), "separate torch kernels": separate},
        report.rounds,
    )
    report.show("D2", f"unscale, clip, Adam, bf16 copy, {n:,} elements, 30 B", 30 * n, times)


def d3(report: Beside) -> None:
    num_ranks, part = 8, 1 << (20 if report.quick else 24)

    def of(n: int, seed: int) -> dict[str, Any]:
        given: dict[str, Any] = tensors(n, "wmv", seed)
        given["g"] = [torch.randn(n, device="cuda").bfloat16() for _ in range(num_ranks)]
        given["half"] = [torch.zeros(n, device="cuda").bfloat16() for _ in range(num_ranks)]
        return given

    small = 8 * 4099
    # A kernel works on one rank's slice: what it is given of each rank is that slice.
    check(sharded.on(mesh(dp=num_ranks), n=small), of(small // 8, 1), HYPER, 1e-2)
    made = sharded.on(mesh(dp=num_ranks), n=num_ranks * part)
    ours, given = whole_kernel(made, "triton"), of(part, 2)
    w, m, v, step = given["w"], given["m"], given["v"], torch.tensor(3.0, device="cuda")

    def separate() -> None:
        g = given["g"][0].float()
        for one in given["g"][1:]:
            g += one
        g /= num_ranks
        torch._fused_adam_(
            [w], [g], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        for one in given["half"]:
            one.copy_(w)

    times = timed(
        {"ours": lambda: run(ours, given, HYPER), "separate torch kernels": separate},
        report.rounds,
    )
    what = (
        f"sum of {num_ranks} bf16 gradients, Adam, to {num_ranks} bf16 weights, {part:,} elements"
    )
    report.show("D3", f"{what}, 56 B", 56 * part, times)
    print(f"   {part / times['ours'] / 1e6:.1f} G elements/s")


def d4(report: Beside) -> None:
    rows, d = (1 << (12 if report.quick else 15)), 4096

    def of(rows: int, d: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        shapes = {"x": (rows, d), "bias": (d,), "rest": (rows, d), "scale": (d,), "shift": (d,)}
        return {k: torch.randn(s, device="cuda").bfloat16() for k, s in shapes.items()}

    check(epilogue.on(mesh(dp=1), t=257, d=1000), of(257, 1000), {"seed": 2**40 + 5}, 1e-2)
    made = epilogue.on(mesh(dp=1), t=rows, d=d)
    given = of(rows, d)
    ours = whole_kernel(made, "triton")
    x, bias, rest, scale, shift = given.values()
    room = torch.empty_like(x)
    order = [given[name] for name in ours.inputs]

    def plain(x: Any, bias: Any, rest: Any, scale: Any, shift: Any) -> Any:
        return F.layer_norm(F.dropout(x + bias, 0.1, True) + rest, (d,), scale, shift)

    compiled = torch.compile(plain)
    times = timed(
        {
            "ours": lambda: ours(order, {"seed": 7}, out=[room]),
            "torch.compile": lambda: compiled(x, bias, rest, scale, shift),
            "eager": lambda: plain(x, bias, rest, scale, shift),
        },
        report.rounds,
    )
    what = f"bias, dropout, residual, layer norm, {rows}×{d} bf16, 6 B"
    report.show("D4", what, 6 * rows * d, times)
    begin = time.perf_counter()
    for _ in range(100):
        ours(order[:], {"seed": 7}, out=[room])
    host = (time.perf_counter() - begin) / 100
    torch.cuda.synchronize()
    print(f"   the host takes at most {host * 1e6:.0f} µs to start a kernel")


def d5(report: Beside) -> None:
    n, num_chunks = (2048 if report.quick else 8192), 8
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    whole, parts = (torch.empty(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    size = n // num_chunks

    def chunked() -> None:
        for k in range(0, n, size):
            torch.mm(a[k : k + size], b, out=parts[k : k + size])

    times = timed({"ours": chunked, "whole": lambda: torch.mm(a, b, out=whole)}, report.rounds)
    close(parts, whole, 1e-2, "chunks")
    rate = 2 * n**3 / times["whole"] / 1e9
    print(
        f"D5 matmul {n}³ bf16: whole {times['whole']:.3f} ms ({rate:.0f} TFLOP/s), in {num_chunks} "
        f"row chunks {times['ours']:.3f} ms: {times['ours'] / times['whole'] - 1:+.1%}"
    )
    report.data["D5"] = {"loss": times["ours"] / times["whole"] - 1, "ms": times}


def d7(report: Beside) -> None:
    check(lamb.on(mesh(dp=1), n=(1 << 20) + 5), tensors((1 << 20) + 5), HYPER, 1e-5)
    n = 1 << (24 if report.quick else 27)
    made, given = lamb.on(mesh(dp=1), n=n), tensors(n)
    ours = whole_kernel(made, "triton")
    names = computed(made)
    at = names.index("u") + 1
    first = kernel_of(made, names[:at], backend="triton")
    rest = [name for name in names[at:] if made[name].type.ndim]
    last = kernel_of(made, rest, outputs=made.outputs, backend="triton")
    g, w, m, v = (given[name] for name in "gwmv")
    u = torch.empty_like(w)

    def sequence() -> None:
        targets = dict(first.body.targets)
        out = [given.get(targets.get(name, ""), u) for name in first.outputs]
        first([given[name] for name in first.inputs], HYPER, out=out)
        trust = torch.linalg.vector_norm(w) / torch.linalg.vector_norm(u)
        held = {"w": w, "u": u}
        last([held.get(name, trust) for name in last.inputs], HYPER, out=[w])

    def plain() -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        u = (m / 0.271) / ((v / 0.002997).sqrt() + 1e-6) + 0.01 * w
        trust = torch.linalg.vector_norm(w) / torch.linalg.vector_norm(u)
        w.sub_(1e-3 * trust * u)

    times = timed(
        {
            "ours": lambda: run(ours, given, HYPER),
            "Apex's sequence, in our kernels": sequence,
            "eager": plain,
        },
        report.rounds,
    )
    report.show("D7", f"LAMB in two passes, {n:,} elements, 40 B", 40 * n, times)


def d8(report: Beside) -> None:
    n = 100_003
    cpu, gpu = adam.on(mesh(dp=1), n=n), adam.on(mesh(dp=1), n=n)
    here, there = copied(tensors(n), "cpu"), copied(tensors(n))
    slow, fast = whole_kernel(cpu, "auto"), whole_kernel(gpu, "triton")
    for t in range(1, 6):
        run(slow, here, {"lr": 1e-3, "t": t})
        run(fast, there, {"lr": 1e-3, "t": t})
    same = {name: torch.equal(here[name], there[name].cpu()) for name in "wmv"}
    digest = cpu.digest == gpu.digest
    print(f"D8 five steps of Adam, CPU against CUDA: same digest {digest}, same bits {same}")
    assert digest
    for name in "wmv":
        close(there[name], here[name], 1e-6, name)
    report.data["D8"] = {"digest": digest, "bits": same}


QUESTIONS = {"D8": d8, "D1": d1, "D2": d2, "D3": d3, "D4": d4, "D7": d7, "D5": d5}


if __name__ == "__main__":
    ask(__doc__.splitlines()[0], QUESTIONS, Beside, rounds=20)
