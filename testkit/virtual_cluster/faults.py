"""A schedule of faults, drawn from a seed.

A fault has a kind, a start, an end and a victim. Some faults never end. A schedule leaves at least
half of the nodes alive at any time; everything else may happen at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill",
    "vanish",
    "wipe",
    "freeze",
    "cut",
    "one-way",
    "slow",
    "corrupt",
    "full",
    "dry",
    "refuse",
    "lag",
]

DEADLY: tuple[Kind, ...] = ("kill", "vanish", "wipe")
"""The process dies; the machine dies without a word; the process dies and its tier is lost."""
_LINKS: tuple[Kind, ...] = ("cut", "one-way")
_STORE: tuple[Kind, ...] = ("refuse", "lag")
_KINDS: tuple[Kind, ...] = (*DEADLY, "freeze", *_LINKS, "slow", "corrupt", "full", "dry", *_STORE)
"""`dry`: one node gets nothing from the store, all others do."""
SLOW = 10.0
"""How many times slower a slow node or store is."""
_SHORT_S, _LONG_S = 0.3, 14.0
_STORM_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFault:
    """One fault: what happens, when, and to whom."""

    kind: Kind
    start_s: float
    stop_s: float = math.inf
    """When it ends: a dead node is started again, a link carries messages again."""
    node: int = -1
    """The node that it strikes; of a link, the node that asks; -1 for the store."""
    other: int = -1
    """The other end of a link."""

    def __str__(self) -> str:
        ends = "" if self.stop_s == math.inf else f"{self.stop_s:.2f}"
        whom = {-1: ""}.get(self.node, f" {self.node}") + {-1: ""}.get(self.other, f"-{self.other}")
        return f"{self.kind}{whom} {self.start_s:.2f}..{ends}"

    def strikes(self, asker: int, server: int) -> bool:
        """Return whether it may keep the answers of one node from another."""
        if self.kind == "cut":
            return {asker, server} == {self.node, self.other}
        if self.kind == "one-way":
            return (asker, server) == (self.node, self.other)
        return self.node == server


def drawn_faults(
    draws: random.Random, *, num_nodes: int, num_faults: int, within_s: float
) -> tuple[ClusterFault, ...]:
    """Draw a schedule; all faults begin within some seconds."""
    faults: list[ClusterFault] = []
    for _ in range(num_faults):
        fault = _drawn(draws, num_nodes, within_s)
        dead = [f.node for f in (*faults, fault) if f.kind in DEADLY]
        if fault.kind in DEADLY and (len(dead) > num_nodes // 2 or len(set(dead)) < len(dead)):
            continue
        faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.start_s))


def _drawn(draws: random.Random, num_nodes: int, within_s: float) -> ClusterFault:
    kind = draws.choice(_KINDS)
    start_s = draws.uniform(0.0, within_s)
    length_s = _SHORT_S * (_LONG_S / _SHORT_S) ** draws.random()
    if kind in _STORE:
        length_s = draws.choice((length_s, _STORM_S)) if kind == "refuse" else length_s
        return ClusterFault(kind=kind, start_s=start_s, stop_s=start_s + length_s)
    node, other = draws.sample(range(num_nodes), 2)
    if kind == "full" or (kind in DEADLY and draws.random() < 0.5):
        length_s = math.inf
    return ClusterFault(
        kind=kind,
        start_s=start_s,
        stop_s=start_s + length_s,
        node=node,
        other=other if kind in _LINKS else -1,
    )
