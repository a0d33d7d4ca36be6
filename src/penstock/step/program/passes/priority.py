"""priority: which of the ready tasks of a lane goes first: the one with the smallest number.

An order changes no value, so there is no condition. The order of first use helps: the weights of
the first layer are used first in the next step, so their gradients and gathers go before the
others, though backward makes them last.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS
from penstock.step.program.passes.draft import below_all
from penstock.step.program.passes.regions import found, lane_of

__all__ = ["priority", "priority_by_use"]


def priority(program: Program, name: str, number: int) -> Program:
    """Give a move, a load or a store its place; or all of a lane such as `net:dp` or `io`."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ProgramError(f"priority {number!r} of {name}; it is a whole number")
    if name == "io" or str(name).startswith("net:"):
        chosen = {node.name for node in _on(program, name)}
    else:
        node = found(program, name)
        if lane_of(node) == "compute":
            raise ProgramError(
                f"priority of {node.name} ({node.op}), which is computed, and so runs as soon as "
                "its operands are ready; name a move, a load, a store, or a lane"
            )
        chosen = {node.name}
    return _numbered(program, dict.fromkeys(chosen, number))


def priority_by_use(program: Program, lane: str) -> Program:
    """Number what a lane does in the order of first use.

    Values that this iteration still needs go first. The others become states and go in the order
    in which the next iteration reads them.
    """
    moves = _on(program, lane)
    place = {node.name: at for at, node in enumerate(program.nodes)}
    keys = {node.name: _first_use(program, node, place) for node in moves}
    ordered = sorted(keys, key=lambda name: (keys[name], place[name]))
    return _numbered(program, {name: number for number, name in enumerate(ordered)})


def _on(program: Program, lane: str) -> list[Node]:
    nodes = [node for node in program.nodes if lane_of(node) == lane and lane != "compute"]
    if not nodes:
        lanes = sorted({lane_of(n) for n in program.nodes if OPS[n.op].kind in ("move", "io")})
        raise ProgramError(
            f"program {program.name} has nothing on lane {lane!r}; it has "
            f"{', '.join(lanes) or 'no lane but compute'}"
        )
    return nodes


def _first_use(program: Program, node: Node, place: dict[str, int]) -> tuple[int, int]:
    """Return the iteration that first needs a value, and the place in it."""
    if node.attr("ahead"):
        readers = program.users[node.name]
        return 1, min((place[name] for name in readers), default=len(place))
    below = below_all(program, [node.name])
    states = {str(program[n].attr("target")) for n in below if program[n].op == "update"}
    if not states:
        return 0, place[node.name]
    reads = [place[user] for state in states for user in program.users[state]]
    return 1, min(reads, default=len(place))


def _numbered(program: Program, numbers: dict[str, int]) -> Program:
    return program.with_attrs({name: {"priority": number} for name, number in numbers.items()})
