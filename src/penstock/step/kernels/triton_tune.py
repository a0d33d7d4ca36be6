"""Sizes of tiles for kernels on CUDA: a few candidates, and the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Config", "best_of", "configs_of"]

TRIAL_ELEMENTS_MIN = 1 << 20
"""For smaller blocks the size of tiles does not matter."""
TRIAL_ELEMENTS_MAX = 1 << 25
"""Elements of each tensor in a trial: more than caches hold."""
PROGRAMS_MAX = 1024
"""Programs of a pass that makes sums: each stores one."""
TILE_ELEMENTS_MAX = 16 * 1024
_WARM, _TIMED = 2, 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work of a kernel is cut."""

    sizes: tuple[tuple[str, int], ...]
    """BLOCK, or ROWS and COLS."""
    num_warps: int

    def num_programs(self, length: int, row_length: int, has_totals: bool) -> int:
        """Return how many programs a block of so many elements needs."""
        sizes = dict(self.sizes)
        if "ROWS" in sizes:
            return -(-(length // max(1, row_length)) // sizes["ROWS"])
        needed = -(-length // sizes["BLOCK"])
        return min(needed, PROGRAMS_MAX) if has_totals else needed

    def lengths(self, length: int, row_length: int) -> list[int]:
        """Return the sizes that are passed: rows and their length, or the number of elements."""
        return [length // row_length, row_length] if "ROWS" in dict(self.sizes) else [length]

    def trial_elements(self, length: int, row_length: int) -> int:
        """Return the number of elements in a trial; 0 if the block is too small for one."""
        if length < TRIAL_ELEMENTS_MIN:
            return 0
        most = min(length, TRIAL_ELEMENTS_MAX)
        return most if "BLOCK" in dict(self.sizes) else most // row_length * row_length


def configs_of(kind: str, row_length: int, width: int) -> list[Config]:
    """Return candidates, the likeliest first."""
    if kind == "rows":
        cols = 1 << max(0, row_length - 1).bit_length()
        tiles = [1, 2, 4] if cols >= 512 else [4, 16, max(1, 2048 // cols)]
        return [
            Config(sizes=(("ROWS", rows), ("COLS", cols)), num_warps=warps)
            for rows in tiles
            if rows * cols <= TILE_ELEMENTS_MAX or rows == tiles[0]
            for warps in (4, 8, 16)
            if 32 * warps * 4 <= max(rows * cols, 512)
        ]
    blocks = [(1024, 4), (2048, 8), (512, 4), (4096, 8)]
    if width > 1:
        # W loads are in flight at once already.
        blocks = [(1024, 4), (512, 4), (1024, 8), (2048, 8)]
    return [Config(sizes=(("BLOCK", block),), num_warps=warps) for block, warps in blocks]


def best_of(
    configs: Sequence[Config], trial: Callable[[Config], Callable[[], None] | None]
) -> Config:
    """Return the config whose trial takes the least time; the first if there is no trial."""
    best, least = configs[0], float("inf")
    for config in configs:
        run = trial(config)
        if run is None:
            return configs[0]
        taken = _taken(run)
        if taken < least:
            best, least = config, taken
        del run
    return best


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _taken(run: Callable[[], None]) -> float:
    for _ in range(_WARM):
        run()
    times: list[float] = []
    for _ in range(_TIMED):
        begin, end = _mark(), _mark()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]
