"""Passes over a block: what one can compute, and what has to wait for a sum over the whole block.

A value that depends on a sum over the block cannot be computed in the pass that makes the sum. So a
flat kernel is one or more *stages*, each a pass over the block; LAMB is two. A later stage reads
what an earlier one has stored, recomputes what follows from that, and reads the rest from memory
where the earlier stage has kept it (*kept*).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.step.kernels.body import KernelBody
from penstock.step.program.nodes import Node
from penstock.step.program.ops import OPS

__all__ = ["Stage", "stages_of"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass over the block."""

    index: int
    ones: tuple[Node, ...]
    """Single values computed before the pass, from sums of earlier stages and each other."""
    nodes: tuple[Node, ...]
    """Operations element by element (and row by row), in order."""
    loads: tuple[str, ...]
    """Tensors that it reads: inputs, what earlier stages stored (by its name outside) or kept."""
    reads: tuple[tuple[str, str], ...]
    """The values that loads stand for, where these are not inputs: (value, load)."""
    stores: tuple[tuple[str, str], ...]
    """Results that are ready after it: the name outside, and the value."""
    writes: tuple[tuple[str, str], ...]
    """What the pass writes, by name outside or as `kept NAME`, and the value."""
    kept: tuple[str, ...]
    """Values that it keeps for later stages."""
    totals: tuple[Node, ...]
    """Sums (maxima, minima) over the block that it makes."""


def stages_of(body: KernelBody) -> tuple[Stage, ...]:
    """Return the passes that a flat or row-wise body needs."""
    return _StageCutter(body).made()


class _StageCutter:
    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._level = _levels(body)
        self._last = max(self._level.values(), default=0)
        self._stored: dict[str, str] = {}
        """Values whose exact elements are in memory, and the name outside."""
        self._kept: dict[str, int] = {}
        self._gone: set[str] = set()
        """Inputs whose memory has been overwritten."""

    def made(self) -> tuple[Stage, ...]:
        # Which values to keep is known only from later stages. Going backwards would find them in
        # one round; going forwards until nothing changes is simpler.
        self._round()
        found = dict(self._kept)
        while True:
            self._kept = dict(found)
            stages = self._round()
            if self._kept == found:
                return stages
            found = dict(self._kept)

    def _round(self) -> tuple[Stage, ...]:
        self._stored, self._gone = {}, set()
        return tuple(self._stage(index) for index in range(self._last + 1))

    def _stage(self, index: int) -> Stage:
        body, level = self._body, self._level
        stores = tuple(
            (name, value)
            for name, value in body.stores
            if level.get(value, 0) == index and body.reach[value] != "host"
        )
        tensors = [(n, v) for n, v in stores if body.reach[v] != "one"]
        totals = tuple(n for n in body.nodes if body.is_total(n) and level[n.name] == index + 1)
        kept = tuple(name for name, at in self._kept.items() if at == index)
        roots = [v for _, v in tensors] + [n.inputs[0] for n in totals] + list(kept)
        wanted = self._wanted(roots, index)
        nodes = tuple(n for n in body.nodes if n.name in wanted and body.reach[n.name] != "one")
        ones = self._ones(nodes, stores)
        read = [*roots, *(i for n in (*nodes, *ones) for i in n.inputs)]
        made = {n.name for n in nodes}
        values = [v for v in dict.fromkeys(read) if v not in made and v not in body.host_names]
        values = [v for v in values if body.reach[v] != "one" or v in body.inputs]
        reads = {v: self._stored.get(v, v) for v in values}
        stage = Stage(
            index=index,
            ones=ones,
            nodes=nodes,
            loads=tuple(dict.fromkeys(reads.values())),
            reads=tuple((v, load) for v, load in reads.items() if v != load),
            stores=stores,
            writes=(*tensors, *((f"kept {value}", value) for value in kept)),
            kept=kept,
            totals=totals,
        )
        self._remember(stage)
        return stage

    def _ones(
        self, nodes: tuple[Node, ...], stores: tuple[tuple[str, str], ...]
    ) -> tuple[Node, ...]:
        """Return the single values that a stage needs and that are not sums."""
        body = self._body
        wanted = {i for n in nodes for i in n.inputs} | {v for _, v in stores}
        out = []
        for node in reversed(body.nodes):
            single = body.reach[node.name] == "one" and not body.is_total(node)
            if node.name in wanted and single:
                out.append(node)
                wanted.update(node.inputs)
        return tuple(reversed(out))

    def _wanted(self, roots: list[str], index: int) -> set[str]:
        """Return the names of nodes that a stage computes, for the first time or again."""
        out: set[str] = set()
        todo = list(roots)
        while todo:
            name = todo.pop()
            node = self._body.by_name.get(name)
            if node is None and name in self._gone:
                self._kept.setdefault(name, 0)
            if node is None or name in out or self._body.is_total(node):
                continue
            if self._is_there(name, index):
                continue
            if self._level[name] < index and self._needs_gone(name):
                self._kept.setdefault(name, self._level[name])
                continue
            out.add(name)
            todo.extend(node.inputs)
        return out

    def _is_there(self, name: str, index: int) -> bool:
        return name in self._stored or self._kept.get(name, index) < index

    def _needs_gone(self, name: str) -> bool:
        """Whether recomputing a value would read memory that was overwritten."""
        if name in self._gone:
            return True
        node = self._body.by_name.get(name)
        if node is None or name in self._stored:
            return False
        return any(self._needs_gone(one) for one in node.inputs)

    def _remember(self, stage: Stage) -> None:
        body, targets = self._body, dict(self._body.targets)
        for name, value in stage.stores:
            is_exact = body.types[name].dtype == body.dtype(value)
            is_one = body.reach[value] == "one" or name in body.copies
            if is_exact and not is_one and value in body.by_name:
                self._stored.setdefault(value, name)
            if name in targets and body.reach.get(targets[name]) == "full":
                self._gone.add(targets[name])


def _levels(body: KernelBody) -> dict[str, int]:
    """Return for each value the first stage in which it is available."""
    out: dict[str, int] = {}
    for node in body.nodes:
        before = max((out.get(name, 0) for name in node.inputs), default=0)
        is_total = OPS[node.op].kind == "reduce" and body.reach[node.name] == "one"
        out[node.name] = before + is_total
    return out
