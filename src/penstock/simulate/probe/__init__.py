"""Probe: what this machine can do, measured.

`measure.probe_machine` returns a `penstock.machine.Machine`; `penstock probe` writes it to a file.
Everything here reads and writes for a bounded time and a bounded number of bytes (`effort`), takes
the median of interleaved repeats (`timing`), and says what it could not measure. A run refines a
machine by what it observes (`flow.live`). What is done with the numbers is `plan`'s business.
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
