"""Values while a program is being written down: the arguments of a user's function.

Calling the function once with such values records its operations. Each is checked as it is made,
so an error names the user's own line. A value has the name of the variable that it is assigned to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import ProgramError
from penstock.step.program.infer import infer
from penstock.step.program.lines import here, located, users_frame, variable_of
from penstock.step.program.mesh import Mesh
from penstock.step.program.mistakes import NotATensor, instead_of, kind_of, refuse
from penstock.step.program.nodes import Attr, Node
from penstock.step.program.types import Type

__all__ = ["Tracer", "Value"]

_UFUNCS = {
    **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"equal": "eq", "not_equal": "ne", "matmul": "matmul"},
}
"""Operators between a number of NumPy and a value, by their names in NumPy and here."""


class Tracer:
    """The nodes of a program so far."""

    def __init__(self, mesh: Mesh, axis: str | None) -> None:
        self.mesh = mesh
        self.axis = axis
        """The axis of moves that name none."""
        self.nodes: dict[str, Node] = {}
        self.functions: dict[str, Any] = {}
        """The functions that it calls, by name; `calls` has their type."""
        self.dims: set[str] = set()
        """Names of its dimensions."""
        self._numbers: dict[str, int] = {}

    def add(self, op: str, inputs: list[Value], attrs: dict[str, Attr], name: str = "") -> Value:
        """Write down an operation and return its value."""
        frame = users_frame()
        try:
            if any(value.tracer is not self for value in inputs):
                raise ProgramError("a value of another program")
            made = infer(op, [value.type for value in inputs], attrs, self.mesh)
        except ProgramError as error:
            raise located(error) from None
        label = name or (variable_of(frame) if frame is not None else "")
        node = Node(
            name=self._name(label, op),
            op=op,
            inputs=tuple(value.name for value in inputs),
            attrs=tuple(attrs.items()),
            type=made,
            label=label,
            where=here(),
        )
        self.nodes[node.name] = node
        return Value(self, node)

    def value(self, given: Any) -> Value:
        """Return a number as a value of this program."""
        if isinstance(given, Value):
            return given
        is_number = isinstance(given, np.bool_ | np.integer | np.floating)
        if is_number or (isinstance(given, np.ndarray) and not given.ndim):
            given = given.item()
        if not isinstance(given, bool | int | float):
            refuse(
                f"{kind_of(given)} is not a value of a program; give tensors as parameters, and "
                "numbers as int or float"
            )
        # One node for each number; its repr tells 1 from 1.0, which have different types.
        number = float(given) if isinstance(given, float) else int(given)
        known = self.nodes.get(f"const {number!r}")
        if known is not None:
            return Value(self, known)
        return self.add("const", [], {"value": number}, f"const {number!r}")

    def product(self, a: Value, b: Value) -> Value:
        """Return the product of matrices; a vector is a row on the left, a column on the right."""
        is_row, is_column = a.type.ndim == 1, b.type.ndim == 1
        if is_row:
            a = self._expanded(a, 0)
        if is_column:
            b = self._expanded(b, 1)
        made = self.add("matmul", [a, b], {})
        last = made.type.ndim - 1
        gone = (last - 1,) * is_row + (last,) * is_column
        # The dimensions have length 1: their sum only drops them.
        return self.add("sum", [made], {"dims": gone, "keep": False}) if gone else made

    def _expanded(self, x: Value, dim: int) -> Value:
        shape = (1, *x.shape) if dim == 0 else (*x.shape, 1)
        return self.add("expand", [x], {"shape": shape, "dims": (dim,), "keep": False})

    def axis_of(self, axis: str | tuple[str, ...] | None) -> str | tuple[str, ...]:
        """Return the given axis, or the default one."""
        if axis is not None:
            return axis
        if self.axis is None:
            refuse(f"which axis of {self.mesh}? Say axis=..., or @program(axis=...) for all")
        return self.axis

    def _name(self, label: str, op: str) -> str:
        if label and label not in self.nodes:
            return label
        stem = f"{label}.{op}" if label else op
        if label and stem not in self.nodes:
            return stem
        number = self._numbers[stem] = self._numbers.get(stem, 1 if label else 0) + 1
        return f"{stem}.{number}"


def _operator(op: str, *, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """Return the method of an operator between a value and another one, or a number."""

    def method(self: Value, other: Any) -> Value:
        pair = [self, self.tracer.value(other)]
        return self.tracer.add(op, pair[::-1] if swapped else pair, {})

    return method


class Value(NotATensor):
    """A value of a program that is being written: a name and a type, no numbers yet."""

    __slots__ = ("node", "tracer")
    __hash__ = object.__hash__

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer = tracer
        self.node = node

    @property
    def name(self) -> str:
        """Its name in the program."""
        return self.node.name

    @property
    def type(self) -> Type:
        """Its shape, elements and layouts."""
        return self.node.type

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape over all ranks."""
        return self.node.type.shape

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", swapped=True)
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]

    def __matmul__(self, other: Any) -> Value:
        return self.tracer.product(self, self.tracer.value(other))

    def __rmatmul__(self, other: Any) -> Value:
        return self.tracer.product(self.tracer.value(other), self)

    def __neg__(self) -> Value:
        return self.tracer.add("neg", [self], {})

    def __abs__(self) -> Value:
        return self.tracer.add("abs", [self], {})

    def _changed(self, other: Any) -> Any:
        if self.node.op in ("input", "update"):
            refuse(
                f"values do not change in place, so nothing would be left in {self.name} for the "
                "next step; write x = ps.update(x, x + y) for a state, x = x + y for a new value"
            )
        return NotImplemented  # Python goes on with x = x + y.

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = _changed

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Value:
        op = _UFUNCS.get(ufunc.__name__)
        if op is None or method != "__call__" or kwargs:
            name = ufunc.__name__
            refuse(f"np.{name} takes no value of a program; {instead_of(name)}")
        values = [self.tracer.value(one) for one in inputs]
        return self.tracer.product(*values) if op == "matmul" else self.tracer.add(op, values, {})

    def sqrt(self) -> Value:
        """Return the root of each element."""
        return self.tracer.add("sqrt", [self], {})

    def __repr__(self) -> str:
        return f"<{self.name}: {self.type}>"
