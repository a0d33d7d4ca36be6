"""Random programs and rewrites on real ranks: one rank, and what starts them.

    python -m benchmarks.program_fuzz --ranks 3 --seconds 60

Every rank makes the same program and schedule from the seed and carries it out several times, so
that states, donated memory and what is begun ahead come round. A seed also says the backends:

    gloo or shm       by axis of the mesh
    eager, tiled      what is there without a compiler
    auto              our own C, where there is a compiler

The first rank brings together what all have and compares it with the interpreter's run of the
program as written. Every second program has rewrites that only move work, and is carried out as it
is written, too: those two have the same bits, unless something is rounded that may come in another
order (`is_exact`). What ranks hold alike is the same on all of them to
the bit; inputs that were not donated, and what earlier iterations have returned, stay as they were.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import numpy as np
import torch
from testkit.programs import Sample, random_program
from testkit.rewrites import ARGUMENTS, applied, random_rewrite, refused, wholes
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import started
from penstock.errors import PenstockError
from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.native import c_compiler
from penstock.step.program.interpret import Outcome
from penstock.step.program.nodes import Program
from penstock.step.program.ops import is_move
from penstock.testing.ports import HOST, free_ports

ITERATIONS = 3
AHEAD_MAX = 9
"""Batches of a source beyond those: rewrites may rotate a load several times."""
MOVES_ONLY = ("split", "keep_sliced", "dead", "reshard", "fuse", "chunk", "overlap", "bucket")
APPROXIMATE = ("sigmoid", "tanh", "gelu", "exp", "softmax")
TOO_LARGE = 1e30
"""Beyond this a float32 may overflow on the way."""
GROUP_TIMEOUT_S = 30.0
GROUPS_KEPT = 40
"""Programs, after which groups are opened anew."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a seed makes, the same on all ranks."""

    seed: int
    sample: Sample
    program: Program
    is_exact: bool
    kernels: str
    comms: dict[str, str]
    donate: tuple[str, ...]

    def __str__(self) -> str:
        how = f"kernels {self.kernels}, comms {self.comms}, donated {self.donate}"
        return f"{self.sample.program}\n{self.program}\n{self.program.script()}{how}"


@dataclass(kw_only=True)
class Made:
    """What one rank has in the end."""

    outputs: list[Any] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, list[Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def case_of(seed: int, size: int, only: list[str]) -> Case:
    """Return the program, the schedule and the backends of a seed."""
    rng = Random(seed)
    meshes = [{"dp": size}]
    meshes += [{"dp": k, "tp": size // k} for k in range(2, size) if size % k == 0]
    only_moves = seed % 2 == 1 and not only
    sample = random_program(rng, num_ops=rng.randint(4, 20), sums=not only_moves, meshes=meshes)
    names = only or (list(MOVES_ONLY) if only_moves else list(ARGUMENTS))
    program = sample.program
    for _ in range(rng.randint(2, 12)):
        step = random_rewrite(rng, program, names)
        program = (applied(program, step) if step else None) or program
    kept = [n.name for n in program.inputs if n.op == "input" and n.name not in program.states]
    kernels = ["eager", "tiled"] if only_moves else ["eager", "tiled", "auto"]
    return Case(
        seed=seed,
        sample=sample,
        program=program,
        is_exact=only_moves and is_exact(program),
        kernels=rng.choice(kernels),
        comms={axis: rng.choice(("gloo", "shm")) for axis in program.mesh.names},
        donate=tuple(name for name in kept if rng.random() < 0.3),
    )


def is_exact(program: Program) -> bool:
    """Whether moving work about leaves every bit as it is.

    Sums of three ranks depend on who comes first, and torch computes functions in the last bit as
    tensors lie in memory. Values of 16 bits are rounded where they leave a kernel.
    """
    sums = [n for n in program.nodes if is_move(n.op) and n.attr("op", None) in ("sum", "mean")]
    return (
        not is_narrow(program)
        and all(program.mesh.size(*node.axes) < 3 for node in sums)
        and not any(node.op in APPROXIMATE for node in program.nodes)
    )


def is_narrow(program: Program) -> bool:
    """Whether values are rounded to 16 bits on the way."""
    return any(n.type.dtype in ("bf16", "f16") or n.attr("wire", None) for n in program.nodes)


# -- one rank ------------------------------------------------------------------------------------


def carried_out(case: Case, program: Program, groups: ps.Groups, donate: tuple[str, ...]) -> Made:
    """Return what this rank has after a few iterations."""
    rank, made = groups.rank, Made()
    given = {
        node.name: torch.tensor(np.array(held[rank]), dtype=torch_dtype(node.type.dtype))
        for node in program.inputs
        if node.op == "input"
        for held in (case.sample.given(program)[node.name],)
    }
    before = {name: tensor.clone() for name, tensor in given.items()}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    errors: list[Exception] = []
    options: dict[str, Any] = {"backend": case.kernels, "donate": donate}
    options["sources"] = sources_of(case, program, rank)
    with ps.compile(program, groups, calls=stores_of(program, made), **options) as step:
        step.go_on_after_errors(errors.append)
        for iteration in range(ITERATIONS):
            again = {name: before[name].clone() for name in donate}
            outputs = step(**given | again | numbers_at(case.sample, program, iteration))
            kept += [(one, one.clone()) for one in outputs if not is_given(one, given | again)]
    made.outputs = [array(one) for one in outputs]
    made.states = {name: array(given[name]) for name in program.states}
    made.wrong = [f"{type(error).__name__}: {error}" for error in errors[:1]]
    for name in given.keys() - program.states.keys() - set(donate):
        if not torch.equal(given[name], before[name]):
            made.wrong.append(f"input {name} was written over")
    if any(not same(array(one), array(copy)) for one, copy in kept):
        made.wrong.append("what an iteration returned was written over by a later one")
    return made


def numbers_at(sample: Sample, program: Program, iteration: int) -> dict[str, float]:
    """Return the scalars of an iteration."""
    wanted = {node.name for node in program.inputs}
    return {name: value + iteration for name, value in sample.numbers.items() if name in wanted}


def sources_of(case: Case, program: Program, rank: int) -> dict[str, list[torch.Tensor]]:
    """Return batches as a rank has them, by source."""
    out = {}
    for node in (n for n in program.nodes if n.op == "load"):
        name, dtype = str(node.attr("source")), torch_dtype(node.type.dtype)
        at = tuple(slice(*bound) for bound in node.type.bounds(program.mesh, rank))
        batches = [case.sample.sources[name](k)[at] for k in range(ITERATIONS + AHEAD_MAX)]
        out[name] = [torch.tensor(np.array(batch), dtype=dtype) for batch in batches]
    return out


def stores_of(program: Program, made: Made) -> dict[str, Callable[[torch.Tensor], None]]:
    """Return functions that keep what is stored."""

    def keeper(place: str) -> Callable[[torch.Tensor], None]:
        made.stored[place] = []
        return lambda value: made.stored[place].append(array(value.clone()))

    return {place: keeper(place) for place in places_of(program)}


def places_of(program: Program) -> list[str]:
    return [str(node.attr("place")) for node in program.nodes if node.op == "store"]


def is_given(tensor: torch.Tensor, given: dict[str, torch.Tensor]) -> bool:
    """Whether somebody gave this memory."""
    theirs = {one.untyped_storage().data_ptr() for one in given.values() if one.numel()}
    return tensor.untyped_storage().data_ptr() in theirs


def array(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def same(one: Any, other: Any) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


class Opened:
    """Groups that are open, by mesh and backends; made anew now and then."""

    def __init__(self) -> None:
        self._stack, self._open, self._count = ExitStack(), {}, 0

    def get(self, program: Program, comms: dict[str, str]) -> ps.Groups:
        self._count += 1
        if self._count % GROUPS_KEPT == 0:
            self.close()
        key = (program.mesh, tuple(sorted(comms.items())))
        if key not in self._open:
            groups = ps.Groups(program.mesh, backend=comms, shared="1MB")
            self._open[key] = self._stack.enter_context(groups)
        return self._open[key]

    def close(self) -> None:
        self._stack.close()
        self._open.clear()


# -- what all ranks have -----------------------------------------------------------------------


def together(program: Program, everyones: list[Made]) -> dict[str, list[Any]]:
    """Return everything whole; what ranks have alike is compared on the way."""
    mesh, out = program.mesh, {}
    for k, name in enumerate(program.outputs):
        held = [made.outputs[k] for made in everyones]
        out[f"output {k}"] = wholes(held, program[name].type, mesh)
    for state, last in program.states.items():
        held = [made.states[state] for made in everyones]
        out[f"state {state}"] = wholes(held, program[last].type, mesh)
    for node in (n for n in program.nodes if n.op == "store"):
        place = str(node.attr("place"))
        for k in range(ITERATIONS):
            held = [made.stored[place][k] for made in everyones]
            out[f"stored {place} {k}"] = wholes(held, node.type, mesh)
    return out


def expected_of(case: Case) -> tuple[dict[str, list[Any]], float]:
    """Return what the interpreter has of the program as written, and its largest number."""
    sample, program = case.sample, case.sample.program
    numbers = {name: lambda k, n=value: n + k for name, value in sample.numbers.items()}
    with np.errstate(all="ignore"):
        outcome: Outcome = ps.interpret(
            program,
            sample.given(program) | numbers,
            iterations=ITERATIONS,
            sources=sample.sources,
        )
    ranks = [
        Made(
            outputs=[held[rank] for held in outcome.outputs],
            states={name: held[rank] for name, held in outcome.states.items()},
            stored={p: [held[rank] for held in helds] for p, helds in outcome.stored.items()},
        )
        for rank in range(program.mesh.num_ranks)
    ]
    found = [one for held in outcome.values.values() for one in held if one.size]
    largest = max((float(np.abs(one.astype(float)).max()) for one in found), default=0.0)
    return together(program, ranks), largest


def differences(case: Case, everyones: list[Made], as_written: list[Made] | None) -> list[str]:
    """Return what is not as it should be."""
    out = [f"rank {r}: {why}" for r, made in enumerate(everyones) for why in made.wrong]
    if out:
        return out
    try:
        found = together(case.program, everyones)
        expected, largest = expected_of(case)
        written = together(case.sample.program, as_written) if as_written else None
    except AssertionError as error:
        return [str(error)]
    if not largest < TOO_LARGE:
        return []
    bound = (3e-2 if is_narrow(case.program) else 2e-5) * max(1.0, largest)
    for name, parts in expected.items():
        pairs = list(zip(found[name], parts, strict=True))
        off = max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)
        if not off <= bound:
            out.append(f"{name} is off by {off}, more than {bound}")
        elif written and not all(map(same, found[name], written[name])):
            out.append(f"{name} has not the bits of the program as written")
    return out


def tried(case: Case, opened: Opened) -> list[str]:
    """Carry out a case on all ranks; the first returns what is wrong."""
    as_written: list[Made] | None = None
    if case.is_exact:
        plain = case.sample.program
        groups = opened.get(plain, case.comms)
        as_written = gathered(carried_out(case, plain, groups, ()))
    groups = opened.get(case.program, case.comms)
    try:
        made = carried_out(case, case.program, groups, case.donate)
    except PenstockError as error:
        # Legal, and refused all the same; by all ranks, or they wait for each other.
        opened.close()
        made = Made(wrong=[f"{type(error).__name__}: {error}"])
    everyones = gathered(made)
    if distributed.get_rank():
        return []
    return differences(case, everyones, as_written)


def gathered(made: Made) -> list[Made]:
    out: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(out, made)
    return out


def goes_on(is_over: bool) -> bool:
    """Whether the first rank wants more."""
    said = [not is_over]
    distributed.broadcast_object_list(said, 0)
    return said[0]


def be_rank(args: argparse.Namespace) -> int:
    """Try one program after the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    rank, size = distributed.get_rank(), distributed.get_world_size()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    opened, begun, seed = Opened(), time.monotonic(), args.seed
    is_over = False
    while goes_on(is_over):
        try:
            found = one_of(seed, size, args.only, opened, counts)
        except Exception:
            print(f"seed {seed}, rank {rank}: {traceback.format_exc()}", flush=True)
            os._exit(1)
        if found:
            failed.append(seed)
            print(f"seed {seed}:", "\n".join(found[-1:] if args.go_on else found), flush=True)
        seed += 1
        is_late = time.monotonic() - begun > args.seconds
        is_over = is_late or seed >= args.seed + args.programs or bool(failed and not args.go_on)
    opened.close()
    if rank == 0:
        said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        print(f"{size} ranks, {seed - args.seed} programs ({said}), {len(failed)} differ")
        print("a C compiler is there" if c_compiler() else "no C compiler: auto is tiled")
    distributed.barrier()
    distributed.destroy_process_group()
    return 1 if failed else 0


def one_of(
    seed: int, size: int, only: list[str], opened: Opened, counts: Counter[str]
) -> list[str]:
    """Make and try the program of a seed."""
    case = case_of(seed, size, only)
    if refused(case.sample.program):
        counts["without a plan"] += 1
        return []
    if why := refused(case.program):
        return [str(case), f"there is no plan any more: {why}"]
    counts[f"with {case.kernels} kernels"] += 1
    counts["to the bit"] += case.is_exact
    found = tried(case, opened)
    return [str(case), *found] if found else []


# -- all of them ---------------------------------------------------------------------------------


def launch(args: argparse.Namespace, arguments: list[str]) -> int:
    """Start the ranks and wait for them; the first that fails ends all."""
    command = [sys.executable, "-m", "benchmarks.program_fuzz", *arguments]
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(args.ranks), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_ports(1)[0])}
    ranks = [started(command, env, number) for number in range(args.ranks)]
    end_s = time.monotonic() + args.seconds + 4 * GROUP_TIMEOUT_S
    try:
        while any(each.poll() is None for each in ranks):
            if any(each.returncode for each in ranks) or time.monotonic() > end_s:
                break
            time.sleep(0.2)
        time.sleep(0.5)  # What others have to say of it is worth a moment.
    finally:
        for each in ranks:
            each.kill()
    return told(ranks)


def told(ranks: list[subprocess.Popen[str]]) -> int:
    for number, each in enumerate(ranks):
        said, _ = each.communicate()
        print(said, end="")
        if each.returncode not in (0, 1):
            print(f"rank {number} was still at it, or ended with {each.returncode}")
    return max(abs(each.returncode) for each in ranks)
