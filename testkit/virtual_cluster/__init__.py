"""Whole clusters under fault, in virtual time: the real flow, the real membership, the real homes.

Everything that decides is the code that runs in a job. Only what carries is simulated: links, a
store, servers that park requests for units they do not have yet, clients that give up a silent
connection. Faults come from a seeded schedule, so a failure can be played again to the last event:

    python -m testkit.virtual_cluster --seed 123 --nodes 4 --faults 3

`job` says what is to be done, `faults` what goes wrong when; `world` plays both, and `check` says
what must be true all the same. A job runs on nodes (`node`: a tier and a server) with ranks
(`rank`, `reads`), which `link` and `net` connect.
"""

from __future__ import annotations

from testkit.virtual_cluster.check import ClusterVerdict, judged
from testkit.virtual_cluster.job import ClusterJob
from testkit.virtual_cluster.world import ClusterWorld


def play(seed: int, *, nodes: int | None = None, faults: int | None = None) -> ClusterVerdict:
    """Play one schedule; everything about it follows from these numbers.

    >>> play(7, nodes=2, faults=0).failures
    ()
    """
    return judged(ClusterWorld(ClusterJob.drawn(seed, nodes=nodes, faults=faults)))


def replay_line(seed: int, *, nodes: int | None = None, faults: int | None = None) -> str:
    """Return the command that plays a schedule again.

    >>> replay_line(7, faults=2)
    'python -m testkit.virtual_cluster --seed 7 --faults 2'
    """
    options = {"nodes": nodes, "faults": faults}
    given = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    return f"python -m testkit.virtual_cluster --seed {seed}{given}"


__all__ = ["ClusterJob", "ClusterVerdict", "ClusterWorld", "judged", "play", "replay_line"]
