"""The gains of changes to a plan: each change alone, planned again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.machine import Curve, Machine, StoreModel, TierModel
from penstock.simulate.plan.planner import RunPlan
from penstock.simulate.plan.work import Work

MORE_TIER_BYTES = 100_000_000_000
_DISK_BYTES_S = 2e9
"""Bandwidth of a new disk, where the machine has no disk to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGain:
    """A plan with one change."""

    what: str
    """The change, in words."""
    plan: RunPlan
    gain_s: float
    """How many seconds earlier the whole run ends."""
    store_bytes_saved: float
    """How many bytes fewer it reads from the store."""


def what_if(plan: RunPlan) -> tuple[PlanGain, ...]:
    """Return the gain of each of a few changes."""
    changed = [(what, replace(plan, machine=machine)) for what, machine in _other_machines(plan)]
    changed += [(what, replace(plan, work=work)) for what, work in _other_peers(plan.work)]
    if plan.work.shuffle == "global":
        cold = replace(plan.work, shuffle="blocks-first")
        changed.append(('shuffle="blocks-first"', replace(plan, work=cold)))
    total_s, store_bytes = plan.total_s, plan.store_bytes
    return tuple(
        PlanGain(
            what=what,
            plan=other,
            gain_s=total_s - other.total_s,
            store_bytes_saved=store_bytes - other.store_bytes,
        )
        for what, other in changed
    )


def blocks_first_gain_s(plan: RunPlan) -> float:
    """Return how many seconds earlier the first epoch ends in blocks; 0 if it does so already."""
    if plan.work.shuffle != "global":
        return 0.0
    other = replace(plan, work=replace(plan.work, shuffle="blocks-first"))
    return plan.first.seconds - other.first.seconds


def _other_peers(work: Work) -> list[tuple[str, Work]]:
    if work.num_nodes == 1:
        return []
    if work.peers is None:
        return [("nodes that read from each other", replace(work, peers="fixed"))]
    out = [("nodes that are each on their own", replace(work, peers=None))]
    if work.peers == "fixed":
        out.append(('assignment="locality"', replace(work, peers="locality")))
    return out


def _other_machines(plan: RunPlan) -> list[tuple[str, Machine]]:
    machine = plan.machine
    out = [
        ("100 GB more of tiers on each node", _with_tier(machine, MORE_TIER_BYTES)),
        ("a store of twice the bandwidth", replace(machine, store=_wider(machine.store))),
        ("a store of half the latency", replace(machine, store=_nearer(machine.store))),
    ]
    if plan.work.peers is not None and plan.work.num_nodes > 1:
        link = replace(machine.link, bytes_s=2 * machine.link.bytes_s)
        out.append(("a link twice as fast", replace(machine, link=link)))
    out.append(
        (
            "cores twice as fast",
            replace(
                machine,
                copy=_doubled(machine.copy),
                decode=_doubled(machine.decode) if machine.decode is not None else None,
            ),
        )
    )
    return out


def _with_tier(machine: Machine, size_bytes: int) -> Machine:
    """Return a machine whose last tier is larger; one without tiers gets a disk."""
    if not machine.tiers:
        disk = Curve.flat(_DISK_BYTES_S)
        tier = TierModel(kind="disk", capacity_bytes=size_bytes, read=disk, write=disk)
        return replace(machine, tiers=(tier,))
    *others, last = machine.tiers
    larger = replace(last, capacity_bytes=last.capacity_bytes + size_bytes)
    return replace(machine, tiers=(*others, larger))


def _doubled(curve: Curve) -> Curve:
    return replace(curve, bytes_s=tuple(2 * rate for rate in curve.bytes_s))


def _wider(store: StoreModel) -> StoreModel:
    plain = store.without_latency()
    return replace(
        plain,
        throughput=_doubled(plain.throughput),
        shared=_doubled(plain.shared) if plain.shared is not None else None,
        requests_s_max=2 * plain.requests_s_max if plain.requests_s_max is not None else None,
    )


def _nearer(store: StoreModel) -> StoreModel:
    plain = store.without_latency()
    return replace(plain, latency_s=plain.latency_s / 2, latency_p99_s=plain.latency_p99_s / 2)
