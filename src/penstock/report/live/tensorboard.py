"""The figures of a loader as scalars beside the loss: TensorBoard, or whatever has `add_scalar`."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.engine.stats import Stats
from penstock.loader.loader import Loader


class ScalarWriter(Protocol):
    """A `SummaryWriter` of torch or tensorboardX, or anything like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one value."""
        ...


class LoaderScalars:
    """Writes what a loader did since the last call.

    >>> scalars = LoaderScalars(loader, SummaryWriter())  # doctest: +SKIP
    >>> scalars.log(step)  # every 100 steps, say: each call asks the engine  # doctest: +SKIP
    """

    def __init__(self, loader: Loader, writer: ScalarWriter, prefix: str = "penstock") -> None:
        self._loader, self._writer, self._prefix = loader, writer, prefix
        self._before = Stats()

    def log(self, step: int) -> None:
        """Write the scalars of a step."""
        now = self._loader.stats()
        before, self._before = self._before, now
        seconds = now.elapsed_s - before.elapsed_s
        if seconds <= 0:
            return  # Nothing has happened since.
        values = {
            "samples_per_s": (now.samples - before.samples) / seconds,
            "stall_share": (now.stall_s - before.stall_s) / seconds,
            "decodes_at_a_time": (now.decode_s - before.decode_s) / seconds,
        }
        for name, source in now.sources.items():
            had = before.sources.get(name)
            had_bytes = 0 if had is None else had.size_bytes
            values[f"bytes_per_s/{name}"] = (source.size_bytes - had_bytes) / seconds
        for name, value in values.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step)
