"""Simulations: the same orders, plans and flow on modelled hardware, in virtual time.

Two models over the same values.

* `run` and `sweep`: steps in bulk (`bulk`), for comparing policies (`policies`) at any scale. A
  scenario (`scenario`) describes data set, job and machine.
* `predict`: event by event (`predict`), one node and the real `flow`, for what averages do not
  show: tails, throttling, faults (`weather`), adaptation; and for how long a real run will take.

`plan` foresees a run without playing it, and `probe` measures the machine that all of them need.
"""

from penstock.simulate.bulk import run, sweep
from penstock.simulate.predict import LoaderRun, Prediction, predict
from penstock.simulate.result import PolicyResult
from penstock.simulate.scenario import Scenario, load_scenario, scenario_of
from penstock.simulate.virtual_node import Costs, Samples
from penstock.simulate.weather import Refusals, Slow, Stalls, Weather

__all__ = [
    "Costs",
    "LoaderRun",
    "Prediction",
    "Refusals",
    "PolicyResult",
    "Samples",
    "Scenario",
    "Slow",
    "Stalls",
    "Weather",
    "load_scenario",
    "predict",
    "run",
    "scenario_of",
    "sweep",
]
