"""What playing a run in virtual time gives, whichever loader it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STALL_NONE = 0.03
"""A loop that waits for less of its time is limited by its own work."""


@dataclass(frozen=True, kw_only=True)
class RunDeviation:
    """How far one run lies from the mean of many: standard deviations, of times relative ones."""

    step: float = 0.0
    first_epoch: float = 0.0
    stall_share: float = 0.0

    @staticmethod
    def of(
        steps_s: npt.NDArray[np.float64],
        first_epochs_s: npt.NDArray[np.float64],
        stalls: npt.NDArray[np.float64],
    ) -> RunDeviation:
        """Return how far several plays of one run lie apart; 0 for a single one.

        >>> RunDeviation.of(np.array([1.0, 3.0]), np.ones(2), np.zeros(2)).step
        0.7071067811865476
        """
        if len(steps_s) < 2:
            return NO_CHANCE
        return RunDeviation(
            step=float(steps_s.std(ddof=1) / steps_s.mean()),
            first_epoch=float(first_epochs_s.std(ddof=1) / first_epochs_s.mean()),
            stall_share=float(stalls.std(ddof=1)),
        )


NO_CHANCE = RunDeviation()


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run as it was played, scaled to its real length."""

    step_s: float
    """Mean of the last epoch."""
    epoch_s: tuple[float, ...]
    stall_share: float
    """In the last epoch."""
    store_bytes: float
    peer_bytes: float
    memory_bytes: float
    limit: str
    chance: RunDeviation = NO_CHANCE


def nearest_limit(needs: dict[str, float], step_s: float, otherwise: str) -> str:
    """Return the resource whose least time for a step is closest to the step's time.

    >>> nearest_limit({"store": 0.9, "cores": 0.2}, 1.0, "latency")
    'store'
    >>> nearest_limit({"store": 0.1, "cores": 0.2}, 1.0, "latency")
    'latency'
    """
    most = max(needs, key=lambda name: needs[name])
    return most if needs[most] > 0.5 * step_s else otherwise
