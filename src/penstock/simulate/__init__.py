"""Simulations: the same orders, plans and flow on modelled hardware, in virtual time."""

from penstock.simulate.bulk import run
from penstock.simulate.result import Result
from penstock.simulate.scenario import Scenario, load_scenario, scenario_of

__all__ = ["Result", "Scenario", "load_scenario", "run", "scenario_of"]
