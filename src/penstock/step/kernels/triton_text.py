"""Kernels for CUDA as text: one Triton function for each pass over a block.

A flat pass works on masked tiles of a run of elements, a row-wise one on whole rows. Intermediate
values stay in registers; sums are made with 32 bits. A pass that makes sums over the whole block
runs as a fixed number of programs that each store one partial sum; the next pass adds these up
itself, so no program waits for another and the order of additions is always the same.

In flat kernels divisions and roots are rounded by IEEE rules, and products are not merged with sums
(`enable_fp_fusion`): they give the same bits as kernels for the CPU. Memory is the limit there, not
arithmetic. Row-wise kernels use the fast forms.

A value that is reduced over W ranks or gathered to them has W pointers: buffers of one device, or
of peers. The text depends on the body and on W alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import ProgramError
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.draws import kept_factor
from penstock.step.kernels.names import Names
from penstock.step.kernels.stages import Stage
from penstock.step.program.nodes import Node
from penstock.step.program.ops import OPS
from penstock.step.program.random import DRAW_BITS, MIX, threshold

__all__ = ["KernelText", "can_write", "kernel_text"]

_TYPES = {"f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "i64": "tl.int64"}
_TYPES |= {"i32": "tl.int32", "u8": "tl.uint8", "bool": "tl.int1"}
_STORED = _TYPES | {"bool": "tl.uint8"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INFIX |= {"eq": "==", "ne": "!="}
_NEUTRAL = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
_MERGED = {"sum": "{0} + {1}", "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}
_F32_SMALLEST, _F32_LARGEST = 2.0**-126, 3.4e38
_GOLDEN = 0x9E3779B9
_TAKEN: tuple[str, ...] = ("libdevice", "BLOCK", "ROWS", "COLS", "IS_RUN", "PARTS", "number")
_TAKEN += ("row", "col", "rows")
_TAKEN += ("row_mask", "col_mask", "begin", "first", "num_parts", "float", "range")
_PLACE = ("first_row", "first_column", "row_length", "whole_row_length")

_HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"


@dataclass(frozen=True, kw_only=True)
class KernelText:
    """One pass: its text, and the arguments of its function, in order."""

    name: str
    text: str
    loads: tuple[str, ...]
    """Tensors that it reads; some are W tensors."""
    stores: tuple[str, ...]
    """Outputs that it writes, some to W tensors, then values that it keeps (`kept NAME`)."""
    totals: tuple[str, ...]
    """Sums that it makes: each program stores a partial one."""
    given: tuple[str, ...]
    """Sums of earlier passes, as their partial sums."""
    numbers: tuple[str, ...]
    has_place: bool
    """Whether it needs the block's position: first row, first column, row lengths."""
    is_rows: bool


def kernel_text(body: KernelBody, stage: Stage, widths: dict[str, int]) -> KernelText:
    """Return one pass of a body as text; `widths`: how many tensors an input or output is."""
    return _TritonWriter(body, stage, widths).written()


class _TritonWriter:
    def __init__(self, body: KernelBody, stage: Stage, widths: dict[str, int]) -> None:
        self._body, self._stage, self._widths = body, stage, widths
        self._names = Names((*_TAKEN, *_PLACE))
        self._lines: list[str] = []
        self._is_rows = body.kind == "rows"
        self._is_small = math.prod(body.full) < 1 << 32
        self._load_of = dict(stage.reads)
        read = {name for node in (*stage.nodes, *stage.ones) for name in node.inputs}
        # Single values that the pass reads; torch computes those that are only results.
        self._ones = _needed_ones(body, stage)
        self._given = tuple(
            n.name for n in body.nodes if body.is_total(n) and self._reads_total(n.name)
        )
        used = read | {v for _, v in stage.writes} | {n.inputs[0] for n in stage.totals}
        self._numbers = tuple(
            name
            for name in body.numbers
            if name in used or name.rpartition(" ")[0] in self._seeds()
        )
        self._numbers += tuple(sorted(n for n in self._odd_consts() if n in used))
        self._has_place = any(node.op == "dropout" for node in stage.nodes)

    def written(self) -> KernelText:
        name = "".join(c if c.isalnum() else "_" for c in f"{self._body.name}_{self._stage.index}")
        self._write_body()
        depth = "        " if self._stage.totals else "    "
        text = [_HEAD, "", "@triton.jit(do_not_specialize=[" + self._unspecial() + "])"]
        text += [f"def {name}({', '.join(self._parameters())}):"]
        text += [f"    {line}" for line in self._opening()]
        text += [f"{depth}{line}" for line in self._lines]
        text += [f"    {line}" for line in self._closing()]
        return KernelText(
            name=name,
            text="\n".join(text) + "\n",
            loads=self._stage.loads,
            stores=tuple(n for n, _ in self._stage.writes),
            totals=tuple(n.name for n in self._stage.totals),
            given=self._given,
            numbers=self._numbers,
            has_place=self._has_place,
            is_rows=self._is_rows,
        )

    # -- what goes in --------------------------------------------------------------------------

    def _seeds(self) -> set[str]:
        return {node.inputs[1] for node in self._stage.nodes if node.op == "dropout"}

    def _odd_consts(self) -> set[str]:
        """Return constants that cannot stand in the text: not finite, or beyond 32 bits."""
        sizes = {name: abs(float(value)) for name, value in self._body.consts.items()}
        return {n for n, s in sizes.items() if s and not _F32_SMALLEST <= s <= _F32_LARGEST}

    def _reads_total(self, name: str) -> bool:
        return any(name in n.inputs for n in (*self._stage.nodes, *self._ones))

    def _unspecial(self) -> str:
        names = [self._names(f"{name} number") for name in self._numbers]
        names += list(_PLACE) if self._has_place else []
        return ", ".join(repr(name) for name in names)

    def _pointers(self, name: str) -> list[str]:
        width = self._widths.get(name, 0)
        if not width:
            return [self._names(f"{name} at")]
        return [self._names(f"{name} at {k}") for k in range(width)]

    def _parameters(self) -> list[str]:
        out = [p for name in self._stage.loads for p in self._pointers(name)]
        out += [p for name, _ in self._stage.writes for p in self._pointers(f"out {name}")]
        out += [self._names(f"{n.name} parts") for n in self._stage.totals]
        out += [self._names(f"{name} parts") for name in self._given]
        out += [self._names(f"{name} number") for name in self._numbers]
        # Rows of a model have one length: with a known one, masks of full rows vanish.
        out += ["rows", "n: tl.constexpr"] if self._is_rows else ["n"]
        if self._given:
            out.append("num_parts")
        if self._has_place:
            out += [*_PLACE, "IS_RUN: tl.constexpr"]
        if self._given:
            out.append("PARTS: tl.constexpr")
        sizes = ("ROWS", "COLS") if self._is_rows else ("BLOCK",)
        return out + [f"{size}: tl.constexpr" for size in sizes]

    def _opening(self) -> list[str]:
        lines = []
        for name in self._given:
            op, x = self._body.by_name[name].op, self._names(name)
            parts = self._names(f"{name} parts")
            lines.append(
                f"{x} = tl.load({parts} + tl.arange(0, PARTS), "
                f"mask=tl.arange(0, PARTS) < num_parts, other={_NEUTRAL[op]})"
            )
            lines.append(f"{x} = tl.{op}({x}, 0)")
        lines += [
            f"{self._names(name)} = tl.load({self._pointers(name)[0]}).to(tl.float32)"
            for name in self._stage.loads
            if self._body.reach.get(name) == "one"
        ]
        lines += [f"{self._names(n.name)} = {self._expression(n)}" for n in self._ones]
        return lines + self._tile_lines()

    def _tile_lines(self) -> list[str]:
        if self._is_rows:
            return [
                "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
                "col = tl.arange(0, COLS)[None, :]",
                "row_mask = row < rows",
                "col_mask = col < n",
                "mask = row_mask & col_mask",
                "at = row * n + col",
                *self._number_lines(),
            ]
        if not self._stage.totals:
            return [
                "at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
                "mask = at < n",
                *self._number_lines(),
            ]
        lines = [
            f"{self._names(f'{n.name} sum')} = tl.full([BLOCK], {_NEUTRAL[n.op]}, tl.float32)"
            for n in self._stage.totals
        ]
        lines.append("first = tl.program_id(0).to(tl.int64) * BLOCK")
        lines.append("for begin in range(first, n, tl.num_programs(0) * BLOCK):")
        return [*lines, *(f"    {x}" for x in self._loop_lines())]

    def _loop_lines(self) -> list[str]:
        return [
            "at = begin + tl.arange(0, BLOCK)",
            "mask = at < n",
            *self._number_lines(),
        ]

    def _number_lines(self) -> list[str]:
        """Return the lines that compute the number of an element in the whole value."""
        if not self._has_place:
            return []
        if self._is_rows and self._is_small:
            return [
                "number = (row + first_row).to(tl.uint32) * whole_row_length.to(tl.uint32)",
                "number = number + (col + first_column).to(tl.uint32)",
            ]
        if self._is_rows:
            return ["number = (row + first_row) * whole_row_length + (col + first_column)"]
        return [
            "if IS_RUN:",
            "    number = at + first_row.to(tl.int64) * whole_row_length + first_column",
            "else:",
            "    number = (at // row_length + first_row) * whole_row_length",
            "    number += at % row_length + first_column",
        ]

    def _closing(self) -> list[str]:
        lines = []
        for node in self._stage.totals:
            total, parts = self._names(f"{node.name} sum"), self._names(f"{node.name} parts")
            lines.append(f"tl.store({parts} + tl.program_id(0), tl.{node.op}({total}, 0))")
        return lines

    # -- operations ----------------------------------------------------------------------------

    def _write_body(self) -> None:
        for name in self._stage.loads:
            reach = self._body.reach[self._body.value_of(name)]
            if reach != "one":
                self._load(name, reach)
        for value, load in self._load_of.items():
            self._lines.append(f"{self._names(value)} = {self._names(load)}")
        for node in self._stage.nodes:
            self._lines.append(f"{self._names(node.name)} = {self._expression(node)}")
        for node in self._stage.totals:
            self._add_up(node)
        for name, value in self._stage.writes:
            self._store(name, value)

    def _where(self, reach: str) -> tuple[str, str]:
        """Return the offset and the mask of a value."""
        return {"full": ("at", "mask"), "row": ("row", "row_mask"), "col": ("col", "col_mask")}[
            reach
        ]

    def _load(self, name: str, reach: str) -> None:
        at, mask = self._where(reach)
        x, dtype = self._names(name), self._type(self._body.dtype(self._body.value_of(name)))
        parts = [f"tl.load({p} + {at}, mask={mask}).to({dtype})" for p in self._pointers(name)]
        self._lines.append(f"{x} = {parts[0]}")
        op = dict(self._body.addends).get(name)
        merge = _MERGED[op if op in ("max", "min") else "sum"]
        self._lines += [f"{x} = {merge.format(x, part)}" for part in parts[1:]]
        if op == "mean" and len(parts) > 1:
            self._lines.append(f"{x} = tl.div_rn({x}, {float(len(parts))!r})")

    def _type(self, dtype: str) -> str:
        found = _TYPES.get(dtype)
        if found is None:
            raise ProgramError(f"kernels for CUDA have no elements of {dtype}; use another backend")
        return found

    def _add_up(self, node: Node) -> None:
        total, x = self._names(f"{node.name} sum"), self._operand(node.inputs[0])
        kept = f"tl.where(mask, {x}, {_NEUTRAL[node.op]})"
        self._lines.append(f"{total} = {_MERGED[node.op].format(total, kept)}")

    def _store(self, name: str, value: str) -> None:
        body = self._body
        at, mask = self._where(body.reach[value])
        dtype = body.dtype(value) if name.startswith("kept ") else body.types[name].dtype
        x = f"{self._operand(value)}.to({_STORED[dtype]})"
        for pointer in self._pointers(f"out {name}"):
            self._lines.append(f"tl.store({pointer} + {at}, {x}, mask={mask})")

    def _operand(self, name: str, *, as_float: bool = True) -> str:
        body = self._body
        if name not in body.host_names:
            return self._names(name)
        if name in body.consts and name not in self._odd_consts():
            value = body.consts[name]
            return repr(float(value) if as_float else value)
        return self._names(f"{name} number")

    def _expression(self, node: Node) -> str:
        op = node.op
        is_float = self._body.dtype(node.name) == "f32" or op in ("lt", "le", "gt", "ge")
        args = [self._operand(name, as_float=is_float) for name in node.inputs]
        if op in _INFIX:
            return f"{args[0]} {_INFIX[op]} {args[1]}"
        if self._is_rows and op == "div":
            return self._divided(node, args)
        if op in _CALLED:
            called = _CALLED | (_QUICK if self._is_rows else {})
            return called[op].format(*args)
        if op == "cast":
            return f"{args[0]}.to({self._type(self._body.dtype(node.name))})"
        if op == "dropout":
            return self._dropout(node, args[0])
        if OPS[op].kind == "reduce":
            return self._reduced(node, args[0])
        raise ProgramError(f"{op} ({node.name}) has no form for CUDA; use another backend")

    def _divided(self, node: Node, args: list[str]) -> str:
        """Divide by multiplying with an inverse for each row.

        Sums of rows depend on their order, so these kernels need not give certain bits.
        """
        reaches = [self._body.reach[name] for name in node.inputs]
        if reaches == ["full", "row"]:
            return f"{args[0]} * (1.0 / {args[1]})"
        return f"{args[0]} / {args[1]}"

    def _dropout(self, node: Node, x: str) -> str:
        low, high = (self._names(f"{node.inputs[1]} {half} number") for half in ("low", "high"))
        share = float(node.attr("share"))
        bits = self._names(f"{node.name} bits")
        lines = [f"{bits} = number.to(tl.uint32) ^ {low}.to(tl.uint32)", f"{bits} += {_GOLDEN}"]
        lines += _mixing(bits)
        above = "" if self._is_small else f"(number >> 32).to(tl.uint32) * {_GOLDEN} + "
        lines.append(f"{bits} += {above}{high}.to(tl.uint32)")
        self._lines += [*lines, *_mixing(bits)]
        kept = f"({bits} >> {32 - DRAW_BITS}) >= {threshold(share)}"
        return f"tl.where({kept}, {x} * {kept_factor(share)!r}, 0.0)"

    def _reduced(self, node: Node, x: str) -> str:
        if node.op == "softmax":
            top = self._names(f"{node.name} top")
            raised = self._names(f"{node.name} raised")
            self._lines.append(
                f"{top} = tl.max(tl.where(col_mask, {x}, float('-inf')), 1, keep_dims=True)"
            )
            self._lines.append(f"{raised} = tl.where(col_mask, tl.exp({x} - {top}), 0.0)")
            return f"{raised} / tl.sum({raised}, 1, keep_dims=True)"
        neutral = _NEUTRAL[node.op]
        return f"tl.{node.op}(tl.where(col_mask, {x}, {neutral}), 1, keep_dims=True)"


_CALLED = {
    "div": "tl.div_rn({0}, {1})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "pow": "libdevice.pow({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "tanh": "libdevice.tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "silu": "{0} * tl.sigmoid({0})",
    "erf": "tl.erf({0})",
    "not": "({0} == 0)",
    "and": "(({0} != 0) & ({1} != 0))",
    "or": "(({0} != 0) | ({1} != 0))",
    "where": "tl.where({0}, {1}, {2})",
}


_QUICK = {"sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})"}
"""The fast forms that row-wise kernels use instead."""


def can_write(body: KernelBody) -> bool:
    """Whether every operation of a body has a form here."""
    names = [*body.inputs, *body.by_name, *body.outputs]
    dtypes = {body.types[n].dtype for n in names if body.types[n].ndim}
    known = set(_INFIX) | set(_CALLED) | {"cast", "dropout"}
    ops = {n.op for n in body.nodes if OPS[n.op].kind != "reduce"}
    return dtypes <= set(_TYPES) and ops <= known


def _mixing(bits: str) -> list[str]:
    lines = []
    for shift, factor in MIX:
        lines.append(f"{bits} = {bits} ^ ({bits} >> {shift})")
        if factor:
            lines.append(f"{bits} = {bits} * {factor}")
    return lines


def _needed_ones(body: KernelBody, stage: Stage) -> tuple[Node, ...]:
    wanted = {name for node in stage.nodes for name in node.inputs}
    out = []
    for node in reversed(stage.ones):
        if node.name in wanted:
            out.append(node)
            wanted.update(node.inputs)
    return tuple(reversed(out))
