"""Sweeps: policies × nodes × capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.simulate.bulk import run
from penstock.simulate.policies import POLICIES, Policy
from penstock.simulate.result import PolicyResult
from penstock.simulate.scenario import Scenario


def sweep(
    scenario: Scenario,
    *,
    policies: Sequence[str | type[Policy]] = (),
    nodes: Sequence[int] = (),
    cache: Sequence[float] = (),
) -> Iterator[PolicyResult]:
    """Yield a result for every combination, as soon as it is known.

    What is not given is the scenario's: its `[sweep]`, else all policies, its own nodes and its own
    tiers. `cache` is the capacity of all nodes together as a share of the data set.
    """
    plan = scenario.sweep
    size_bytes = int(scenario.sizes().sum())
    shares: Sequence[float | None] = cache or plan.cache or (None,)
    for num_nodes in nodes or plan.nodes or (scenario.job.nodes,):
        for share in shares:
            here = scenario.with_nodes(num_nodes)
            if share is not None:
                here = here.with_cache(share, size_bytes)
            for policy in policies or plan.policies or POLICIES:
                yield run(here, policy)
