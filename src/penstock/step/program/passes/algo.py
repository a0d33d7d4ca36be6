"""algo: the algorithm of a collective.

`direct` exchanges data with each other rank, `ring` with neighbours only, `native` is the library's
own all-reduce; None leaves the choice to the executor, which looks at sizes. All results are the
same, up to the order of sums. The fastest depends on the network and on the number of ranks, so it
is measured (`tune`). Where ranks share memory, or a library has its own algorithms only, there is
nothing to choose.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program
from penstock.step.program.passes.regions import with_buckets
from penstock.step.program.ways import ALGOS, COLLECTIVES, can_do, why_not

__all__ = ["algo"]


def algo(program: Program, *names: str, way: str | None) -> Program:
    """Choose the algorithm of collectives: some, or all that can use it."""
    if way is not None and way not in ALGOS:
        raise ProgramError(f"algo {way!r}; there are {', '.join(ALGOS)}, and None")
    chosen = _meant(program, names)
    if not names:
        chosen = {name for name in chosen if way is None or can_do(program[name], way)}
    for name in sorted(chosen):
        if way is not None and not can_do(program[name], way):
            raise ProgramError(f"algo {way!r} of {name} ({program[name].op}): {why_not(way)}")
    if not chosen:
        raise ProgramError(
            f"algo {way!r}: program {program.name} has no collective that can use it"
        )
    return program.with_attrs({name: {"algo": way} for name in chosen})


def _meant(program: Program, names: tuple[str, ...]) -> set[str]:
    """Return the chosen collectives, with those in one bucket with them; without names, all."""
    chosen = with_buckets(program, {program.find(name, *COLLECTIVES).name for name in names})
    for region in program.regions:
        inside = chosen & set(region.nodes)
        if region.kind == "ring" and inside:
            raise ProgramError(
                f"algo of {min(inside)}, which goes round with its product in region "
                f"{region.name} already; leave it out"
            )
    all_of_them = {node.name for node in program.nodes if node.op in COLLECTIVES}
    return chosen if names else all_of_them - program.region_by_node("ring").keys()
