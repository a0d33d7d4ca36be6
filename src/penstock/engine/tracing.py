"""Records of a traced run beside the rows of its work: tiers, counters once a second, clocks.

The engine's process reads the counters of all processes of the rank, so that this takes no time of
the training process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from penstock.engine.stats import TierStats
from penstock.trace import Recorder
from penstock.trace.clocks import ClockFact
from penstock.trace.sampler import Sampler
from penstock.world import World


class Tracing:
    """Records tiers, counters and clocks from the first run of an engine to its end."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        pids: Callable[[], list[int]],
        world: World,
        clock: Callable[[], int] | None,
    ) -> None:
        """`clock` asks the first node for its time; None where there is no other node to ask."""
        self._recorder = recorder
        self._sampler = Sampler(recorder, pids, of_node=world.local_rank == 0)
        is_asked = clock is not None and world.is_first_of_node
        self._clock = ClockFact(recorder, clock) if is_asked and clock is not None else None

    def start(self, tiers: Sequence[TierStats]) -> None:
        """Begin; the tiers are open by now."""
        self._recorder.facts({"tiers": [asdict(tier) for tier in tiers]})
        if self._clock is not None:
            self._clock.read()
        self._sampler.start()

    def end(self, tiers: Sequence[TierStats]) -> None:
        """End; the tiers are still open, and other nodes can still be asked."""
        self._recorder.facts({"tiers_at_end": [asdict(tier) for tier in tiers]})
        if self._clock is not None:
            self._clock.read()
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._sampler.stop()
