"""Probe: measures this machine.

`measure.probe_machine` returns a `penstock.machine.Machine`; `penstock probe` writes it to a file.
Every measurement has a bound of time and of bytes (`effort`) and is the median of interleaved
repeats (`timing`); notes say what could not be measured. A run refines a machine by what it
observes (`flow.live`), and `simulate.plan` uses its numbers.
"""

from penstock.simulate.probe.effort import QUICK, USUAL, Effort
from penstock.simulate.probe.limits import ResourceLimit, sample_limits, useful_count
from penstock.simulate.probe.measure import ProbeResult, probe_machine, write_machine
from penstock.simulate.probe.target import Target

__all__ = [
    "QUICK",
    "USUAL",
    "Effort",
    "ResourceLimit",
    "ProbeResult",
    "Target",
    "probe_machine",
    "sample_limits",
    "useful_count",
    "write_machine",
]
