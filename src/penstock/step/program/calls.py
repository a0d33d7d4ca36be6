"""Functions that programs call: their operands and results, and where samples lie in them.

`call` alone knows a name and the types that the user gives. A `Function` knows more: along which
dimension of each operand and result samples lie, which values its backward needs, and its cost. So
the layouts of its results follow from those of the operands, `grad` can write the call of its
backward, and `chunk` may cut it. It is data; the code is given by name when a program is compiled
or interpreted:

    NAME                    the results
    NAME.keeping            the results, and what the backward needs of the samples
    NAME.backward           from operands, what was kept, and the gradients of results: those of all
                            operands that have one
    NAME.backward.weights   only those of operands that every sample needs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.step.program import language as lang
from penstock.step.program.cost import MachineCosts
from penstock.step.program.layouts import DTYPES
from penstock.step.program.lines import here
from penstock.step.program.nodes import Attr, Node
from penstock.step.program.trace import Tracer, Value
from penstock.step.program.types import Type

__all__ = ["BACKWARD", "KEEPING", "WEIGHTS", "Function", "Slot", "function_of", "written_backward"]

KEEPING, BACKWARD, WEIGHTS = ".keeping", ".backward", ".backward.weights"
_NOBODY = MachineCosts()
"""Costs before calibration. Ranks write them into programs, so they must be the same on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One operand or result of a function."""

    name: str
    shape: tuple[int, ...]
    """For any number of samples."""
    dtype: str = "f32"
    dim: int | None = None
    """The dimension of samples; None: every sample needs all of it, or it is a sum over samples."""
    has_gradient: bool = True

    def of(self, num_samples: int | None) -> Type:
        """Return its type for a number of samples."""
        shape = list(self.shape)
        if self.dim is not None and num_samples is not None:
            shape[self.dim] = num_samples
        return Type(shape=tuple(shape), dtype=self.dtype)

    @property
    def along(self) -> int | str:
        """The dimension of samples of a result, or "sum"."""
        return "sum" if self.dim is None else self.dim

    def bytes_of(self, num_samples: float) -> float:
        """Return its bytes for a number of samples, which may be a rank's share."""
        each = math.prod(n for dim, n in enumerate(self.shape) if dim != self.dim)
        return each * DTYPES[self.dtype].size_bytes * (1 if self.dim is None else num_samples)


@dataclass(frozen=True, kw_only=True)
class Function:
    """The signature and the costs of a function that programs call."""

    name: str
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    kept: tuple[Slot, ...] = ()
    """Values that the backward needs, by sample; none: it computes the forward again."""
    flops: tuple[float, float] = (0.0, 0.0)
    """Of one sample, forward and backward."""
    why_no_gradient: str = ""
    """The reason, for the message of `grad`."""
    digest: str = ""
    """A hash of its code: ranks that have captured different functions get different plans."""

    def __call__(self, *values: Value, **named: Any) -> Any:
        """Write its call into a program; return its result, or a tuple of several."""
        if named:
            raise ProgramError(
                f"{self.name} takes its values by position, got {', '.join(named)} by name: "
                f"{self.name}({', '.join(slot.name for slot in self.operands)})"
            )
        tracer = _tracer_of(self.name, values)
        known = tracer.functions.setdefault(self.name, self)
        if known != self:
            raise ProgramError(
                f"{here()}: two functions called {self.name!r} in one program; give one of "
                "them another name, capture(..., name=...)"
            )
        num_samples = self._checked(values)
        slots = (self.operands, self.results)
        attrs = self.attrs(self.name, values, num_samples, slots, self.flops[0])
        made = tracer.add("call", list(values), attrs, self.name)
        is_one = len(self.results) == 1
        picks = tuple(
            _picked(made, slot, k, num_samples, "" if is_one else f"{made.name}.{k}")
            for k, slot in enumerate(self.results)
        )
        return picks[0] if is_one else picks

    def _checked(self, values: Sequence[Value]) -> int | None:
        """Return the number of samples; refuse operands of other types than captured."""
        if len(values) != len(self.operands):
            names = ", ".join(slot.name for slot in self.operands)
            raise ProgramError(
                f"{here()}: {self.name} takes {len(self.operands)} values "
                f"({names}), got {len(values)}"
            )
        pairs = list(zip(self.operands, values, strict=True))
        counts = [
            value.shape[slot.dim]
            for slot, value in pairs
            if slot.dim is not None and value.type.ndim == len(slot.shape)
        ]
        num_samples = counts[0] if counts else None
        for slot, value in pairs:
            wanted = slot.of(num_samples)
            if (value.shape, value.type.dtype) != (wanted.shape, wanted.dtype):
                raise ProgramError(
                    f"{here()}: {self.name} was captured with {slot.name} as "
                    f"{wanted}, got {value.type}; capture it with examples of that shape and type"
                )
        return num_samples

    def attrs(
        self,
        called: str,
        values: Sequence[Value],
        num_samples: int | None,
        slots: tuple[Sequence[Slot], Sequence[Slot]],
        flops: float,
    ) -> dict[str, Attr]:
        """Return the attributes of a call: its samples, its results, and what it costs one rank."""
        mesh, (reads, results) = values[0].tracer.mesh, slots
        axes = {axis for value in values for axis in value.type.axes("S")}
        mine = (num_samples or 1) / math.prod(mesh.size(axis) for axis in axes)
        size_bytes = sum(slot.bytes_of(mine) for slot in (*reads, *results))
        work_s = flops * mine / _NOBODY.flops_s + size_bytes / _NOBODY.memory_bytes_s
        return {
            "function": called,
            "batch": (tuple(slot.dim for slot in reads), tuple(slot.along for slot in results)),
            "outs": tuple(slot.of(num_samples) for slot in results),
            "digest": self.digest,
            "cost_s": float(f"{work_s:.3g}"),
        }


def _tracer_of(name: str, values: Sequence[Any]) -> Tracer:
    for value in values:
        if not isinstance(value, Value):
            raise ProgramError(
                f"{name} of a {type(value).__name__}; inside of a @program it takes its values, "
                f"and outside its tensors are for calls[{name!r}]"
            )
    if not values:
        raise ProgramError(f"{name} takes no values; a call needs one at least")
    found: Tracer = values[0].tracer
    return found


def _picked(made: Value, slot: Slot, index: int, num_samples: int | None, name: str) -> Value:
    attrs: dict[str, Attr] = {"index": index, "type": slot.of(num_samples), "along": slot.along}
    return made.tracer.add("pick", [made], attrs, name)


def function_of(node: Node, calls: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the code of a call; refuse code of another capture than the program's."""
    name = str(node.attr("function"))
    if name not in calls:
        raise ProgramError(f"no function called {name!r} was given; give it in calls=...")
    found, said = getattr(calls[name], "digest", None), node.attr("digest")
    if said and found and said != found:
        raise ProgramError(
            f"the function given as {name!r} ({found[:8]}) is not the one that the program was "
            f"written with ({said[:8]}); give the calls of the same capture"
        )
    return calls[name]


# -- backward ----------------------------------------------------------------------------------


def written_backward(
    tracer: Tracer, node: Node, dys: Mapping[int, Value], wanted: set[int]
) -> list[Value | None]:
    """Write the backward of a call, given the gradients of its results; return its operands'.

    The call itself is rewritten to the variant that keeps values for the backward.
    """
    name = str(node.attr("function")).removesuffix(KEEPING)
    function = tracer.functions.get(name)
    if function is None:
        raise ProgramError(
            f"{node.where}: call ({node.name}) has no gradient; write the backward of that part as "
            "a program or a call of its own, or capture it"
        )
    if function.why_no_gradient:
        raise ProgramError(f"{node.where}: {name} has no gradient: {function.why_no_gradient}")
    samples = node.type.shape[0] if node.type.ndim else None
    kept = _kept(tracer, node, function, samples)
    slots = [(k, slot) for k, slot in enumerate(function.operands) if slot.has_gradient]
    only_weights = all(function.operands[k].dim is None for k in wanted)
    if only_weights:
        slots = [(k, slot) for k, slot in slots if slot.dim is None]
    gradients = [_dy(tracer, node, dys, k, s) for k, s in enumerate(function.results)]
    values = [Value(tracer, tracer.nodes[n]) for n in node.inputs]
    given = [*values, *kept, *(d for d in gradients if d is not None)]
    called = name + (WEIGHTS if only_weights else BACKWARD)
    reads = (*function.operands, *function.kept, *(s for s in function.results if s.has_gradient))
    flops = function.flops[1] + (0.0 if function.kept else function.flops[0])
    by = [slot for _, slot in slots]
    attrs = function.attrs(called, given, samples, (reads, by), flops)
    made = tracer.add("call", given, attrs, called)
    out: list[Value | None] = [None] * len(values)
    for index, (k, slot) in enumerate(slots):
        out[k] = _picked(made, slot, index, samples, f"{made.name}.{slot.name}")
    return out


def _kept(tracer: Tracer, node: Node, function: Function, samples: int | None) -> list[Value]:
    """Return the values that a call keeps; rewrite it to the variant that keeps them if need be."""
    if not function.kept:
        return []
    names = [f"{node.name}.kept.{k}" for k in range(len(function.kept))]
    made = Value(tracer, node)
    if names[0] not in tracer.nodes:
        slots = (*function.results, *function.kept)
        changed: dict[str, Attr] = {
            "function": function.name + KEEPING,
            "batch": (node.attr("batch")[0], tuple(slot.along for slot in slots)),
            "outs": tuple(slot.of(samples) for slot in slots),
        }
        tracer.nodes[node.name] = node.with_attrs(**changed)
        for k, slot in enumerate(function.kept):
            _picked(made, slot, len(function.results) + k, samples, names[k])
    return [Value(tracer, tracer.nodes[name]) for name in names]


def _dy(
    tracer: Tracer, node: Node, dys: Mapping[int, Value], index: int, slot: Slot
) -> Value | None:
    """Return the gradient of a result: zeros where nothing depends on it, None if it has none."""
    if not slot.has_gradient:
        return None
    if index in dys:
        return dys[index]
    made = slot.of(node.type.shape[0] if node.type.ndim else None)
    zero = lang.cast(tracer.value(0.0), made.dtype)
    dims = tuple(range(made.ndim))
    attrs: dict[str, Attr] = {"shape": made.shape, "dims": dims, "keep": False}
    zeros = tracer.add("expand", [zero], attrs) if made.ndim else zero
    for axis, layout in node.type.layouts:
        if layout.kind == "S" and slot.dim is not None:
            zeros = lang.slice(zeros, slot.dim, axis=axis)
    return zeros
