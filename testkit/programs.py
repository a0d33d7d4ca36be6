"""Random step programs, with inputs: to try rewrites on, ours and those of users.

A program is written by picking operations and operands at random; what the rules of layouts refuse
is left out. So all layouts, uneven lengths and empty parts meet all operations. Everything is drawn
from one `random.Random`, so a seed makes the same program again.

Operations are such that rounding stays rounding: none is near a pole, and none jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from penstock.errors import ProgramError
from penstock.step.program import language as lang
from penstock.step.program.layouts import L, Layout, P, R, S, partial
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Attr, Program
from penstock.step.program.trace import Tracer, Value
from penstock.step.program.types import Type

__all__ = ["MESHES", "Sample", "random_program"]

MESHES = (
    {"dp": 1},
    {"dp": 2},
    {"dp": 3},
    {"dp": 4},
    {"dp": 8},
    {"dp": 2, "tp": 2},
    {"dp": 3, "tp": 2},
    {"dp": 2, "tp": 4},
    {"pp": 2, "dp": 1, "tp": 2},
)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A program and what it is given."""

    program: Program
    wholes: dict[str, Any]
    """By input: its whole value; several where ranks have addends or values of their own."""
    numbers: dict[str, float]
    sources: dict[str, Callable[[int], Any]] = field(default_factory=dict)

    def given(self, program: Program) -> dict[str, Any]:
        """Return the inputs as a program holds them, which was made of this one."""
        out: dict[str, Any] = dict(self.numbers)
        for node in program.inputs:
            if node.op == "input":
                out[node.name] = _held(self.wholes[node.name], node.type, program.mesh)
        return out


def random_program(
    rng: Random,
    *,
    num_ops: int = 14,
    local: bool = True,
    sums: bool = True,
    meshes: Sequence[dict[str, int]] = MESHES,
) -> Sample:
    """Return a program of about so many operations, on one of some meshes.

    Without `local` every value has a whole that does not depend on the mesh. Without `sums` nothing
    is added up on one rank, so rewrites that only move work must not change a bit.
    """
    mesh = Mesh(axes=tuple(rng.choice(meshes).items()))
    writer = _Writer(rng, mesh, local=local, sums=sums)
    for _ in range(rng.randint(3, 5)):
        writer.write_input()
    for _ in range(num_ops):
        writer.write()
    program = writer.program()
    return Sample(
        program=program,
        wholes={n.name: _whole(rng, n.type, mesh) for n in program.inputs if n.op == "input"},
        numbers={n.name: rng.randint(0, 9) for n in program.inputs if n.op == "scalar"},
        sources={name: _source(rng, made) for name, made in writer.sources.items()},
    )


def _apart(made: Type) -> tuple[str, ...]:
    """Return the axes along which ranks have different values of the same elements."""
    return tuple(axis for axis, layout in made.layouts if layout.kind in "PL")


def _whole(rng: Random, made: Type, mesh: Mesh) -> Any:
    numbers = np.random.default_rng(rng.getrandbits(32))
    return numbers.normal(size=(mesh.size(*_apart(made)), *made.shape))


def _held(wholes: Any, made: Type, mesh: Mesh) -> list[Any]:
    return [
        wholes[mesh.coordinate(rank, *_apart(made))][
            tuple(slice(*bound) for bound in made.bounds(mesh, rank))
        ]
        for rank in range(mesh.num_ranks)
    ]


def _source(rng: Random, made: Type) -> Callable[[int], Any]:
    seed = rng.getrandbits(32)
    return lambda iteration: np.random.default_rng([seed, iteration]).normal(size=made.shape)


class _Writer:
    """A program that is being written at random."""

    def __init__(self, rng: Random, mesh: Mesh, *, local: bool, sums: bool) -> None:
        self._rng, self._mesh, self._local = rng, mesh, local
        self._tracer = Tracer(mesh, None)
        self._values: list[Value] = []
        self._lengths = rng.sample(_LENGTHS, 3)
        self._shape = tuple(rng.choice(self._lengths) for _ in range(rng.randint(1, 3)))
        self.sources: dict[str, Type] = {}
        self._seed = self._add("scalar", [], {"type": Type(shape=(), dtype="i64")}, name="seed")
        self._kinds: list[tuple[Callable[[], Value | None], int]] = [
            (self._unary, 3),
            (self._binary, 5),
            (self._scaled, 2),
            (self._reduced, 3 if sums else 0),
            (self._product, 3 if sums else 0),
            (self._softmax, 1 if sums else 0),
            (self._chosen, 1),
            (self._dropped, 2),
            (self._cast, 1),
            (self._turned, 1),
            (self._reshaped, 1),
            (self._moved, 9),
            (self._updated, 3),
            (self._stored, 1),
            (self._loaded, 1),
        ]

    # -- the parts -----------------------------------------------------------------------------

    def write_input(self) -> None:
        shape = self._shape_near()
        made = Type(shape=shape, layouts=tuple(self._layouts(shape).items()))
        self._values.append(self._add("input", [], {"type": made}))

    def write(self) -> None:
        """Write one operation, if one of a few tries is legal."""
        kinds = [kind for kind, weight in self._kinds for _ in range(weight)]
        for _ in range(8):
            try:
                made = self._rng.choice(kinds)()
            except ProgramError:
                continue
            if made is not None:
                self._values.append(made)
                return

    def program(self) -> Program:
        nodes = self._tracer.nodes
        read = {name for node in nodes.values() for name in node.inputs}
        ends = [v.name for v in self._values if v.name not in read and v.node.op != "input"]
        some = self._rng.sample(self._values, min(2, len(self._values)))
        outputs = dict.fromkeys([*ends, *(v.name for v in some if v.node.op != "input")])
        return Program(
            name="sample", mesh=self._mesh, nodes=tuple(nodes.values()), outputs=tuple(outputs)
        )

    def _add(self, op: str, values: list[Value], attrs: dict[str, Attr], name: str = "") -> Value:
        return self._tracer.add(op, values, attrs, name or f"v{len(self._tracer.nodes)}")

    def _shape_near(self) -> tuple[int, ...]:
        """Return a shape that often fits the others."""
        if self._rng.random() < 0.6:
            return self._shape
        if self._rng.random() < 0.3:
            return self._shape[1:] or self._shape
        return tuple(self._rng.choice(self._lengths) for _ in range(self._rng.randint(1, 3)))

    def _layouts(self, shape: tuple[int, ...]) -> dict[str, Layout]:
        out: dict[str, Layout] = {}
        for axis in self._mesh.names:
            kind = self._rng.choice("RRRRRRRRSSSSSPPPP" + ("L" if self._local else ""))
            sliced = S(self._rng.randrange(len(shape)))
            op = self._rng.choice(("max", "min")) if self._rng.random() < 0.1 else "sum"
            out[axis] = {"R": R, "S": sliced, "P": partial(op), "L": L}[kind]
        if len({lay.op for lay in out.values() if lay.kind == "P"}) > 1:
            out = {axis: P if lay.kind == "P" else lay for axis, lay in out.items()}
        return out

    def _pick(self, fits: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """Return a value, a late one rather than an early one."""
        found = [value for value in self._values if fits(value)]
        if not found:
            return None
        late = self._rng.random() ** 0.5
        return found[min(len(found) - 1, int(late * len(found)))]

    # -- operations ----------------------------------------------------------------------------

    def _unary(self) -> Value | None:
        x = self._pick()
        if x is None:
            return None
        if self._rng.random() < 0.2:
            return self._add(
                "sqrt", [self._add("add", [lang.sigmoid(x), self._number(1.0)], {})], {}
            )
        return self._add(
            self._rng.choice(("neg", "tanh", "relu", "sigmoid", "abs", "gelu")), [x], {}
        )

    def _number(self, number: float) -> Value:
        return self._tracer.value(number)

    def _binary(self) -> Value | None:
        x = self._pick()
        if x is None:
            return None
        y = self._pick(lambda value: _broadcasts(value.shape, x.shape))
        if y is None:
            return None
        op = self._rng.choice(("add", "sub", "mul", "mul", "maximum", "minimum", "div"))
        if op == "div":
            y = self._add("add", [self._add("abs", [y], {}), self._number(1.0)], {})
        pair = [x, y] if self._rng.random() < 0.5 or op == "div" else [y, x]
        return self._add(op, pair, {})

    def _scaled(self) -> Value | None:
        x = self._pick()
        if x is None:
            return None
        return self._add("mul", [x, self._number(self._rng.choice((0.5, -1.5, 0.25)))], {})

    def _reduced(self) -> Value | None:
        x = self._pick(lambda value: value.type.ndim > 0)
        if x is None:
            return None
        dims = sorted(self._rng.sample(range(x.type.ndim), self._rng.randint(1, x.type.ndim)))
        op = self._rng.choice(("sum", "sum", "max", "min"))
        return self._add(op, [x], {"dims": tuple(dims), "keep": self._rng.random() < 0.5})

    def _product(self) -> Value | None:
        x = self._pick(lambda value: value.type.ndim > 1)
        if x is None:
            return None
        y = self._pick(lambda v: v.type.ndim > 1 and v.shape[-2] == x.shape[-1])
        if y is not None:
            return self._add("matmul", [x, y], {})
        order = (*range(x.type.ndim - 2), x.type.ndim - 1, x.type.ndim - 2)
        return self._add("matmul", [x, self._add("transpose", [x], {"dims": order})], {})

    def _softmax(self) -> Value | None:
        x = self._pick(lambda value: value.type.ndim > 0)
        if x is None:
            return None
        return self._add("softmax", [x], {"dim": self._rng.randrange(x.type.ndim)})

    def _chosen(self) -> Value | None:
        """Something that is chosen and does not jump where the choice changes."""
        x = self._pick()
        if x is None:
            return None
        is_above = self._add("gt", [x, self._number(0.0)], {})
        return self._add("where", [is_above, x, self._add("mul", [x, self._number(0.5)], {})], {})

    def _dropped(self) -> Value | None:
        x = self._pick()
        return None if x is None else self._add("dropout", [x, self._seed], {"share": 0.25})

    def _cast(self) -> Value | None:
        x = self._pick()
        if x is None:
            return None
        return self._add("cast", [x], {"dtype": self._rng.choice(("bf16", "f32"))})

    def _turned(self) -> Value | None:
        x = self._pick(lambda value: value.type.ndim > 1)
        if x is None:
            return None
        dims = tuple(self._rng.sample(range(x.type.ndim), x.type.ndim))
        return self._add("transpose", [x], {"dims": dims})

    def _reshaped(self) -> Value | None:
        x = self._pick(lambda value: value.type.ndim > 1)
        if x is None:
            return None
        dim = self._rng.randrange(x.type.ndim - 1)
        flat = self._add("flatten", [x], {"dim": dim, "count": 2})
        if self._rng.random() < 0.5:
            return flat
        return self._add("unflatten", [flat], {"dim": dim, "lengths": x.shape[dim : dim + 2]})

    # -- communication, state, data ------------------------------------------------------------

    def _moved(self) -> Value | None:
        x = self._pick(lambda value: bool(value.type.layouts) or self._rng.random() < 0.3)
        if x is None:
            return None
        axis = self._rng.choice(self._mesh.names)
        dim = self._rng.randrange(x.type.ndim) if x.type.ndim else 0
        layout = x.type.layout(axis)
        if layout.kind == "P":
            return self._reduced_over(x, axis, layout, dim)
        if layout.kind == "S":
            op = "all_gather" if self._rng.random() < 0.75 else "all_to_all"
            attrs: dict[str, Attr] = {"axis": axis} if op == "all_gather" else {
                "axis": axis, "dim": dim
            }  # fmt: skip
            return self._add(op, [x], attrs)
        if layout.kind == "L" and self._rng.random() < 0.6:
            return self._add("broadcast", [x], {"axis": axis, "root": 0})
        if self._local and self._rng.random() < 0.3:
            return self._add("send", [x], {"axis": axis, "by": self._rng.choice((1, -1))})
        return self._add("slice", [x], {"axis": axis, "dim": dim})

    def _reduced_over(self, x: Value, axis: str, layout: Layout, dim: int) -> Value:
        attrs: dict[str, Attr] = {"op": layout.op, "axis": axis}
        if self._local and layout.op == "sum" and self._rng.random() < 0.2:
            attrs["op"] = "mean"
        over = [a for a in self._mesh.names if x.type.layout(a) == layout]
        if len(over) > 1 and self._rng.random() < 0.5:
            attrs["axis"] = tuple(over)
        kind = self._rng.random()
        if kind < 0.2:
            return self._add("reduce_scatter", [x], attrs | {"dim": dim})
        if kind < 0.3 and isinstance(attrs["axis"], str):
            at = self._add("reduce", [x], attrs | {"root": 0})
            return self._add("broadcast", [at], {"axis": axis, "root": 0})
        return self._add("all_reduce", [x], attrs)

    def _updated(self) -> Value | None:
        updated = {str(n.attr("target")) for n in self._tracer.nodes.values() if n.op == "update"}
        state = self._pick(lambda v: v.node.op == "input" and v.name not in updated)
        if state is None:
            return None
        value = self._pick(lambda v: v.shape == state.shape and v is not state)
        if value is None:
            return None
        # Kept small, since it comes back in the next iteration.
        kept = self._add("tanh", [value], {})
        return self._add("update", [state, kept], {"target": state.name})

    def _stored(self) -> Value | None:
        x = self._pick()
        return None if x is None else self._add("store", [x], {"place": f"p{len(self._values)}"})

    def _loaded(self) -> Value | None:
        shape = self._shape_near()
        layouts = {a: lay for a, lay in self._layouts(shape).items() if lay.kind in "RS"}
        made = Type(shape=shape, layouts=tuple(layouts.items()))
        name = f"source{len(self.sources)}"
        self.sources[name] = made
        return self._add("load", [], {"source": name, "type": made})


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(
        x in (1, y) or y == 1 for x, y in zip(reversed(a), reversed(b), strict=False)
    )  # fmt: skip
