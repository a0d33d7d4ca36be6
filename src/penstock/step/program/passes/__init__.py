"""Rewrites: programs that mean the same and run differently.

Each is a pure function from a program and some arguments to a program. Its conditions are checked,
and what it returns is verified, before anybody sees it; a rewrite that would change the meaning is
refused with the reason. What nobody reads any more because of a rewrite goes with it; what nobody
has read before stays until `dead`. `PASSES` has them by name; a schedule is a list of names and
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.contract import check_old_values
from penstock.step.program.nodes import Program, Rewrite
from penstock.step.program.passes.arguments import check_arguments
from penstock.step.program.passes.dead import dead, unread, without_unread
from penstock.step.program.verify import verified

__all__ = ["PASSES", "rewritten"]

Pass = Callable[..., Program]

PASSES: dict[str, Pass] = {}


def rewritten(program: Program, step: Rewrite) -> Program:
    """Return a program after one rewrite, which joins its history."""
    found = PASSES.get(step.name)
    if found is None:
        raise ProgramError(f"there is no rewrite {step.name!r}; there are {', '.join(PASSES)}")
    check_arguments(found, step)
    made = found(program, *step.args, **dict(step.options))
    # A gather whose readers have all gone below another one would still be sent.
    made = without_unread(made, among=unread(made) - unread(program))
    out = verified(made, program)
    check_old_values(out, program)
    return replace(out, history=(*program.history, step))


from penstock.step.program.passes.hier import factor, hier  # noqa: E402
from penstock.step.program.passes.hoist import hoist  # noqa: E402
from penstock.step.program.passes.keep_sliced import keep_sliced  # noqa: E402
from penstock.step.program.passes.reshard import reshard  # noqa: E402
from penstock.step.program.passes.sink import sink  # noqa: E402
from penstock.step.program.passes.split import split  # noqa: E402
from penstock.step.program.passes.wire import wire  # noqa: E402

PASSES.update(split=split, sink=sink, hoist=hoist, keep_sliced=keep_sliced, dead=dead)
PASSES.update(wire=wire, hier=hier, factor=factor, reshard=reshard)

from penstock.step.program.passes.algo import algo  # noqa: E402
from penstock.step.program.passes.bucket import bucket  # noqa: E402
from penstock.step.program.passes.chunk import chunk  # noqa: E402
from penstock.step.program.passes.fuse import fuse  # noqa: E402
from penstock.step.program.passes.overlap import overlap  # noqa: E402
from penstock.step.program.passes.priority import priority, priority_by_use  # noqa: E402
from penstock.step.program.passes.ring import ring  # noqa: E402
from penstock.step.program.passes.rotate import rotate  # noqa: E402

PASSES.update(fuse=fuse, chunk=chunk, overlap=overlap, bucket=bucket, ring=ring, rotate=rotate)
PASSES.update(priority=priority, priority_by_use=priority_by_use, algo=algo)
