"""Small units, real small file systems, and children that die in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.storage.tier import Tiers
from penstock.storage.tier_shape import TierShape

Mount = Callable[[str], Path]


def unit_bytes(unit: int, length: int) -> bytes:
    """What a unit holds: different for every unit."""
    return np.random.default_rng(unit).integers(0, 256, length, np.uint8).tobytes()


def shape_of(lengths: list[int], name: str = "set-one") -> TierShape:
    """Units one after another."""
    column = np.array(lengths, np.int64)
    about = {"uri": f"s3://bucket/{name}/"}
    return TierShape(name=name, offsets=np.cumsum(column) - column, lengths=column, about=about)


def fill(tiers: Tiers, units: list[int] | None = None) -> list[int]:
    """Fill units as a loader does; return those that this call has filled."""
    filled = []
    for unit in range(tiers.shape.num_units) if units is None else units:
        number = int(tiers.tier_of(np.array([unit]))[0])
        if number < 0 or not tiers.tiers[number].claim(unit):
            continue
        tier = tiers.tiers[number]
        try:
            if tier.write(unit, unit_bytes(unit, int(tiers.shape.lengths[unit]))):
                filled.append(unit)
        finally:
            tier.release(unit)
    return filled


def units_of(tiers: Tiers) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(tiers.shape.num_units)


def die_in(function: Callable[[], object]) -> None:
    """Run a function in a forked child that kills itself (-9) before it ends."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child left with {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Give a function that mounts a small tmpfs with some options and returns where."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = tmp_path / f"mount-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: only root can mount a tmpfs ({done.stderr.strip()})")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)
