"""Kernels for the CPU as text: one C function for each pass over a block.

Loops have no dependence between their elements, so any C compiler vectorises them, within a second.
Divisions and roots are rounded by IEEE rules and no product is merged with a sum: the values are
the same bits as those of torch's own operations, one after the other. Sums over the block, or over
a row, are made with 64 bits.

As on CUDA, a value that is reduced over W ranks or gathered to them has W pointers; on one host
these are tensors in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.draws import kept_factor
from penstock.step.kernels.names import Names
from penstock.step.kernels.stages import Stage
from penstock.step.kernels.tiles import one_values
from penstock.step.program.nodes import Node
from penstock.step.program.ops import OPS
from penstock.step.program.random import DRAW_BITS, MIX, threshold

__all__ = ["NativeText", "can_write", "native_text"]

_TYPES = {"f64": "double", "f32": "float", "i64": "int64_t", "i32": "int32_t", "u8": "uint8_t"}
_TYPES |= {"bool": "uint8_t"}
_STORED = _TYPES | {"bf16": "uint16_t", "f16": "_Float16"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">"}
_INFIX |= {"ge": ">=", "eq": "==", "ne": "!=", "and": "&&", "or": "||"}
_CALLED = {
    "sqrt": "{sqrt}({0})",
    "rsqrt": "1 / {sqrt}({0})",
    "maximum": "({0} > {1} || {0} != {0} ? {0} : {1})",
    "minimum": "({0} < {1} || {0} != {0} ? {0} : {1})",
    "neg": "-{0}",
    "abs": "{abs}({0})",
    "sign": "(({0} > 0) - ({0} < 0))",
    "relu": "({0} < 0 ? 0 : {0})",
    "not": "!{0}",
    "where": "({0} ? {1} : {2})",
}
_NEUTRAL = {"sum": "0.0", "max": "-INFINITY", "min": "INFINITY"}
_GOLDEN = 0x9E3779B9
ROW_LENGTH_MAX = 64 * 1024
"""Longest rows of which several lines fit on a thread's stack."""

_HEAD = """\
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static inline float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : near);
}
"""


@dataclass(frozen=True, kw_only=True)
class NativeText:
    """One pass: its text, and the arguments of its function, in order."""

    name: str
    text: str
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    """Outputs that it writes, then values that it keeps (`kept NAME`)."""
    totals: tuple[str, ...]
    numbers: tuple[str, ...]
    """Numbers of the host."""
    ones: tuple[str, ...]
    """Single values that were computed before."""


def can_write(body: KernelBody) -> bool:
    """Whether every operation of a body has a fast form here."""
    if body.kind == "loose" or any(body.reach[value] == "col" for _, value in body.stores):
        return False
    if body.kind == "rows" and body.full[-1] > ROW_LENGTH_MAX:
        return False
    known = set(_INFIX) | set(_CALLED) | {"cast", "dropout", "sum", "max", "min"}
    return {n.op for n in body.nodes if body.reach[n.name] != "one"} <= known


def native_text(body: KernelBody, stage: Stage, widths: dict[str, int]) -> NativeText:
    """Return one pass of a body as C; `widths`: how many tensors an input or output is."""
    if body.kind == "rows":
        return _RowWriter(body, stage, widths).written()
    return _NativeWriter(body, stage, widths).written()


class _NativeWriter:
    _NUMBER = (
        "const int64_t number = k[4] ? i + k[0] * k[3] + k[1] "
        ": (i / k[2] + k[0]) * k[3] + i % k[2] + k[1];"
    )
    """k: first row, first column, row length, row length of the whole, whether a run."""

    def __init__(self, body: KernelBody, stage: Stage, widths: dict[str, int]) -> None:
        self._body, self._stage, self._widths = body, stage, widths
        self._names = Names(_TAKEN)
        self._lines: list[str] = []
        self._load_of = dict(stage.reads)
        self._has_place = any(node.op == "dropout" for node in stage.nodes)
        self._wide = "double" if body.is_wide else "float"

    def written(self) -> NativeText:
        name = "".join(c if c.isalnum() else "_" for c in f"{self._body.name}_{self._stage.index}")
        parameters = "void *const *p, const double *h, const int64_t *k, double *t"
        text = [_HEAD, f"void {name}({parameters}, int64_t begin, int64_t end) {{"]
        text += [f"    {line}" for line in (*self._opening(), *self._loop())]
        return NativeText(
            name=name,
            text="\n".join([*text, "}"]) + "\n",
            loads=self._stage.loads,
            stores=tuple(n for n, _ in self._stage.writes),
            totals=tuple(n.name for n in self._stage.totals),
            numbers=self._body.numbers,
            ones=one_values(self._body, self._stage),
        )

    def _loop(self) -> list[str]:
        self._write_loop()
        totals = [self._names(f"{n.name} sum") for n in self._stage.totals]
        text = [self._pragma(self._stage.totals), "for (int64_t i = begin; i < end; i++) {"]
        text += [f"    {line}" for line in self._lines]
        return [*text, "}", *(f"t[{k}] = {total};" for k, total in enumerate(totals))]

    # -- around the loop -----------------------------------------------------------------------

    def _pointers(self, name: str) -> list[str]:
        width = self._widths.get(name, 0)
        several = [f"{name} at {k}" for k in range(width)] if width else [f"{name} at"]
        return [self._names(one) for one in several]

    def _opening(self) -> list[str]:
        body, out, at = self._body, [], 0
        for name in self._stage.loads:
            dtype = self._stored(name)
            for pointer in self._pointers(name):
                out.append(f"const {dtype} *{pointer} = p[{at}];")
                at += 1
        for name, _ in self._stage.writes:
            dtype = self._stored(name)
            for pointer in self._pointers(f"out {name}"):
                out.append(f"{dtype} *{pointer} = p[{at}];")
                at += 1
        numbers = [*body.numbers, *one_values(body, self._stage)]
        for index, name in enumerate(numbers):
            is_half = name.endswith((" low", " high"))
            dtype = "uint32_t" if is_half else self._number_type(name)
            out.append(f"const {dtype} {self._names(name)} = ({dtype})h[{index}];")
        for name in self._stage.loads:
            if body.reach.get(name) == "one":
                x = self._names(name)
                out.append(f"const {self._wide} {x} = {self._read(name, self._pointers(name)[0])};")
        return out + [
            f"double {self._names(f'{n.name} sum')} = {_NEUTRAL[n.op]};" for n in self._stage.totals
        ]

    def _number_type(self, name: str) -> str:
        made = self._body.types.get(name)
        return self._wide if made is None or made.is_float else "int64_t"

    def _pragma(self, sums: Sequence[Node]) -> str:
        clauses = []
        for node in sums:
            how = {"sum": "+"}.get(node.op, node.op)
            clauses.append(f" reduction({how}:{self._names(f'{node.name} sum')})")
        return f"#pragma omp simd{''.join(clauses)}"

    # -- inside --------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        if self._has_place:
            self._lines.append(self._NUMBER)
        for name in self._stage.loads:
            if self._body.reach.get(name) != "one":
                self._load(name)
        for value, load in self._load_of.items():
            self._lines.append(self._set(value, self._names(load)))
        for node in self._stage.nodes:
            self._lines.append(self._set(node.name, self._expression(node)))
        for node in self._stage.totals:
            self._add_up(node)
        for name, value in self._stage.writes:
            self._store(name, value)

    def _set(self, name: str, made: str) -> str:
        return f"const {_TYPES[self._body.dtype(name)]} {self._names(name)} = {made};"

    def _stored(self, name: str) -> str:
        """Return the type in memory of an input, an output, or a kept value."""
        body = self._body
        if name.startswith("kept "):
            return _TYPES[body.dtype(name.removeprefix("kept "))]
        return _STORED[body.types[name].dtype]

    def _read(self, name: str, pointer: str, at: str = "0") -> str:
        is_narrow = self._body.types[name].dtype == "bf16"
        return f"wide({pointer}[{at}])" if is_narrow else f"{pointer}[{at}]"

    def _load(self, name: str) -> None:
        body = self._body
        value = body.value_of(name)
        dtype, x = _TYPES[body.dtype(value)], self._names(name)
        op = dict(body.addends).get(name)
        at = self._at(value)
        parts = [f"({dtype}){self._read(name, pointer, at)}" for pointer in self._pointers(name)]
        if len(parts) == 1:
            self._lines.append(f"const {dtype} {x} = {parts[0]};")
            return
        merge = _CALLED[f"{op}imum"] if op in ("max", "min") else "{0} + {1}"
        self._lines.append(f"{dtype} {x} = {parts[0]};")
        self._lines += [f"{x} = {merge.format(x, part)};" for part in parts[1:]]
        if op == "mean":
            self._lines.append(f"{x} = {x} / {len(parts)};")

    def _add_up(self, node: Node) -> None:
        total, x = self._names(f"{node.name} sum"), self._names(node.inputs[0])
        if node.op == "sum":
            self._lines.append(f"{total} += (double){x};")
        else:
            sign = ">" if node.op == "max" else "<"
            self._lines.append(f"{total} = {x} {sign} {total} ? {x} : {total};")

    def _store(self, name: str, value: str) -> None:
        x = self._operand(value)
        is_narrow = not name.startswith("kept ") and self._body.types[name].dtype == "bf16"
        made = f"narrow({x})" if is_narrow else f"({self._stored(name)}){x}"
        for pointer in self._pointers(f"out {name}"):
            self._lines.append(f"{pointer}[{self._at(value)}] = {made};")

    def _at(self, value: str) -> str:
        """Return the index of the current element."""
        return "i"

    def _operand(self, name: str) -> str:
        if name not in self._body.consts:
            return self._names(name)
        value = self._body.consts[name]
        if isinstance(value, int):
            return f"INT64_C({value})"
        if not math.isfinite(value):
            return {"inf": "INFINITY", "-inf": "(-INFINITY)"}.get(str(value), "NAN")
        return f"({self._wide}){value!r}"

    def _expression(self, node: Node) -> str:
        op = node.op
        args = [self._operand(name) for name in node.inputs]
        dtype = _TYPES[self._body.dtype(node.name)]
        if op in _INFIX:
            # As in torch, integers beside floats are floats.
            first = f"({dtype}){args[0]}" if op in ("add", "sub", "mul", "div") else args[0]
            second = f"({dtype}){args[1]}" if op in ("add", "sub", "mul", "div") else args[1]
            return f"{first} {_INFIX[op]} {second}"
        if op == "cast":
            return f"({args[0]} != 0)" if dtype == "uint8_t" else f"({dtype}){args[0]}"
        if op == "dropout":
            return self._dropout(node, args[0])
        suffix = "f" if dtype == "float" else ""
        whole = "llabs" if dtype.startswith("int") else ""
        return _CALLED[op].format(*args, sqrt=f"sqrt{suffix}", abs=whole or f"fabs{suffix}")

    def _dropout(self, node: Node, x: str) -> str:
        low, high = (self._names(f"{node.inputs[1]} {half}") for half in ("low", "high"))
        bits, share = self._names(f"{node.name} bits"), float(node.attr("share"))
        lines = [f"uint32_t {bits} = ((uint32_t)number ^ {low}) + {_GOLDEN}u;", *_mixing(bits)]
        lines.append(f"{bits} += (uint32_t)(number >> 32) * {_GOLDEN}u + {high};")
        self._lines += [*lines, *_mixing(bits)]
        kept = f"({bits} >> {32 - DRAW_BITS}) >= {threshold(share)}u"
        return f"({kept} ? {x} * ({self._wide}){kept_factor(share)!r} : 0)"


class _RowWriter(_NativeWriter):
    """Rows one after the other, each in as many loops as its sums need, plus one.

    A value that a later loop needs of an earlier one is kept in an array (a line) on the stack,
    which stays in the first-level cache. Only the last loop stores results: before it, inputs are
    read that may have the same memory.
    """

    _NUMBER = "const int64_t number = (r + k[0]) * k[3] + j + k[1];"

    def _at(self, value: str) -> str:
        return {"full": "r * n + j", "col": "j", "row": "r"}[self._body.reach[value]]

    def _loop(self) -> list[str]:
        level = self._levels()
        last = max(level.values(), default=0)
        kept = self._kept(level, last)
        text = ["const int64_t n = k[2];"]
        text += [f"{self._c_type(v)} {self._names(f'{v} line')}[n];" for v in kept]
        text.append("for (int64_t r = begin; r < end; r++) {")
        for name in self._stage.loads:
            if self._body.reach[name] == "row":
                self._load(name)
        text += [f"    {line}" for line in self._lines]
        for phase in range(last + 1):
            text += [f"    {line}" for line in self._phase(phase, level, kept, phase == last)]
        self._lines = []
        for name, value in self._stage.writes:
            if self._body.reach[value] == "row":
                self._store(name, value)
        return [*text, *(f"    {line}" for line in self._lines), "}"]

    def _c_type(self, value: str) -> str:
        return _TYPES[self._body.dtype(value)]

    def _is_sum(self, node: Node) -> bool:
        return OPS[node.op].kind == "reduce"

    def _is_line(self, name: str) -> bool:
        return self._body.reach.get(name) in ("full", "col")

    def _levels(self) -> dict[str, int]:
        """Return for each value the first loop in which it is available."""
        out: dict[str, int] = {}
        for node in self._stage.nodes:
            before = max((out.get(name, 0) for name in node.inputs), default=0)
            out[node.name] = before + self._is_sum(node)
        return out

    def _loop_of(self, node: Node, level: dict[str, int]) -> int:
        return level[node.name] - self._is_sum(node)

    def _kept(self, level: dict[str, int], last: int) -> list[str]:
        """Return the values that a later loop needs in a line."""
        later = {
            name
            for node in self._stage.nodes
            for name in node.inputs
            if name in level and self._is_line(name) and level[name] < self._loop_of(node, level)
        }
        stored = {value for _, value in self._stage.writes if value in level}
        later |= {value for value in stored if level[value] < last and self._is_line(value)}
        return [node.name for node in self._stage.nodes if node.name in later]

    def _phase(
        self, phase: int, level: dict[str, int], kept: list[str], is_last: bool
    ) -> list[str]:
        here = [n for n in self._stage.nodes if self._loop_of(n, level) == phase]
        sums = [n for n in here if self._is_sum(n)]
        inner = [n for n in here if self._is_line(n.name)]
        single = [n for n in here if not self._is_line(n.name) and not self._is_sum(n)]
        stores = [(n, v) for n, v in self._stage.writes if self._is_line(v) and is_last]
        text = [self._set(node.name, self._expression(node)) for node in single]
        if not inner and not sums and not stores:
            return text
        self._lines = [self._NUMBER] if any(n.op == "dropout" for n in inner) else []
        self._bring([*inner, *sums], [v for _, v in stores], level, phase)
        for node in inner:
            self._lines.append(self._set(node.name, self._expression(node)))
            if node.name in kept:
                line = self._names(f"{node.name} line")
                self._lines.append(f"{line}[j] = {self._names(node.name)};")
        for node in sums:
            self._add_up(node)
        for name, value in stores:
            self._store(name, value)
        text += [f"double {self._names(f'{n.name} sum')} = {_NEUTRAL[n.op]};" for n in sums]
        text += [self._pragma(sums), "for (int64_t j = 0; j < n; j++) {"]
        text += [*(f"    {line}" for line in self._lines), "}"]
        return text + [self._set(n.name, self._names(f"{n.name} sum")) for n in sums]

    def _bring(
        self, nodes: list[Node], stored: list[str], level: dict[str, int], phase: int
    ) -> None:
        """Load the values that a loop reads and does not compute: from memory, or from a line."""
        for name in dict.fromkeys([*(name for n in nodes for name in n.inputs), *stored]):
            if not self._is_line(name):
                continue
            if name not in level:
                self._load(name)
            elif level[name] < phase:
                self._lines.append(self._set(name, f"{self._names(f'{name} line')}[j]"))


_TAKEN: tuple[str, ...] = ("p", "h", "k", "t", "i", "r", "j", "n", "begin", "end", "number")
_TAKEN += ("wide", "narrow", "float", "double")
_TAKEN += ("int", "long", "char", "short", "void", "const", "for", "if", "else", "while", "do")
_TAKEN += ("switch", "case", "auto", "register", "signed", "unsigned", "static", "inline", "exp")
_TAKEN += ("log", "sqrt", "sqrtf", "pow", "gamma", "y0", "y1", "j0", "j1", "jn", "yn", "struct")


def _mixing(bits: str) -> list[str]:
    lines = []
    for shift, factor in MIX:
        lines.append(f"{bits} ^= {bits} >> {shift};")
        if factor:
            lines.append(f"{bits} *= {factor}u;")
    return lines
