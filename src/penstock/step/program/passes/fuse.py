"""fuse: carry out several nodes as one kernel.

There are two forms. *compute*: elementwise work with reductions along rows, so that values between
stay in registers. *collective*: a reduce-scatter, work on the slice that it leaves, and the gather
of the results: the fused all-reduce of CoCoNeT; or work and the send of its result. Conditions: no
other node between them, all work on parts of the same shape, one kind of communication at each end.
All-reduces of single numbers, such as norms, are possible inside only if the user allows the kernel
to wait for them: `norms=True`.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.check import goes_along
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.passes.draft import below_all
from penstock.step.program.passes.regions import meant, named, with_region
from penstock.step.program.types import Type

__all__ = ["fuse"]

_IN, _OUT, _SENT = "reduce_scatter", "all_gather", "send"
_FEW = 1
"""Elements of an all-reduce that a kernel may wait for."""


def fuse(
    program: Program,
    *names: str,
    name: str | None = None,
    norms: bool = False,
    compute: bool = False,
) -> Program:
    """Carry out nodes as one: those named, or everything between the first and the last.

    `norms` allows all-reduces of single numbers inside, for which all ranks wait. `compute` takes
    only the nodes computed between two collectives and leaves the collectives out.
    """
    nodes = _writing_last(program, meant(program, names, "fuse"), names)
    if compute:
        nodes = _computed(program, nodes)
    if len(nodes) < 2:
        raise ProgramError(f"fuse of {', '.join(nodes) or 'nothing'} alone; name two nodes or more")
    found = [program[n] for n in nodes]
    moves = [node for node in found if is_move(node.op) and not _is_norm(node)]
    inner = [node for node in found if is_move(node.op) and _is_norm(node)]
    if inner and not norms:
        raise ProgramError(
            f"fuse of {inner[0].name}, an all_reduce inside of a kernel: all ranks would have to "
            "stop in it; say norms=True where that is possible, or fuse before and after it"
        )
    for node in found:
        _check_op(node)
    _check_ends(program, moves, set(nodes))
    _check_places(program, found)
    _check_alike(program, [node for node in found if not is_move(node.op)], moves)
    form = "collective" if moves or inner else "compute"
    attrs = (("form", form), ("norms", True)) if inner else (("form", form),)
    called = named(program, "fuse", name)
    return with_region(program, Region(name=called, kind="fuse", nodes=nodes, attrs=attrs))


def _computed(program: Program, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes between collectives, without updates whose values those bring."""
    moves = {name for name in nodes if is_move(program[name].op)}
    return tuple(n for n in nodes if n not in moves and not moves & _new_value(program[n]))


def _new_value(node: Node) -> set[str]:
    """Return the value of an update: the gather of a value does the update with it too."""
    return {node.inputs[1]} if node.op == "update" else set()


def _is_norm(node: Node) -> bool:
    return node.op == "all_reduce" and node.type.num_elements <= _FEW


def _check_op(node: Node) -> None:
    kind = OPS[node.op].kind
    if kind == "pointwise" or node.op in ("update", "slice", _IN, _OUT, _SENT) or _is_norm(node):
        return
    if kind == "reduce":
        _check_rows(node)
        return
    ways = {
        "matmul": "chunk and overlap it with the others instead",
        "all_reduce": "split it first, then fuse from its scatter to its gather",
        "call": "it is opaque; leave it out",
        "recv": "end at the send",
    }
    way = ways.get(node.op, "leave it out")
    raise ProgramError(f"fuse of {node.name}: {node.op} is not elementwise; {way}")


def _check_rows(node: Node) -> None:
    """Refuse reductions over dimensions that are not the last, for which a kernel would stride."""
    is_softmax = node.op == "softmax"
    over = (int(node.attr("dim")),) if is_softmax else tuple(node.attr("dims"))
    ndim = node.type.ndim + (0 if is_softmax or node.attr("keep") else len(over))
    if over != tuple(range(ndim - len(over), ndim)):
        raise ProgramError(
            f"fuse of {node.name}: {node.op} over dimensions {over}; in a kernel only the last "
            "ones can be reduced, transpose before or leave it out"
        )


def _writing_last(
    program: Program, nodes: tuple[str, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return nodes without those unnamed updates that would write too early."""
    work = [program[name] for name in nodes]
    lost = {state for node in work for state in _read_across(program, node)}
    stay = {name for node in work for name in node.inputs} | {*names}
    return tuple(
        node.name
        for node in work
        if node.op != "update" or node.attr("target") not in lost or stay & {node.name, node.label}
    )


def _read_across(program: Program, node: Node) -> set[str]:
    """Return the states of which a node reads other elements than it writes."""
    if goes_along(node):
        return set()
    return {str(program[name].attr("target", name)) for name in node.inputs}


def _check_places(program: Program, work: list[Node]) -> None:
    """Refuse to update a state in a kernel that still has to read other elements of it."""
    states = {str(node.attr("target")) for node in work if node.op == "update"}
    for node in work:
        if lost := states & _read_across(program, node):
            raise ProgramError(
                f"fuse of {node.name} ({node.op}), which reads all of {min(lost)}, with an update "
                "of it: a kernel would write over what it still reads; leave one of them out"
            )


# -- communication at the ends -----------------------------------------------------------------


def _check_ends(program: Program, moves: list[Node], inside: set[str]) -> None:
    into = [node for node in moves if node.op == _IN]
    out = [node for node in moves if node.op != _IN]
    for kind in (into, out):
        _check_one_kind(kind)
    if into and out and out[0].op == _SENT:
        raise ProgramError(
            f"fuse of {into[0].name} and {out[0].name}: a reduce_scatter ends with a gather; "
            "send what it leaves with a fusion of its own and overlap both"
        )
    if into and out and into[0].axes != out[0].axes:
        raise ProgramError(
            f"fuse of {into[0].name} along {into[0].axes} and {out[0].name} along {out[0].axes}; "
            "both must go along the same axes"
        )
    for node in into:
        if node.inputs[0] in inside:
            raise ProgramError(
                f"fuse of {node.inputs[0]} and {node.name}: what ranks sum up must be there when "
                f"they begin; begin with {node.name}"
            )
    for node in out:
        later = (below_all(program, [node.name]) & inside) - {node.name}
        # An update with the gathered value is another name for it, no reader of its own.
        later = {name for name in later if node.name not in _new_value(program[name])}
        if later:
            raise ProgramError(
                f"fuse of {node.name} and {min(later)}, which reads what is only there when all "
                f"ranks have sent it; end with {node.name}"
            )


def _check_one_kind(moves: list[Node]) -> None:
    keys = ("axis", "op", "wire", "algo", "by")
    for node in moves[1:]:
        first = moves[0]
        same = all(first.attr(key) == node.attr(key) for key in keys)
        if node.op != first.op or not same:
            raise ProgramError(
                f"fuse of {first.name} ({first.op}) and {node.name} ({node.op}): one kind of "
                "communication at each end, along the same axes; fuse them apart"
            )


# -- work on parts of one shape ------------------------------------------------------------------


def _check_alike(program: Program, work: list[Node], moves: list[Node]) -> None:
    """Refuse work on parts that differ: a kernel goes once over one shape."""
    # Updates with a gathered value have its shape; they are no work.
    gathers = {node.name for node in moves if node.op == _OUT}
    types = [(node.name, node.type) for node in work if not set(node.inputs) & gathers]
    types += [
        (node.name, node.type if node.op == _IN else program[node.inputs[0]].type) for node in moves
    ]
    tensors = [(name, made) for name, made in types if made.num_elements > 1]
    if not tensors:
        return
    whole, of = max(tensors, key=lambda pair: (pair[1].ndim, pair[1].num_elements))
    for name, made in tensors:
        if not _fits(made, of):
            raise ProgramError(
                f"fuse of {whole} ({of}) and {name} ({made}): a kernel goes over one shape, and "
                "these do not fit; leave one of them out"
            )


def _fits(made: Type, of: Type) -> bool:
    """Whether a value lies within a shape: all of it, rows, columns; in the same slices."""
    shift = of.ndim - made.ndim
    from_right = all(n in (1, of.shape[d + shift]) for d, n in enumerate(made.shape))
    rows = made.shape == of.shape[: made.ndim]
    if not from_right and not rows:
        return False
    shift = shift if from_right else 0
    mine = {(axis, y.dim + shift) for axis, y in made.layouts if y.kind == "S"}
    theirs = {(axis, y.dim) for axis, y in of.layouts if y.kind == "S"}
    # Where a value has length 1 it is broadcast, so slices there do not matter.
    needed = {(a, d) for a, d in theirs if d >= shift and d - shift < made.ndim}
    needed = {(a, d) for a, d in needed if made.shape[d - shift] != 1}
    return mine == needed
