"""Policies to compare, one small class each: where every use of a sample finds its bytes."""

from __future__ import annotations

import difflib

from penstock.errors import OptionError
from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.base import Policy
from penstock.simulate.policies.coordl import Coordl
from penstock.simulate.policies.deepio import DeepioOpportunistic, DeepioOrdered
from penstock.simulate.policies.evicting import Belady, Lru
from penstock.simulate.policies.lbann import LbannDynamic, LbannPreloading
from penstock.simulate.policies.locality import LocalityAware
from penstock.simulate.policies.nopfs import Nopfs, NopfsReleased
from penstock.simulate.policies.ours import Ours, OursLocal
from penstock.simulate.policies.plain import DoubleBuffering, Naive, Perfect
from penstock.simulate.policies.sharding import ParallelStaging

POLICIES: dict[str, type[Policy]] = {
    "naive": Naive,
    "double-buffering": DoubleBuffering,
    "deepio-ordered": DeepioOrdered,
    "deepio-opportunistic": DeepioOpportunistic,
    "parallel-staging": ParallelStaging,
    "lbann-dynamic": LbannDynamic,
    "lbann-preloading": LbannPreloading,
    "locality-aware": LocalityAware,
    "coordl": Coordl,
    "nopfs": Nopfs,
    "nopfs-released": NopfsReleased,
    "lru": Lru,
    "belady": Belady,
    "ours": Ours,
    "ours-locality": OursLocal,
    "perfect": Perfect,
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
