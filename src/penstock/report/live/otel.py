"""The figures of a loader as OpenTelemetry metrics (extra `otel`).

Instruments are observable: nothing happens until the SDK's reader collects, in a thread of the
SDK's, at the interval that the program has chosen. One collection asks the loader once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.stats import Stats
from penstock.errors import MissingPackageError
from penstock.loader.loader import Loader

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

_SAME_S = 0.5
"""Instruments of one collection ask within this time, and get the same answer."""

_Values = Callable[[Stats], Mapping[str, float]]
"""The value of an instrument by source; "" where it has none."""


def _sources(name: str) -> _Values:
    return lambda stats: {source: getattr(s, name) for source, s in stats.sources.items()}


_COUNTERS: tuple[tuple[str, str, str, _Values], ...] = (
    ("penstock.samples", "{sample}", "Samples handed to the training loop.",
     lambda s: {"": s.samples}),
    ("penstock.batches", "{batch}", "Batches handed to the training loop.",
     lambda s: {"": s.batches}),
    ("penstock.elapsed", "s", "Time inside iterations.", lambda s: {"": s.elapsed_s}),
    ("penstock.stall", "s", "Time that the training loop waited for batches.",
     lambda s: {"": s.stall_s}),
    ("penstock.decode", "s", "Time in decoding and joining, summed over workers.",
     lambda s: {"": s.decode_s}),
    ("penstock.source.io", "By", "Bytes read, by source.", _sources("size_bytes")),
    ("penstock.source.requests", "{request}", "Reads, by source.", _sources("requests")),
    ("penstock.source.time", "s", "Time in reads, summed over reads, by source.",
     _sources("seconds")),
)  # fmt: skip
"""Name, unit, description, value."""


def instrument(loader: Loader, meter_provider: Any = None) -> None:
    """Make the metrics of a loader, in the global meter provider or in the one given.

    They last as long as the loader; a loader that is gone reports nothing any more.
    """
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        raise MissingPackageError("metrics for OpenTelemetry", "opentelemetry", "otel") from None
    meter = get_meter("penstock", meter_provider=meter_provider)
    figures = _Figures(loader)
    for name, unit, text, values in _COUNTERS:
        meter.create_observable_counter(
            name, callbacks=[figures.observer(values)], unit=unit, description=text
        )
    meter.create_observable_gauge(
        "penstock.memory",
        callbacks=[figures.observer(_memory)],
        unit="By",
        description="Memory of engine and workers.",
    )


def _memory(stats: Stats) -> Mapping[str, float]:
    memory = stats.memory
    return {} if memory is None else {"": memory.shared_bytes + memory.private_bytes}


class _Figures:
    """What a loader counted, asked for once a collection."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)
        self._rank = loader.world.rank
        self._stats: Stats | None = None
        self._asked_s = -_SAME_S

    def _now(self) -> Stats | None:
        if time.monotonic() - self._asked_s > _SAME_S:
            loader = self._loader()
            self._stats = None if loader is None else loader.stats()
            self._asked_s = time.monotonic()
        return self._stats

    def observer(self, values: _Values) -> Callable[[Any], Iterable[Observation]]:
        """Return the callback of an instrument."""
        from opentelemetry.metrics import Observation

        def observe(options: Any) -> Iterable[Observation]:
            stats = self._now()
            if stats is None:
                return
            for source, value in values(stats).items():
                own = {"penstock.source": source} if source else {}
                yield Observation(value, {"penstock.rank": self._rank, **own})

        return observe
