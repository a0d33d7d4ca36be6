"""rotate: carry something over the end of an iteration.

A program is one iteration, and the next one follows. So the first nodes of an iteration can run in
the one before it, and the last ones in the one after it:

    load     `ahead=k`: batches are fetched k iterations before they are used. So can be values that
             are made of loads alone, such as the gather of a batch.
    gather   of a state's new value, at the end: the state is kept in slices and gathered where the
             next iteration first reads it. `ahead=1`: the gather begins as soon as the slices are
             updated.
    store    `ahead=-k`: it may last into the next k iterations.

Condition: nobody reads the state between the old place and the new one, where it would have another
value. States are returned in slices then, as they are kept.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.contract import arranged
from penstock.step.program.infer import infer
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import OPS
from penstock.step.program.passes.draft import Draft
from penstock.step.program.passes.regions import found
from penstock.step.program.types import Type

__all__ = ["rotate"]

_AS_ONE = ("ring", "bucket")
_BEHIND_MAX = 1
"""Iterations that a store may last: there is only one copy of its value."""


def rotate(program: Program, name: str, k: int = 1) -> Program:
    """Move a load, the gather of a state or a store over the end of the iteration, k times."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ProgramError(f"rotate of {name} by {k!r} iterations; 1 or more make sense")
    node = _meant(program, name)
    _check_outside(program, node, *_AS_ONE)
    if node.op == "load" or _is_made_of(program, node, k):
        _check_outside(program, node, *_AS_ONE, "fuse", "chunk")
        return program.with_attrs({node.name: {"ahead": k}})
    if node.op == "store":
        return _behind(program, node, k)
    if node.op == "all_gather":
        return _gathered_later(program, node, k)
    raise ProgramError(
        f"rotate of {node.name} ({node.op}): only a load, a value made of loads that are as far "
        "ahead, the all_gather of a state's new value, or a store can be moved over the end of an "
        "iteration"
    )


def _meant(program: Program, name: str) -> Node:
    """Return the node of a name: a state stands for the gather of its new value."""
    if name in program.states:
        return program[program[program.states[name]].inputs[1]]
    node = found(program, name)
    return program[node.inputs[1]] if node.op == "update" else node


def _is_made_of(program: Program, node: Node, k: int) -> bool:
    """Whether all operands of a node are at least k iterations ahead."""
    inputs = [program[one] for one in node.inputs if program[one].op != "const"]
    can = OPS[node.op].kind in ("move", "pointwise", "shape", "reduce") and node.op != "pick"
    return can and bool(inputs) and all(int(one.attr("ahead", 0)) >= k for one in inputs)


def _check_outside(program: Program, node: Node, *kinds: str) -> None:
    for region in program.regions:
        if node.name in region.nodes and region.kind in kinds:
            raise ProgramError(
                f"rotate of {node.name}, which is in the {region.kind} region {region.name}: the "
                "others there stay in their iteration; rotate first"
            )


def _behind(program: Program, node: Node, k: int) -> Program:
    if k > _BEHIND_MAX:
        raise ProgramError(
            f"rotate of {node.name} by {k} iterations; a store may last {_BEHIND_MAX} longer, then "
            "its value is overwritten"
        )
    _check_outside(program, node, *_AS_ONE, "fuse", "chunk")
    if node.inputs[0] in program.states:
        raise ProgramError(
            f"rotate of {node.name}: it stores {node.inputs[0]} as the iteration found it, and the "
            "iteration changes it; store the new value, or leave the store where it is"
        )
    # A store returns its operand, so its readers read that and need not wait for the store.
    renamed = {node.name: node.inputs[0]}
    nodes = [
        node.with_attrs(ahead=-k) if n.name == node.name else n.with_inputs(renamed)
        for n in program.nodes
    ]
    outputs = tuple(renamed.get(name, name) for name in program.outputs)
    regions = tuple(_reading(program, r, node.name, node.inputs[0]) for r in program.regions)
    return program.with_nodes(nodes, outputs=outputs, regions=regions)


def _reading(program: Program, region: Region, stored: str, value: str) -> Region:
    """Return a region that reads a value instead of the store of it, cut alike."""
    dims = dict(region.dims)
    along = dims.pop(stored, None)
    reads = {one for name in region.nodes for one in program[name].inputs}
    if stored not in reads:
        return region
    if value in {*reads, *region.nodes} and dims.get(value) != along:
        raise ProgramError(
            f"rotate of {stored}: the {region.kind} region {region.name} cuts it otherwise than "
            f"{value}, which is the same; rotate first"
        )
    if along is not None:
        dims[value] = along
    return replace(region, dims=tuple(sorted(dims.items())))


# -- gathers of states -------------------------------------------------------------------------


def _gathered_later(program: Program, gather: Node, k: int) -> Program:
    update = _update_of(program, gather)
    state = program[str(update.attr("target"))]
    if k > 1:
        raise ProgramError(
            f"rotate of {gather.name} by {k} iterations: {state.name} is known at the end of the "
            "one before, so 1 is all there is"
        )
    _check_reads(program, gather, update, state)
    kept = program[gather.inputs[0]].type
    sliced = replace(state, type=kept, attrs=(("type", kept),))
    whole = replace(gather.with_attrs(ahead=1), inputs=(state.name,))
    slices = {
        n.name
        for n in program.nodes
        if n.op == "slice" and n.inputs == (state.name,) and n.type == kept
    }
    draft = Draft(program, f"rotate of {gather.name}")
    # Readers of a slice of the state read the state; readers of all of it read the gather.
    slicing = dict.fromkeys(slices, state.name)
    for node in program.nodes:
        if node.name == state.name:
            draft.copy(sliced)
            draft.copy(whole)
        elif node.name == update.name:
            draft.copy(node, [state.name, gather.inputs[0]])
        elif node.op == "store":
            draft.copy(node.with_inputs({gather.name: update.name}))
        elif node.name != gather.name and node.name not in slices:
            whose = state if _needs_slice(program, node, state, kept) else gather
            draft.copy(node.with_inputs({state.name: whose.name, **slicing}))
    out = program.with_nodes(
        draft.nodes.values(),
        outputs=tuple(update.name if name == gather.name else name for name in program.outputs),
    )
    if not out.users[gather.name]:
        raise ProgramError(
            f"rotate of {gather.name}: nobody reads all of {state.name} in the next iteration; "
            "keep it sliced instead"
        )
    regions = _without(program, out, gather.name, slices, state.name)
    return arranged(replace(_late(out, gather.name), regions=regions))


def _needs_slice(program: Program, node: Node, state: Node, kept: Type) -> bool:
    """Whether a node has the same result on a slice of a state as on all of it."""
    if state.name not in node.inputs or OPS[node.op].kind != "pointwise":
        return False
    types = [kept if one == state.name else program[one].type for one in node.inputs]
    try:
        return infer(node.op, types, dict(node.attrs), program.mesh) == node.type
    except ProgramError:
        return False


def _update_of(program: Program, gather: Node) -> Node:
    updates = [
        program[user]
        for user in program.users[gather.name]
        if program[user].op == "update" and program[user].inputs[1] == gather.name
    ]
    if len(updates) != 1:
        raise ProgramError(
            f"rotate of {gather.name}: {len(updates)} states take it as their new value; it must "
            "be one, that is gathered at the end of the iteration"
        )
    state = str(updates[0].attr("target"))
    if updates[0].inputs[0] != state or program.states[state] != updates[0].name:
        raise ProgramError(
            f"rotate of {gather.name}: {state} is updated more than once in an iteration; only the "
            "last value of one update can wait for the next iteration"
        )
    return updates[0]


def _check_reads(program: Program, gather: Node, update: Node, state: Node) -> None:
    """Refuse if a node needs all of the new value in this iteration."""
    if gather.type != state.type:
        raise ProgramError(
            f"rotate of {gather.name} ({gather.type}), of which {state.name} takes the part "
            f"{state.type}; keep it sliced instead"
        )
    for node in (gather, update):
        for user in program.users[node.name]:
            if user != update.name and program[user].op != "store":
                raise ProgramError(
                    f"rotate of {gather.name}: {user} reads the new {state.name} in the same "
                    f"iteration, where only slices would be left; let it read {gather.inputs[0]}, "
                    "or leave the gather where it is"
                )


def _without(
    program: Program, out: Program, gather: str, slices: set[str], state: str
) -> tuple[Region, ...]:
    """Return the regions without nodes that were dropped or moved."""
    kept = []
    for region in program.regions:
        nodes = tuple(n for n in region.nodes if n != gather and n not in slices)
        dims = dict(region.dims)
        along = next((dims[n] for n in (state, *sorted(slices)) if n in dims), None)
        if along is not None:
            dims |= {state: along, gather: along}
        touched = {*nodes, *(one for n in nodes for one in out[n].inputs)}
        cut = tuple((n, d) for n, d in sorted(dims.items()) if n in touched)
        if nodes == region.nodes or len(nodes) > 1 or (nodes and region.kind == "chunk"):
            kept.append(replace(region, nodes=nodes, dims=cut))
    return tuple(kept)


def _late(program: Program, name: str) -> Program:
    """Return a program in which a node stands right before the first that reads it."""
    # Tasks that may not overlap wait for all before them: an early gather would delay others.
    users = set(program.users[name])
    rest = [node for node in program.nodes if node.name != name]
    at = next((k for k, node in enumerate(rest) if node.name in users), len(rest))
    return program.with_nodes([*rest[:at], program[name], *rest[at:]])
