"""ring: a product and the communication beside it, as many steps around a ring.

With a gather before a product, each rank begins with its own part, multiplies it, and meanwhile
passes it on; after as many steps as there are ranks every rank has multiplied all parts. With a
reduce-scatter after a product, the sum for a rank travels around, and each rank adds the block
that it has just multiplied, the owner last. Condition: the product does not mix the gathered or
scattered dimension.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.loops import loops_of
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.passes.regions import found, in_order, named, with_region

__all__ = ["ring"]

_OPS = ("all_gather", "matmul", "reduce_scatter")


def ring(
    program: Program, first: str, *others: str, by: int = 1, name: str | None = None
) -> Program:
    """Carry out a gather and the products that read it, or a product and its scatter, in steps.

    Parts go to the next rank, or with `by=-1` to the one before.
    """
    if by not in (1, -1):
        raise ProgramError(f"a ring by {by!r}; parts go to the next rank (1) or the last one (-1)")
    nodes = in_order(program, {found(program, one).name for one in (first, *others)})
    ops = [program[one].op for one in nodes]
    if any(op not in _OPS for op in ops) or len(nodes) < 2:
        raise ProgramError(
            f"ring of {', '.join(nodes)}: it takes a gather and products that read it, or a "
            "product and the reduce_scatter of it"
        )
    if ops.count("all_gather") == 1 and ops.count("matmul") == len(nodes) - 1:
        gather = next(program[one] for one in nodes if program[one].op == "all_gather")
        _check_gather(program, gather, [program[n] for n in nodes if n != gather.name])
        form = "gather"
    elif ops == ["matmul", "reduce_scatter"]:
        _check_scatter(program, program[nodes[0]], program[nodes[1]])
        form = "scatter"
    else:
        raise ProgramError(
            f"ring of {', '.join(nodes)}: one gather and its products, or one product and its "
            "reduce_scatter; make a ring for each"
        )
    region = Region(
        name=named(program, "ring", name),
        kind="ring",
        nodes=nodes,
        axis=_axis(program, nodes),
        attrs=(("form", form), ("by", by)),
    )
    return with_region(program, region)


def _axis(program: Program, nodes: tuple[str, ...]) -> str:
    move = next(program[one] for one in nodes if program[one].axes)
    if len(move.axes) != 1:
        raise ProgramError(
            f"ring of {move.name} along {' and '.join(move.axes)}; a ring has one axis, split the "
            "others off first"
        )
    return move.axes[0]


def _check_gather(program: Program, gather: Node, products: list[Node]) -> None:
    part = program[gather.inputs[0]].type
    dim = part.layout(_axis(program, (gather.name,))).dim
    for product in products:
        if gather.name not in product.inputs:
            raise ProgramError(f"ring of {gather.name} and {product.name}, which does not read it")
        places = [at for at, one in enumerate(product.inputs) if one == gather.name]
        if len(places) > 1:
            raise ProgramError(
                f"ring of {product.name}, a product of {gather.name} with itself: each step would "
                "need two of its parts"
            )
        if not any(loop.operands[places[0]] == dim for loop in loops_of(product, program)):
            raise ProgramError(
                f"ring of {gather.name}, gathered along dimension {dim}, and {product.name}, which "
                "sums over it; only rows, columns and batches can go around"
            )
    _check_single(program, gather.inputs[0], dim)


def _check_scatter(program: Program, product: Node, scatter: Node) -> None:
    if scatter.inputs[0] != product.name:
        raise ProgramError(f"ring of {product.name} and {scatter.name}, which does not read it")
    users = [user for user in program.users[product.name] if user != scatter.name]
    if users or product.name in program.outputs:
        who = users[0] if users else "the caller"
        raise ProgramError(
            f"ring of {product.name} and {scatter.name}: {who} reads {product.name} too, which "
            "is never there as a whole in a ring; compute it again for that, or do without"
        )
    _axis(program, (scatter.name,))
    _check_single(program, scatter.name, int(scatter.attr("dim")))


def _check_single(program: Program, name: str, dim: int) -> None:
    slicing = program[name].type.slicing(dim)
    if len(slicing) > 1:
        raise ProgramError(
            f"ring along dimension {dim} of {name}, which axes {' and '.join(slicing)} slice; "
            "one axis may"
        )
