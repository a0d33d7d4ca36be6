"""Wire: communication sends fewer bits than the values have.

This is the only rewrite that changes values, so it is never applied unless the user asks for it,
and programs with it say that they are approximate. Sums are still made in float32; only the values
on the wire are rounded.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import MOVES
from penstock.step.program.passes.regions import with_buckets
from penstock.step.program.ways import COLLECTIVES, WIRES, can_do, can_shrink, why_not

__all__ = ["wire"]


def wire(program: Program, *names: str, dtype: str | None = "bf16") -> Program:
    """Return the program with collectives that send another element type: some, or all that can.

    None sends values unrounded again. All moves of a bucket get the same element type.
    """
    if dtype is not None and dtype not in WIRES:
        raise ProgramError(f"wire in {dtype!r}; values are sent as {' or '.join(WIRES)}, or None")
    chosen = with_buckets(program, {program.find(name, *MOVES).name for name in names})
    for name in sorted(chosen):
        if why := _why_not(program, program[name], dtype):
            raise ProgramError(f"wire of {name} in {dtype}: {why}")
    if not names:
        whys = {n.name: _why_not(program, n, dtype) for n in program.nodes if n.op in COLLECTIVES}
        chosen = {name for name, why in whys.items() if not why}
        if not chosen:
            said = "".join(f"; {name}: {why}" for name, why in list(whys.items())[:1])
            raise ProgramError(f"wire in {dtype}: program {program.name} sends nothing wider{said}")
    return program.with_attrs({name: {"wire": dtype} for name in chosen})


def _why_not(program: Program, node: Node, dtype: str | None) -> str:
    """Return why a move cannot send an element type; nothing where it can."""
    if dtype is None:
        return ""
    if node.op not in COLLECTIVES:
        return f"{node.op} sends values as they are; {', '.join(COLLECTIVES)} can send fewer bits"
    if not can_shrink(node, dtype):
        return f"it sends {node.type.dtype}, which has no more bits to lose"
    if rings := program.regions_of(node.name, "ring"):
        return f"it goes round with its product in region {rings[0].name}, as it is; leave it out"
    way = node.attr("algo")
    if way is not None and not can_do(node.with_attrs(wire=dtype), way):
        return f"it goes by algo {way!r}, and {why_not(way)}: algo({node.name!r}, way='direct')"
    return ""
