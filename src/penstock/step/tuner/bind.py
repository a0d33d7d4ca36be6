"""A program from a function and its inputs, whose shapes give the sizes that the function names.

A dimension that an axis slices is as long as the parts of its ranks together, so ranks tell each
other their shapes. Sizes that no input shows, such as those of a load, cannot be found: such a
function is put on a mesh by `.on(mesh, n=...)`, with all its sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.step.groups import Groups
from penstock.step.program.language import Template
from penstock.step.program.layouts import Annotation
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Program
from penstock.step.tuner.agree import Team, together

__all__ = ["bound"]

Shape = tuple[tuple[int, ...], bool]
"""The shape on a rank, and whether that is the whole shape, as of a DTensor."""


def bound(
    template: Template, groups: Groups | None, inputs: Mapping[str, Any] | None, team: Team
) -> Program:
    """Return the program of a function for the mesh of some groups and the sizes of its inputs."""
    if groups is None or inputs is None:
        raise ProgramError(
            f"the sizes of {template.name} are read off its inputs: give groups and inputs, or "
            f"{template.name}.on(mesh, ...)"
        )
    mine: dict[str, Shape] = {
        name: (tuple(value.shape), hasattr(value, "device_mesh"))
        for name, value in inputs.items()
        if hasattr(value, "shape")
    }
    everyones: Sequence[dict[str, Shape]] = team.gathered(mine)
    sizes: dict[str, int] = {}
    for name, said in _annotations(template).items():
        shapes = [theirs[name] for theirs in everyones if name in theirs]
        if len(shapes) == len(everyones) and all(len(s) == len(said.dims) for s, _ in shapes):
            for dim, called in enumerate(said.dims):
                if isinstance(called, str):
                    slicing = _slicing(template, groups.mesh, said, dim)
                    length = _length(groups.mesh, shapes, slicing, dim)
                    if sizes.setdefault(called, length) != length:
                        raise ProgramError(
                            f"{template.name} has a dimension {called!r} of {sizes[called]} "
                            f"elements, and {name} has {length}"
                        )
    return together(team, template.name, lambda: template.on(groups.mesh, **sizes))


def _annotations(template: Template) -> dict[str, Annotation]:
    said = {
        name: param.annotation
        for name, param in inspect.signature(template.function, eval_str=True).parameters.items()
    }
    return {k: v for k, v in (said | dict(template.layouts)).items() if isinstance(v, Annotation)}


def _slicing(template: Template, mesh: Mesh, said: Annotation, dim: int) -> list[str]:
    """Return the axes that slice a dimension."""
    mine = template.axis or mesh.names[0]
    return [y.axis or mine for y in said.layouts if y.kind == "S" and y.dim == dim]


def _length(mesh: Mesh, shapes: Sequence[Shape], slicing: list[str], dim: int) -> int:
    """Return the length of a dimension on all ranks together."""
    first, is_whole = shapes[0]
    if is_whole or not slicing:
        return first[dim]
    others = [name for name in mesh.names if name not in slicing]
    alike = [
        rank for rank in range(mesh.num_ranks) if not others or not mesh.coordinate(rank, *others)
    ]
    return sum(shapes[rank][0][dim] for rank in alike)
