"""Wire: communication sends fewer bits than the values have.

The one rewrite that changes values, so it is never made unless it is asked for: programs say that
they are approximate. Sums are still made in float32; only what is on the wire is rounded.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.program.layouts import DTYPES
from penstock.program.nodes import Node, Program
from penstock.program.ops import is_move

__all__ = ["wire"]

_WIRES = ("bf16", "f16")


def wire(program: Program, *names: str, dtype: str | None = "bf16") -> Program:
    """Return the program with moves that send another element type: some, or all of floats.

    None sends values as they are again.
    """
    if dtype is not None and dtype not in _WIRES:
        raise ProgramError(f"wire in {dtype!r}; values are sent as {' or '.join(_WIRES)}, or None")
    moves = [node for node in program.nodes if is_move(node.op)]
    wide = [node for node in moves if _can_shrink(node, dtype)]
    chosen = {program.find(name, *{n.op for n in moves}).name for name in names}
    for name in sorted(chosen - {node.name for node in wide}):
        raise ProgramError(
            f"wire of {name} in {dtype}: it sends {program[name].type.dtype}, which has no more "
            "bits to lose"
        )
    chosen = chosen or {node.name for node in wide}
    if not chosen:
        raise ProgramError(f"wire in {dtype}: program {program.name} sends nothing wider")
    return program.with_nodes(
        node.with_attrs(wire=dtype) if node.name in chosen else node for node in program.nodes
    )


def _can_shrink(node: Node, dtype: str | None) -> bool:
    if dtype is None:
        return True
    sent = DTYPES[node.type.dtype]
    return sent.is_float and sent.size_bytes > DTYPES[dtype].size_bytes
