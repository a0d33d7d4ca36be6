"""The position of one worker of torch's DataLoader in its part of the stream.

A DataLoader with W workers asks them in turn, so worker w has steps w, w + W, w + 2W, … counted
from the beginning of the iteration. A worker remembers that beginning and the number of its own
steps that it has handed out; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import get_worker_info

from penstock.arguments import count_of
from penstock.errors import OptionError, StateError

WORKERS_MAX = 1024
"""Workers of one DataLoader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """A worker's place, and the sizes that it depends on.

    >>> WorkerPosition(epoch=2, worker=1, num_workers=3, global_batch_size=8, steps=4).next_step
    13
    """

    epoch: int = 0
    """The epoch that the iteration began with."""
    position: int = 0
    """Samples of that epoch, on all ranks, that were used before the iteration began."""
    worker: int = 0
    """Number of the worker; 0 in a process that has none."""
    num_workers: int = 1
    """Workers that share the steps."""
    global_batch_size: int
    """Samples a step on all ranks."""
    steps: int = 0
    """Steps that this worker has handed out completely."""
    samples: int = 0
    """Samples that it has handed out of the step after those."""

    @property
    def next_step(self) -> int:
        """The step that the worker makes next, counted from the beginning of the iteration."""
        return self.worker + self.steps * self.num_workers

    def to_state(self) -> dict[str, int]:
        """Return the position as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], here: WorkerPosition) -> WorkerPosition:
        """Return a saved place, or raise if its sizes are not those of `here`."""
        for name, what in (
            ("num_workers", "num_workers"),
            ("worker", "worker"),
            ("global_batch_size", "a global batch of"),
        ):
            saved, current = state.get(name), getattr(here, name)
            if saved != current:
                raise StateError(
                    f"the saved state is for {what} {saved}, this is {what} {current}: each worker "
                    f"goes on with its own steps, so {name} must stay what it was; the state of "
                    "penstock.Loader knows no workers and can be loaded with any batch size"
                )
        try:
            return cls(**{n: count_of(n, state.get(n), least=0) for n in asdict(here)})
        except OptionError as error:
            raise StateError(f"the saved state is damaged: {error}") from error


def worker_here() -> tuple[int, int]:
    """Return which worker of a DataLoader this is, and of how many; (0, 1) if it is none."""
    info = get_worker_info()
    if info is None:
        return 0, 1
    if info.num_workers > WORKERS_MAX:
        raise OptionError(f"num_workers={info.num_workers}: there can be {WORKERS_MAX} at most")
    return info.id, info.num_workers
