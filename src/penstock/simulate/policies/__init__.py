"""Policies to compare, one small class each: where each use of a sample finds its bytes.

They are models: what real tiers keep is decided in `flow.layout.placement` and `flow.residency`.
These six are what a user of `penstock simulate` chooses between. `benchmarks.policies` has ten more
from the literature; `simulate.run` and `simulate.sweep` take a class as well as a name.
"""

from __future__ import annotations

import difflib

from penstock.errors import OptionError
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.base import DoubleBuffering, Policy
from penstock.simulate.policies.lru import Lru
from penstock.simulate.policies.nopfs import Nopfs
from penstock.simulate.policies.ours import Ours, OursLocal
from penstock.simulate.policies.sharding import ParallelStaging

POLICIES: dict[str, type[Policy]] = {
    "double-buffering": DoubleBuffering,
    "parallel-staging": ParallelStaging,
    "nopfs": Nopfs,
    "lru": Lru,
    "ours": Ours,
    "ours-locality": OursLocal,
}


def check_policy(name: str) -> None:
    """Raise unless there is a policy of that name."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"there is no policy {name!r}; {hint}There are: {', '.join(POLICIES)}")


def make_policy(name: str, job: SimulatedJob) -> Policy:
    """Return a policy by its name."""
    check_policy(name)
    return POLICIES[name](job)


__all__ = ["POLICIES", "Policy", "check_policy", "make_policy"]
