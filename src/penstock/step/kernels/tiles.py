"""Kernels in tiles, as text: each operation on a piece that fits in the cache, then the next piece.

Operations of torch write into a few scratch tensors that are reused (a tensor is free once its
value is not read any more), or directly into results. So a kernel reads and writes memory about
once without a compiler, and its values are the same bits as those of torch's own operations on
whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.eager import operand_text
from penstock.step.kernels.names import Names
from penstock.step.kernels.stages import Stage
from penstock.step.program.nodes import Node
from penstock.step.program.ops import OPS

__all__ = ["TileText", "tile_text"]

_SECOND_MAY_BE_NUMBER = {"add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne"}
_NAMED = {"not": "logical_not", "and": "logical_and", "or": "logical_or", "max": "amax"}
_NAMED |= {"min": "amin"}
_ATEN = {"gelu": "torch.ops.aten.gelu.out", "silu": "torch.ops.aten.silu.out"}
_COMMUTING = ("add", "mul", "eq", "ne")
_NOT_IN_PLACE = ("softmax", "dropout")


@dataclass(frozen=True, kw_only=True)
class TileText:
    """The text of one stage's function `tile(x, o, s, h, t, ones, numbers)` and its arguments."""

    text: str
    scratch: tuple[tuple[str, str], ...]
    """Reach and element type of each scratch tensor."""
    wrapped: tuple[str, ...]
    """Numbers that operations need as tensors."""


def tile_text(body: KernelBody, stage: Stage, aliases: dict[str, str]) -> TileText:
    """Return a stage as a function of tiles; `aliases` are outputs with the memory of inputs."""
    return _TileWriter(body, stage, aliases).written()


@dataclass
class _ScratchPool:
    """Scratch tensors by reach and element type; those that are free are taken first."""

    made: list[tuple[str, str]] = field(default_factory=list)
    free: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def take(self, kind: tuple[str, str]) -> int:
        found = self.free.get(kind)
        if found:
            return found.pop()
        self.made.append(kind)
        return len(self.made) - 1

    def give(self, index: int) -> None:
        self.free.setdefault(self.made[index], []).append(index)


class _TileWriter:
    def __init__(self, body: KernelBody, stage: Stage, aliases: dict[str, str]) -> None:
        self._body, self._stage, self._aliases = body, stage, aliases
        self._names = Names(["x", "o", "s", "h", "t", "together", "dropped", "root"])
        self._pool = _ScratchPool()
        self._lines: list[str] = []
        self._wrapped: list[str] = []
        self._at: dict[str, str] = {}
        """The tensor of each value: an identifier."""
        self._held: dict[str, int] = {}
        """The scratch tensor that each value occupies."""
        self._load_of = dict(stage.reads)
        self._stores = stage.writes
        self._done: set[str] = set()
        self._last = self._last_uses()

    def written(self) -> TileText:
        for index, node in enumerate(self._stage.nodes):
            self._write(node, index)
        self._finish()
        return TileText(
            text="\n    ".join([*self._head(), *self._lines]) + "\n",
            scratch=tuple(self._pool.made),
            wrapped=tuple(self._wrapped),
        )

    # -- arguments -----------------------------------------------------------------------------

    def _head(self) -> list[str]:
        names, stage = self._names, self._stage
        outs = [*(names(f"out {n}") for n, _ in self._stores)]
        outs += [names(f"total {n.name}") for n in stage.totals]
        rows = {
            "x": [names(name) for name in stage.loads],
            "o": outs,
            "s": [f"s{k}" for k in range(len(self._pool.made))],
            "h": [names(name) for name in self._body.numbers],
            "t": [names(f"tensor {name}") for name in self._wrapped],
            "ones": [names(name) for name in one_values(self._body, stage)],
        }
        lines = [f"def tile(x, o, s, h, t, ones, numbers):  # {self._body.name} {stage.index}"]
        lines += [f"{', '.join(found)}, = {what}" for what, found in rows.items() if found]
        return lines

    def _last_uses(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for index, node in enumerate(self._stage.nodes):
            out |= dict.fromkeys(node.inputs, index)
        end = len(self._stage.nodes)
        out |= dict.fromkeys([v for _, v in self._stores], end)
        return out | {node.inputs[0]: end for node in self._stage.totals}

    def _operand(self, name: str) -> str:
        """Return the tensor of a value; widen it into scratch first if it must be."""
        if name in self._at:
            return self._at[name]
        body = self._body
        load = self._load_of.get(name, name)
        at = self._names(load)
        if name in body.inputs and load == name and name not in body.by_name:
            addends = dict(body.addends)
            is_narrow = body.types[name].dtype != body.dtype(name)
            if (name in addends or is_narrow) and body.reach[name] != "one":
                wide = self._scratch(name)
                how = f", {addends[name]!r}" if name in addends else ""
                self._lines.append(f"together({wide}, {at}{how})" if how else f"{wide}.copy_({at})")
                at = wide
        self._at[name] = at
        return at

    def _scratch(self, name: str) -> str:
        index = self._pool.take((self._body.reach[name], self._body.dtype(name)))
        self._held[name] = index
        return f"s{index}"

    # -- operations ----------------------------------------------------------------------------

    def _write(self, node: Node, index: int) -> None:
        args = self._args(node)
        if node.op not in _NOT_IN_PLACE:
            self._release(index)
        out = self._destination(node, index)
        self._at[node.name] = out
        self._lines.append(self._statement(node, args, out))
        if node.op in _NOT_IN_PLACE:
            self._release(index)
        for name, value in self._stores:
            if value == node.name and name not in self._done and self._may_store(name, index):
                self._lines.append(self._store(name, out))

    def _release(self, index: int) -> None:
        for name in [n for n in self._held if self._last.get(n, -1) <= index]:
            self._pool.give(self._held.pop(name))

    def _destination(self, node: Node, index: int) -> str:
        body = self._body
        for name, value in self._stores:
            is_exact = _dtype(body, name, value) == body.dtype(value) and name not in body.copies
            if value == node.name and is_exact and self._may_store(name, index):
                self._done.add(name)
                return self._names(f"out {name}")
        return self._scratch(node.name)

    def _may_store(self, name: str, index: int) -> bool:
        """Whether the input whose memory an output has is not read any more."""
        lies = self._aliases.get(name)
        if lies is None:
            return True
        values = [v for v, load in [*self._load_of.items(), (lies, lies)] if load == lies]
        return all(self._last.get(value, -1) <= index for value in values)

    def _store(self, name: str, at: str) -> str:
        self._done.add(name)
        out = self._names(f"out {name}")
        if name in self._body.copies:
            return f"for one in {out}: one.copy_({at})"
        return f"{out}.copy_({at})"

    def _finish(self) -> None:
        for node in self._stage.totals:
            function = _NAMED.get(node.op, node.op)
            total = self._names(f"total {node.name}")
            at = self._operand(node.inputs[0])
            self._lines.append(f"torch.{function}({at}, dim=0, out={total})")
        late = [(n, v) for n, v in self._stores if n not in self._done]
        given = set(self._aliases.values())
        for _, value in late:
            at = self._operand(value)
            # Two states may be exchanged: an input is saved before its memory is overwritten.
            if at == self._names(value) and value in given and value not in self._held:
                saved = self._scratch(value)
                self._lines.append(f"{saved}.copy_({at})")
                self._at[value] = saved
        self._lines += [self._store(name, self._at[value]) for name, value in late]
        if not self._lines:
            self._lines.append("pass")

    # -- one operation -------------------------------------------------------------------------

    def _args(self, node: Node) -> list[str]:
        args = []
        inputs = list(node.inputs)
        if node.op in _COMMUTING and inputs[0] in self._body.host_names:
            inputs.reverse()
        for place, name in enumerate(inputs):
            is_number = name in self._body.host_names
            if is_number and node.op == "dropout":
                args.append(name)
            elif is_number and self._wants_tensor(node, place):
                args.append(self._wrap(name))
            elif is_number:
                args.append(self._number(name))
            else:
                args.append(self._operand(name))
        return args

    def _wants_tensor(self, node: Node, place: int) -> bool:
        if node.op == "pow":
            return False
        return place == 0 or node.op not in _SECOND_MAY_BE_NUMBER

    def _wrap(self, name: str) -> str:
        if name not in self._wrapped:
            self._wrapped.append(name)
        return self._names(f"tensor {name}")

    def _number(self, name: str) -> str:
        return operand_text(name, self._body, self._names)

    def _statement(self, node: Node, args: list[str], out: str) -> str:
        op = node.op
        if op in _ATEN:
            return f"{_ATEN[op]}({args[0]}, out={out})"
        if op == "sqrt":
            return f"root({args[0]}, {out})"
        if op == "relu":
            return f"torch.clamp_min({args[0]}, 0, out={out})"
        if op == "cast":
            return f"{out}.copy_({args[0]})"
        if op == "softmax":
            return f"torch.softmax({args[0]}, -1, out={out})"
        if op == "dropout":
            seed = node.inputs[1]
            low, high = self._names(f"{seed} low"), self._names(f"{seed} high")
            share = node.attr("share")
            return f"dropped({out}, {args[0]}, ({low}, {high}), {share!r}, numbers)"
        if OPS[op].kind == "reduce":
            return f"torch.{_NAMED.get(op, op)}({args[0]}, dim=-1, keepdim=True, out={out})"
        return f"torch.{_NAMED.get(op, op)}({', '.join(args)}, out={out})"


def one_values(body: KernelBody, stage: Stage) -> tuple[str, ...]:
    """Return the single values that a stage is given besides its loads."""
    read = {name for node in stage.nodes for name in node.inputs}
    ones = {n for n, reach in body.reach.items() if reach == "one" and n not in body.inputs}
    return tuple(name for name in body.by_name if name in read & ones)


def _dtype(body: KernelBody, name: str, value: str) -> str:
    """Return the element type in which something is written."""
    return body.dtype(value) if name.startswith("kept ") else body.types[name].dtype
