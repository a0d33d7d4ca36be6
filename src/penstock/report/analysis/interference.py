"""Interference: how much slower a step is because the loader works beside it.

A differential run measures it: the same step with and without the loader's work. Without one, the
kernel's account of the training thread bounds it: time in which the thread waited for the
interpreter's lock, or was runnable and had no core.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.values import WORK, Floats, Interference, StepTable, SystemLoad

STEPS_MIN = 8
"""Steps of each kind that a difference of medians needs."""
FIRST_STEPS = 10
"""From so many steps on, a run can do without its first one."""
ROUNDS = 300
"""Rounds of the bootstrap."""
DRAWN_MAX = 2000
"""Steps that a bootstrap draws from: more say nothing more, and take memory."""
_SEED = 14
_NOT_WORK = frozenset({"between-epochs", "validation", "checkpoint"})


def interference_of(table: StepTable, loops: tuple[TrainingLoop, ...]) -> Interference:
    """Return the interference in a run: measured where it has resident windows, else accounted."""
    lock, no_core, on_core = _accounts(loops)
    work = np.sum([v for n, v in table.parts.items() if n in WORK and n not in _NOT_WORK], axis=0)
    real, resident = _settled(table)
    share, low, high = _accounted(table)
    method = "accounting" if on_core >= 0 else "none"
    resident_s = 0.0
    real_s = float(np.median(work[real])) if real.any() else 0.0
    if real.sum() >= STEPS_MIN and resident.sum() >= STEPS_MIN:
        method = "differential"
        resident_s = float(np.median(work[resident]))
        wall_s = float(table.wall_s[real].mean())
        low, high = _difference_band(work[real], work[resident]) / wall_s
        share = (real_s - resident_s) / wall_s
    return Interference(
        method=method,
        share=max(0.0, float(share)),
        low=max(0.0, float(low)),
        high=max(0.0, float(high)),
        real_s=real_s,
        resident_s=resident_s,
        lock=None if lock < 0 else lock,
        no_core=max(0.0, no_core),
        on_core=max(0.0, on_core),
        blocked=max(0.0, 1 - max(0, lock) - no_core - on_core) if on_core >= 0 else 0.0,
    )


SMALL_OP_S = 50e-6
"""Processor time of an operation, below which calling it takes a good part of it."""
ON_CORE_MIN = 0.5
"""A host that issues work without pause is on a core at least this share of it."""


def launch_share(
    table: StepTable, seen: Interference, system: SystemLoad, *, is_cuda: bool, num_ops: int = 0
) -> float:
    """Return the share of the steps' own work in which the host keeps the device waiting.

    On a GPU the device must be known to idle (`gpu.busy`), and the host must be on a core: it is
    then issuing work, or waiting in a loop for the device, which a busy device would show. On a CPU
    the step must be known to consist of small operations: `num_ops`, 0 where nobody counted.
    """
    # Where other processes took its core, it would have been on it.
    on_core = seen.on_core + seen.no_core * (1 - system.own_delay)
    if on_core < ON_CORE_MIN:
        return 0.0
    if not is_cuda:
        return on_core if num_ops and seen.on_core * seen.real_s / num_ops < SMALL_OP_S else 0.0
    if system.gpu_busy is None:
        return 0.0
    real = ~table.is_resident
    pool = float((table.parts["compute"] + table.parts["launch"])[real].sum())
    busy_s = system.gpu_busy * float(table.wall_s[real].sum())
    return max(0.0, 1 - busy_s / pool) if pool else 0.0


def _settled(table: StepTable) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return real and resident steps, without the first half of each window.

    When a resident window begins, workers still fill their queues; when a real one begins, the
    queues are full.
    """
    kind = table.is_resident
    # The first step starts the loader: that is the phase `start`.
    begun = table.step > 0 if table.step.max(initial=0) >= FIRST_STEPS else np.ones(len(kind), bool)
    if not kind.any():
        return ~kind & begun, kind
    changes = (np.diff(kind.astype(int), prepend=-1) != 0) | (np.diff(table.rank, prepend=-1) != 0)
    first = np.flatnonzero(changes)
    length = np.diff(np.append(first, len(kind)))
    place = np.arange(len(kind)) - np.repeat(first, length)
    late = place >= np.repeat(length // 2, length)
    return ~kind & late & begun, kind & late


def settled_real(table: StepTable) -> npt.NDArray[np.bool_]:
    """Return the steps that stand for the run: real ones, as they are in the long run."""
    return _settled(table)[0]


def _accounts(loops: tuple[TrainingLoop, ...]) -> tuple[float, float, float]:
    """Return shares of the work that wait for the lock, have no core, are on one; -1: unknown."""

    def mean(values: list[Floats], weights: list[Floats]) -> float:
        value, weight = np.concatenate(values), np.concatenate(weights)
        known = (value >= 0) & (weight > 0)
        return float(np.average(value[known], weights=weight[known])) if known.any() else -1.0

    work = [(x.done_ns - x.got_ns) * ~x.is_resident.astype(bool) * 1.0 for x in loops]
    return (
        mean([x.lock for x in loops], work),
        mean([x.no_core for x in loops], work),
        mean([x.on_core for x in loops], work),
    )


def _accounted(table: StepTable) -> tuple[float, float, float]:
    """Return the share of interference by the kernel's account, with its band."""
    real = ~table.is_resident
    return share_band(table.parts["interference"][real], table.wall_s[real])


def share_band(part: Floats, wall: Floats) -> tuple[float, float, float]:
    """Return a share of the time with its 90 % band, by a bootstrap over blocks of steps.

    Steps next to each other are alike (a slow store stays slow for a while): blocks of them are
    drawn, not single steps.
    """
    total = float(wall.sum())
    if not len(wall) or not total:
        return 0.0, 0.0, 0.0
    share = float(part.sum()) / total
    num_blocks = int(min(32, max(1, len(wall) // 4)))
    block = np.arange(len(wall)) * num_blocks // len(wall)
    parts = np.bincount(block, part, num_blocks)
    walls = np.bincount(block, wall, num_blocks)
    drawn = np.random.default_rng(_SEED).integers(0, num_blocks, (ROUNDS, num_blocks))
    shares = parts[drawn].sum(axis=1) / np.maximum(1e-12, walls[drawn].sum(axis=1))
    low, high = np.percentile(shares, [5, 95])
    return share, min(share, float(low)), max(share, float(high))


def _difference_band(real: Floats, resident: Floats) -> Floats:
    """Return the 90 % band of the difference of two medians, by a bootstrap."""
    draw = np.random.default_rng(_SEED)
    real, resident = (x[:: 1 + len(x) // DRAWN_MAX] for x in (real, resident))
    a = np.median(real[draw.integers(0, len(real), (ROUNDS, len(real)))], axis=1)
    b = np.median(resident[draw.integers(0, len(resident), (ROUNDS, len(resident)))], axis=1)
    return np.percentile(a - b, [5, 95])
