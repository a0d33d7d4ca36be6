"""Values while a program is being written down: what a user's function runs on.

Calling the function once with such values records its operations. Each is checked as it is made,
so an error names the user's own line. A value is called after the variable that it is given to.
"""

from __future__ import annotations

import dis
import linecache
import sys
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from penstock.errors import ProgramError
from penstock.program.infer import infer
from penstock.program.mesh import Mesh
from penstock.program.nodes import Attr, Node
from penstock.program.types import Type

__all__ = ["Tracer", "Value"]

_WRITERS = ("trace", "language", "gradient", "calls")
_INNER = {str(Path(__file__).with_name(f"{name}.py")) for name in _WRITERS}
"""Where a value is written down for the user, who stands further out."""
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


class Tracer:
    """The nodes of a program so far."""

    def __init__(self, mesh: Mesh, axis: str | None) -> None:
        self.mesh = mesh
        self.axis = axis
        """The axis that is meant where none is named."""
        self.nodes: dict[str, Node] = {}
        self.functions: dict[str, Any] = {}
        """What is known of the functions that it calls (`calls`), by name."""
        self.dims: set[str] = set()
        """Names of dimensions that it has."""
        self._numbers: dict[str, int] = {}

    def add(self, op: str, inputs: list[Value], attrs: dict[str, Attr], name: str = "") -> Value:
        """Write down an operation and return its value."""
        frame = _users_frame()
        where = _line_of(frame)
        try:
            if any(value.tracer is not self for value in inputs):
                raise ProgramError("a value of another program")
            made = infer(op, [value.type for value in inputs], attrs, self.mesh)
        except ProgramError as error:
            if not where or str(error).startswith(where):
                raise
            raise ProgramError(f"{where}: {error}") from None
        label = name or (_variable_of(frame) if frame is not None else "")
        node = Node(
            name=self._name(label, op),
            op=op,
            inputs=tuple(value.name for value in inputs),
            attrs=tuple(attrs.items()),
            type=made,
            label=label,
            where=where,
        )
        self.nodes[node.name] = node
        return Value(self, node)

    def value(self, given: Any) -> Value:
        """Return a number as a value of this program."""
        if isinstance(given, Value):
            return given
        if isinstance(given, bool | int | float):
            number = float(given) if isinstance(given, float) else int(given)
            known = self.nodes.get(f"const {number!r}")
            if known is not None:
                return Value(self, known)
            return self.add("const", [], {"value": number}, f"const {number!r}")
        raise ProgramError(
            f"{_line_of(_users_frame())}: {type(given).__name__} is not a value of a program; "
            "give tensors as parameters"
        )

    def here(self) -> str:
        """Return the user's line that is being written down."""
        return _line_of(_users_frame())

    def axis_of(self, axis: str | tuple[str, ...] | None) -> str | tuple[str, ...]:
        """Return the axis that is meant."""
        if axis is not None:
            return axis
        if self.axis is None:
            raise ProgramError(
                f"{_line_of(_users_frame())}: which axis of {self.mesh}? Say axis=..., or "
                "@program(axis=...) for all of them"
            )
        return self.axis

    def _name(self, label: str, op: str) -> str:
        if label and label not in self.nodes:
            return label
        stem = f"{label}.{op}" if label else op
        if label and stem not in self.nodes:
            return stem
        number = self._numbers[stem] = self._numbers.get(stem, 1 if label else 0) + 1
        return f"{stem}.{number}"


class Value:
    """A value of a program, before there is one."""

    __slots__ = ("node", "tracer")
    __array_priority__ = 1000

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer = tracer
        self.node = node

    @property
    def name(self) -> str:
        """What it is called in the program."""
        return self.node.name

    @property
    def type(self) -> Type:
        """Its shape, elements and layouts."""
        return self.node.type

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape over all ranks."""
        return self.node.type.shape

    def _with(self, op: str, other: Any, *, swapped: bool = False) -> Value:
        pair = [self, self.tracer.value(other)]
        return self.tracer.add(op, pair[::-1] if swapped else pair, {})

    def __add__(self, other: Any) -> Value:
        return self._with("add", other)

    def __radd__(self, other: Any) -> Value:
        return self._with("add", other, swapped=True)

    def __sub__(self, other: Any) -> Value:
        return self._with("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._with("sub", other, swapped=True)

    def __mul__(self, other: Any) -> Value:
        return self._with("mul", other)

    def __rmul__(self, other: Any) -> Value:
        return self._with("mul", other, swapped=True)

    def __truediv__(self, other: Any) -> Value:
        return self._with("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._with("div", other, swapped=True)

    def __pow__(self, other: Any) -> Value:
        return self._with("pow", other)

    def __rpow__(self, other: Any) -> Value:
        return self._with("pow", other, swapped=True)

    def __matmul__(self, other: Any) -> Value:
        return self._with("matmul", other)

    def __neg__(self) -> Value:
        return self.tracer.add("neg", [self], {})

    def __abs__(self) -> Value:
        return self.tracer.add("abs", [self], {})

    def __lt__(self, other: Any) -> Value:
        return self._with("lt", other)

    def __le__(self, other: Any) -> Value:
        return self._with("le", other)

    def __gt__(self, other: Any) -> Value:
        return self._with("gt", other)

    def __ge__(self, other: Any) -> Value:
        return self._with("ge", other)

    def __bool__(self) -> bool:
        raise ProgramError(
            f"{_line_of(_users_frame())}: a value is not known while a program is written down; "
            "choose with where(condition, a, b)"
        )

    def sqrt(self) -> Value:
        """Return the root of each element."""
        return self.tracer.add("sqrt", [self], {})

    def __repr__(self) -> str:
        return f"<{self.name}: {self.type}>"


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _INNER:
        frame = frame.f_back
    return frame


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno).strip()
    return f"{Path(path).name}:{frame.f_lineno}" + (f": `{text}`" if text else "")


@lru_cache(maxsize=256)
def _stores_of(code: CodeType) -> tuple[list[int], list[str]]:
    """Return where instructions begin, and the variable that the one after each stores to."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    after = [str(s.argval) if s.opname in _STORES else "" for s in steps[1:]]
    return [step.offset for step in steps], [*after, ""]


def _variable_of(frame: FrameType) -> str:
    # While a call is under way the frame may stand behind its instruction, in what that caches.
    offsets, names = _stores_of(frame.f_code)
    return names[bisect_right(offsets, frame.f_lasti) - 1]
