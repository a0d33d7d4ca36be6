"""Trials by the simulator, and a race in one call: for tests of the tuner."""

from __future__ import annotations

from collections.abc import Callable

from penstock.step.program.cost import MachineCosts
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Program
from penstock.step.program.simulate import simulate
from penstock.step.tuner.race import Heats, Race, Result


class Simulated:
    """Measures by the simulator; noise is a factor by program."""

    def __init__(
        self, costs: MachineCosts, noise: Callable[[Program], float] | None = None
    ) -> None:
        self._costs = costs
        self._noise = noise or (lambda program: 1.0)
        self.key = f"{costs}" if noise is None else None

    def __call__(self, program: Program) -> SimulatedTrial:
        seconds = simulate(lower(program), self._costs).step_s
        return SimulatedTrial(lambda: seconds * self._noise(program))


class SimulatedTrial:
    def __init__(self, run: Callable[[], float]) -> None:
        self.run = run

    def results(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is held."""


def race(count: int, how: Race) -> Result:
    """Return who of so many wins, and by how much."""
    heats = Heats(how)
    heats.run(range(1, count))
    return heats.final()
