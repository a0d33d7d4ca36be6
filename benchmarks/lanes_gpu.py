"""Do a step's lanes overlap on a GPU, and can ranks on GPUs share one kernel?

    python -m benchmarks.lanes_gpu [--quick] [--rounds 10] [--only D6,peer] [--json FILE]

Needs one GPU, torch and Triton; of Penstock only the rooms `program` and `step`.

    D6      copies of batches to the device under a matrix product that takes as long as they do
    D8      the same plan on the CPU and on CUDA: same digest, same values; one rank
    ranks   the same with 2 and 4 processes on the GPU, over shared memory and over peer pointers
    checks  what tests/step/comms/test_peer.py does, where there is no pytest
    peer    a fused Adam of 1, 2 and 4 processes, as one kernel over the memory of all, and with
            its scatter, its kernel and its gather one after the other

Limits are measured in the same run: the copy alone, the product alone, a copy on the device.
"""

# ruff: noqa: F821, PLR0917 - dimensions are names, and programs have many parameters
import importlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed, multiprocessing

from benchmarks.gpu import SOURCES, Report, ask, stand_alone

stand_alone()
if importlib.util.find_spec("msgspec") is None:
    # Of the room of storage only a few numbers about memory are needed.
    _storage = types.ModuleType("penstock.storage")
    _storage.__path__ = [str(SOURCES / "penstock" / "storage")]
    sys.modules["penstock.storage"] = _storage

import penstock.step as ps  # noqa: E402
from penstock.step.program.blocks import mlp  # noqa: E402
from penstock.step.program.lower import host_nodes  # noqa: E402

ROOT = Path(__file__).parents[1]
HYPER = {"lr": 1e-3, "t": 3}


@ps.program
def adam(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, 0.9 * m + (1 - 0.9) * g)
    v = ps.update(v, 0.999 * v + (1 - 0.999) * g * g)
    step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return ps.update(w, w - lr * step)


@ps.program
def lamb(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, 0.9 * m + (1 - 0.9) * g)
    v = ps.update(v, 0.999 * v + (1 - 0.999) * g * g)
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * w
    a, b = ps.norm(w), ps.norm(u)
    return ps.update(w, w - lr * (a / b) * u)


@ps.program
def product(w: ps.R["d", "h", ps.bf16]):
    return ps.load("data.x", ps.R["t", "d", ps.bf16]) @ w


# -- the load lane -----------------------------------------------------------------------------


def wall_ms(work: Callable[[], object], count: int) -> float:
    """Return how long the device takes for one, of several asked for in a row."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / count


def d6(report: Report) -> None:
    rows, d = (8192 if report.quick else 32768), 4096
    pinned = [torch.randn(rows, d).bfloat16().pin_memory() for _ in range(3)]
    there = torch.empty(rows, d, dtype=torch.bfloat16, device="cuda")
    copy = lambda: there.copy_(pinned[0], non_blocking=True)  # noqa: E731
    copy()
    copy_ms = median(wall_ms(copy, 20) for _ in range(3))
    h = _balanced(there, d, copy_ms)
    w = torch.randn(d, h, device="cuda").bfloat16()
    y = torch.empty(rows, h, dtype=torch.bfloat16, device="cuda")
    plain = product.on(ps.mesh(dp=1), t=rows, d=d, h=h)
    name = next(node.name for node in plain.nodes if node.op == "load")
    programs = {"in a row": plain, "rotated": plain.rotate(name, 1)}
    steps: dict[str, ps.Step] = {}
    times: dict[str, list[float]] = {key: [] for key in (*programs, "copy", "product")}
    with ps.Groups(plain.mesh) as groups:
        for key, one in programs.items():
            source = itertools.cycle([{"x": x} for x in pinned])
            steps[key] = ps.compile(one, groups, sources={"data": source}, device="cuda")
            for x in pinned[:2]:
                (found,) = steps[key](w=w)
                expected = torch.matmul(x.cuda(), w)
                assert torch.equal(found, expected), f"{key}: another product"
        for _ in range(report.rounds):
            for key, step in steps.items():
                times[key].append(wall_ms(lambda step=step: step(w=w), 20))
            times["copy"].append(wall_ms(copy, 20))
            times["product"].append(wall_ms(lambda: torch.matmul(there, w, out=y), 20))
        for step in steps.values():
            step.close()
    found_ms = {key: median(taken) for key, taken in times.items()}
    _show_d6(report, found_ms, there.nbytes, (rows, d, h))


def _balanced(x: torch.Tensor, d: int, copy_ms: float) -> int:
    """Return how wide a product is that takes as long as a copy."""
    h = 8192
    for _ in range(3):
        w = torch.randn(d, h, device="cuda").bfloat16()
        y = torch.empty(x.shape[0], h, dtype=torch.bfloat16, device="cuda")
        torch.matmul(x, w, out=y)
        took = wall_ms(lambda w=w, y=y: torch.matmul(x, w, out=y), 20)
        h = max(256, round(h * copy_ms / took / 256) * 256)
    return h


def _show_d6(
    report: Report, ms: dict[str, float], size_bytes: int, shape: tuple[int, int, int]
) -> None:
    limit = max(ms["copy"], ms["product"])
    alone = ms["copy"] + ms["product"]
    strict = (alone - ms["rotated"]) / (alone - limit)
    ours = (ms["in a row"] - ms["rotated"]) / (ms["in a row"] - limit)
    rows, d, h = shape
    report.say(
        f"D6 load of {size_bytes / 1e6:.0f} MB ({size_bytes / ms['copy'] / 1e6:.1f} GB/s) under a "
        f"product {rows}×{d}×{h} bf16 ({2 * rows * d * h / ms['product'] / 1e9:.0f} TFLOP/s): copy "
        f"{ms['copy']:.3f} ms, product {ms['product']:.3f} ms; in a row {ms['in a row']:.3f} ms, "
        f"rotated {ms['rotated']:.3f} ms = {ms['in a row'] / ms['rotated']:.2f}× of in a row, "
        f"{limit / ms['rotated']:.1%} of the limit; overlap efficiency {strict:.1%} against both "
        f"alone, {ours:.1%} against in a row",
        D6={"ms": ms, "efficiency": strict, "efficiency_in_a_row": ours, "shape": shape},
    )


# -- the same plan ------------------------------------------------------------------------------


def plans(size: int, quick: bool = False) -> dict[str, tuple[ps.Program, dict[str, float]]]:
    n = 100_003
    sliced = adam.on(ps.mesh(dp=size), n=n).split("g").sink("g.gather").keep_sliced("m", "v")
    norms = lamb.on(ps.mesh(dp=size), n=n)
    layer = mlp.on(ps.mesh(tp=size), t=96, d=64, h=128)
    return {
        "adam, sharded": (sliced, HYPER),
        "adam, fused": (sliced.fuse("g.scatter", "w.gather"), HYPER),
        "adam, chunks overlapped": (sliced.chunk(4, "g.scatter", "w.gather").overlap(), HYPER),
        "lamb": (norms, HYPER),
        "lamb, sharded": (norms.split("g").sink("g.gather"), HYPER),
        "mlp": (layer, {"seed": 11}),
        "mlp, sharded": (layer.split("y").sink("y.gather"), {"seed": 11}),
    }


def inputs_of(program: ps.Program, rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank has: of what all have, the same on all."""
    out = {}
    for number, node in enumerate(node for node in program.inputs if node.op == "input"):
        made = node.type
        torch.manual_seed(number if not made.axes("P") else 100 + 10 * rank + number)
        whole = torch.randn(made.shape)
        bounds = made.bounds(program.mesh, rank)
        out[node.name] = whole[tuple(slice(a, b) for a, b in bounds)].clone()
        if node.name == "v":
            out[node.name].abs_()
    return out


def compared(rank: int, size: int, here: str, there: str) -> dict[str, Any]:
    """Run the same programs on the CPU and on CUDA; return digests and how far values are off."""
    out = {}
    for name, (program, scalars) in plans(size).items():
        digests, values = [], []
        for over, device, backend in ((here, "cpu", "tiled"), (there, "cuda", "auto")):
            given = {k: x.to(device) for k, x in inputs_of(program, rank).items()}
            axis = program.mesh.names[0]
            with ps.Groups(program.mesh, backend=over or None, shared="128MB") as groups:
                for key in ("g", "w") if over and name == "adam, fused" else ():
                    given[key] = groups.take(given[key].numel(), axis=axis).copy_(given[key])
                how = {"backend": backend, "device": device}
                with ps.compile(program, groups, **how) as step:
                    for _ in range(3):
                        results = step(**given, **scalars)
                    digests.append(step.plan.digest)
                    kept = [*results, *(given[s] for s in program.states)]
                    values.append([x.cpu().clone() for x in kept])
                given.clear()
        pairs = list(zip(*values, strict=True))
        offs = [(a - b).norm().item() / max(1e-30, a.norm().item()) for a, b in pairs]
        bits = all(torch.equal(a, b) for a, b in pairs)
        out[name] = {"digest": digests[0] == digests[1], "off": max(offs), "bits": bits}
    return out


def _show_compared(report: Report, name: str, found: list[dict[str, Any]]) -> None:
    for key in found[0]:
        ranks = [one[key] for one in found]
        digest, bits = all(r["digest"] for r in ranks), all(r["bits"] for r in ranks)
        off = max(r["off"] for r in ranks)
        assert digest, f"{key}: other digests on the CPU and on CUDA"
        assert off < 2e-6, f"{key}: off by {off:.1e}"
        print(f"   {name}: {key}: same digest, off by {off:.1e}{' (same bits)' * bits}", flush=True)
    report.data[name] = found


def d8(report: Report) -> None:
    _show_compared(report, "D8, 1 rank", [compared(0, 1, "", "")])


def ranks_question(report: Report) -> None:
    for size in (2, 4):
        found = run_ranks("benchmarks.lanes_gpu:compared", size, "shm", "peer")
        _show_compared(report, f"D8, {size} ranks, shm on the CPU and peer on CUDA", found)


# -- what the tests do ---------------------------------------------------------------------------


def checks(report: Report) -> None:
    some = ["adam, fused", "adam, overlapped", "lamb, sharded", "mlp, sharded"]
    both: list[Asked] = [("operations", (waits,)) for waits in (False, True)]
    whole: list[Asked] = [("programs", ("peer", "eager", []))]
    kernels: list[Asked] = [("programs", ("peer", "auto", some)), ("fused", (100_003, "triton"))]
    alone: list[Asked] = [("programs", (over, "eager", [])) for over in ("", "nccl", "peer")]
    failed = 0
    for size, asked in {
        1: [*alone, *kernels],
        2: [*both, *whole, *kernels],
        3: both,
        4: [*whole, ("fused", (2, "triton"))],
    }.items():
        calls = [(f"tests.step.comms.peer_work:{name}", args) for name, args in asked]
        try:
            found = run_all(size, calls)
        except Exception as error:
            failed += 1
            print(f"   FAILED on {size} ranks: {str(error)[-3000:]}", flush=True)
            continue
        for (name, args), results in zip(asked, found, strict=True):
            wrong = [
                one for one in results if (max(one.values()) > 3e-6 if name == "fused" else one)
            ]
            failed += bool(wrong)
            word = f"WRONG: {wrong}" if wrong else "right"
            print(f"   {name} on {size} ranks {args}: {word}", flush=True)
    report.data["checks_failed"] = failed
    assert not failed, f"{failed} checks failed"


# -- one kernel for all ranks --------------------------------------------------------------------


def _computed(program: ps.Program) -> list[str]:
    """Return all that is computed between the scatter and the gather: one kernel, and no less."""
    out = {*host_nodes(program), *program.outputs}
    leaves = ("input", "scalar", "const", "reduce_scatter", "all_gather")
    return [n.name for n in program.nodes if n.op not in leaves and n.name not in out]


def speed(rank: int, size: int, n: int, rounds: int) -> dict[str, Any]:
    """Run Adam over peer pointers, fused and in three parts; return milliseconds of a step."""
    sliced = adam.on(ps.mesh(dp=size), n=n).split("g").sink("g.gather").keep_sliced("m", "v")
    made = {
        "fused": sliced.fuse("g.scatter", "w.gather"),
        "in parts": sliced.fuse(*_computed(sliced)),
    }
    times: dict[str, list[float]] = {key: [] for key in made}
    with ps.Groups(sliced.mesh, backend="peer", shared=2 * 4 * n + (256 << 20)) as groups:
        given = {key: groups.take(n, axis="dp") for key in "gw"}
        torch.manual_seed(rank)
        given["g"].normal_()
        shape = sliced["m"].type.local_shape(sliced.mesh, rank)
        given |= {key: torch.zeros(shape, device="cuda") for key in "mv"}
        steps = {key: ps.compile(one, groups, device="cuda") for key, one in made.items()}
        comm = groups.comm("dp", "time")
        assert [len(step.plan.tasks) for step in steps.values()] == [1, 4]
        for key in [*made] * 2:
            steps[key](**given, **HYPER)
        for _, key in itertools.product(range(rounds), made):
            comm.barrier()
            times[key].append(wall_ms(lambda key=key: steps[key](**given, **HYPER), 10))
        comm.barrier()
        everyones = [float(one.double().sum()) for one in comm.everyones(given["w"])]
        for step in steps.values():
            step.close()
        comm.barrier()
        given.clear()
    return {"times": times, "sums": everyones, "rank": rank}


def _copy_rate(length: int) -> float:
    """Return bytes a millisecond, read and written."""
    one, other = (torch.empty(length, device="cuda") for _ in range(2))
    other.copy_(one)
    return 2 * 4 * length / median(wall_ms(lambda: other.copy_(one), 10) for _ in range(3))


def peer(report: Report) -> None:
    rate = _copy_rate(1 << (26 if report.quick else 29))
    report.say(f"limit: a copy on the device moves {rate / 1e9:.2f} TB/s")
    torch.cuda.empty_cache()
    # One process shows what the kernel and its start take; more of them take turns on the GPU.
    for size in (1, 2, 4):
        n = 1 << (24 if report.quick else 28)
        found = run_ranks("benchmarks.lanes_gpu:speed", size, n, report.rounds)
        sums = {value for one in found for value in one["sums"]}
        assert len(sums) == 1, f"ranks have other weights: {sums}"
        slowest = {
            key: median(map(max, zip(*(one["times"][key] for one in found), strict=True)))
            for key in found[0]["times"]
        }
        limit = n * (8 * size + 20) / rate
        report.say(
            f"peer: Adam of {n:,} elements on {size} processes of one GPU, {8 * size + 20} B for "
            f"each element of a slice: one kernel {slowest['fused']:.3f} ms = "
            f"{limit / slowest['fused']:.1%} of the copy limit ({limit:.3f} ms); scatter, kernel, "
            f"gather {slowest['in parts']:.3f} ms "
            f"({slowest['in parts'] / slowest['fused']:.2f}×)",
            **{f"peer_{size}": {"ms": slowest, "limit_ms": limit}},
        )


# -- ranks ---------------------------------------------------------------------------------------


Asked = tuple[str, tuple[Any, ...]]


def run_ranks(name: str, size: int, *args: Any) -> list[Any]:
    """Call a function, `module:name`, on processes with a gloo group; return what each returned."""
    return run_all(size, [(name, args)])[0]


def run_all(size: int, calls: list[Asked]) -> list[list[Any]]:
    """Call functions one after the other on the same processes."""
    with tempfile.TemporaryDirectory(prefix="penstock-lanes-") as folder:
        multiprocessing.spawn(_rank, args=(size, folder, calls), nprocs=size)
        found = [json.loads(Path(folder, f"{rank}").read_text()) for rank in range(size)]
        return [list(results) for results in zip(*found, strict=True)]


def _rank(rank: int, size: int, folder: str, calls: list[Asked]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ours, not a package of that name that somebody has installed.
    tests = sys.modules["tests"] = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = []
    for name, args in calls:
        module, _, function = name.partition(":")
        work = getattr(importlib.import_module(module), function)
        try:
            with torch.no_grad():
                found.append(work(rank, size, *args))
        except BaseException:
            # The first that fails is the one to tell about: the others say that it is gone.
            print(f"rank {rank} of {size}, {function} {args}:", flush=True)
            traceback.print_exc()
            raise
    Path(folder, f"{rank}").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


QUESTIONS = {"D8": d8, "D6": d6, "checks": checks, "ranks": ranks_question, "peer": peer}


if __name__ == "__main__":
    ask(__doc__.splitlines()[0], QUESTIONS, rounds=10)
