"""Whether a program is sound: conditions that hold for every program, whoever made it."""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.infer import infer
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ways import misfit

__all__ = ["verified"]


def verified(program: Program, before: Program | None = None) -> Program:
    """Return a program, if it is sound and has the same results as the program before it.

    Every value is made once and before it is read and has the type that its operation gives it,
    options of moves apply, and regions can be carried out in one go. Outputs keep their shapes and
    layouts.
    """
    made: set[str] = set()
    for node in program.nodes:
        _check_node(program, node, made)
        made.add(node.name)
    for name in program.outputs:
        if name not in made:
            raise ProgramError(f"program {program.name} returns {name}, which nothing makes")
    for region in program.regions:
        _check_region(program, region)
    if before is not None:
        _check_same(program, before)
    return program


def _check_node(program: Program, node: Node, made: set[str]) -> None:
    if node.name in made:
        raise ProgramError(f"program {program.name} makes {node.name} twice")
    for name in node.inputs:
        if name not in made:
            raise ProgramError(f"{node.name} reads {name} before it is made")
    types = [program[name].type for name in node.inputs]
    found = infer(node.op, types, dict(node.attrs), program.mesh)
    if found != node.type:
        raise ProgramError(f"{node.name} has type {node.type}, its operation makes {found}")
    if wrong := misfit(node):
        raise ProgramError(wrong)


def _check_region(program: Program, region: Region) -> None:
    for name in region.nodes:
        if name not in program:
            raise ProgramError(f"region {region.name} has {name}, which nothing makes")
    if region.kind in ("fuse", "chunk", "ring") and (
        between := left_between(program, region.nodes)
    ):
        raise ProgramError(
            f"region {region.name} needs {between[0]}, which needs the region itself; "
            "take it in, or leave out what it depends on"
        )
    _check_way(program, region)


def _check_way(program: Program, region: Region) -> None:
    """Refuse options of single moves in a region whose moves go as one."""
    nodes = [program[name] for name in region.nodes]
    for key in ("wire", "algo") if region.kind == "bucket" else ():
        said = {node.attr(key): node.name for node in nodes}
        if len(said) > 1:
            (one, first), (other, second) = list(said.items())[:2]
            raise ProgramError(
                f"bucket {region.name} has {first} with {key} {one!r} and {second} with {other!r}; "
                "what goes as one goes in one way"
            )
    for node in nodes if region.kind == "ring" else ():
        if node.attr("wire") is not None:
            raise ProgramError(
                f"ring {region.name} passes {node.name} on as it is, not as {node.attr('wire')}; "
                f"wire({node.name!r}, dtype=None) first, or leave the ring out"
            )


def left_between(program: Program, nodes: tuple[str, ...]) -> list[str]:
    """Return the nodes between some nodes: they depend on one of them, and another depends on them.

    Nodes with nothing between them can be carried out as one.
    """
    inside = set(nodes)
    after: set[str] = set()
    for node in program.nodes:
        if node.name not in inside and any(n in inside or n in after for n in node.inputs):
            after.add(node.name)
    needed: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in inside or node.name in needed:
            needed.update(node.inputs)
    return [n.name for n in program.nodes if n.name in after and n.name in needed - inside]


def _check_same(program: Program, before: Program) -> None:
    if program.mesh.num_ranks != before.mesh.num_ranks:
        raise ProgramError("a rewrite may name the axes of the mesh anew, not change its ranks")
    now = [program[name].type for name in program.outputs]
    then = [before[name].type for name in before.outputs]
    alike = len(now) == len(then) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(now, then, strict=False)
    )
    if not alike or set(program.states) != set(before.states):
        raise ProgramError(f"program {program.name} does not return what it returned before")
    if program.mesh != before.mesh:
        return
    for name, was, made in zip(program.outputs, then, now, strict=True):
        # States are returned in the layout in which they are kept, which may change.
        if made != was and program[name].op not in ("update", "input"):
            raise ProgramError(
                f"program {program.name} would return {name} as {made}, and returned {was} before"
            )
