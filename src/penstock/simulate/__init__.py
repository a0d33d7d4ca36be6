"""Simulations: the same orders, plans and flow on modelled hardware, in virtual time.

Two models over the same values.

* `run` and `sweep`: steps in bulk (`bulk`), for comparing policies (`policies`) at any scale. A
  scenario (`scenario`) describes data set, job and machine.
* `predict`: event by event (`predict`), one node and the real `flow`, for what averages do not
  show: tails, throttling, faults, adaptation; and for how long a real run will take.
"""

from penstock.simulate.bulk import run
from penstock.simulate.result import Result
from penstock.simulate.scenario import Scenario, load_scenario, scenario_of
from penstock.simulate.sweep import sweep

__all__ = ["Result", "Scenario", "load_scenario", "run", "scenario_of", "sweep"]
