"""Programs: values in the order in which they are made, each by one operation.

A program is a value itself: it cannot be changed, only replaced by another one. Every value has a
name that is its own, so a program can be read, compared and hashed; a *schedule* is the list of
rewrites that made it from what the user wrote.

The graph says *what* is computed. *How* it is carried out stands beside it: attributes of
communication (`wire`, `algo`, `priority`, `ahead`) and *regions*, sets of nodes that are fused into
one kernel, cut into chunks, or overlapped. Without all of that the program means the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from penstock.errors import ProgramError
from penstock.step.program.mesh import Mesh
from penstock.step.program.rewrites import METHODS, Rewrites
from penstock.step.program.types import Type

if TYPE_CHECKING:
    from penstock.step.program.cost import MachineCosts
    from penstock.step.program.explain import Explanation

__all__ = ["Attr", "Node", "Program", "Region", "Rewrite", "free_name"]

Attr = str | int | float | bool | tuple[Any, ...] | Type | None
"""Attributes are values that print and compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One value and the operation that makes it."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    """By name, in the order of names."""
    type: Type
    label: str = field(default="", compare=False)
    """The variable that the user assigned it to."""
    where: str = field(default="", compare=False)
    """The user's line."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", tuple(sorted(dict(self.attrs).items())))

    def attr(self, name: str, default: Attr = None) -> Any:
        """Return an attribute."""
        return dict(self.attrs).get(name, default)

    def with_attrs(self, **attrs: Attr) -> Node:
        """Return the same node with some attributes changed; None drops one."""
        kept = {k: v for k, v in (dict(self.attrs) | attrs).items() if v is not None}
        return replace(self, attrs=tuple(kept.items()))

    def with_inputs(self, renamed: dict[str, str]) -> Node:
        """Return the same node with other operands."""
        return replace(self, inputs=tuple(renamed.get(name, name) for name in self.inputs))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which it communicates."""
        found = self.attr("axis", ())
        return (found,) if isinstance(found, str) else tuple(found)

    def __str__(self) -> str:
        shown = [name.removeprefix("const ") for name in self.inputs]
        shown += [f"{key}={_shown(value)}" for key, value in self.attrs if key != "type"]
        return f"{self.name} = {self.op}({', '.join(shown)})  # {self.type}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Nodes that are carried out together."""

    name: str
    kind: str
    """fuse, chunk, overlap, ring, bucket."""
    nodes: tuple[str, ...]
    """In the order of the program."""
    num_chunks: int = 1
    dims: tuple[tuple[str, int], ...] = ()
    """Chunks: the dimension along which each value is cut, for the nodes and their operands; each
    chunk uses values without an entry whole."""
    axis: str | None = None
    """Chunks: an axis that slices some of the values; see `chunks`."""
    attrs: tuple[tuple[str, Attr], ...] = ()

    def dim(self, name: str) -> int | None:
        """Return the dimension along which a value is cut, or None."""
        return dict(self.dims).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite of a schedule: its name and its arguments."""

    name: str
    args: tuple[Attr, ...] = ()
    options: tuple[tuple[str, Attr], ...] = ()

    def __str__(self) -> str:
        shown = [repr(arg) for arg in self.args]
        shown += [f"{key}={value!r}" for key, value in self.options]
        return f"{self.name}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Program(Rewrites):
    """Nodes in an order in which they can be made."""

    name: str
    mesh: Mesh
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    history: tuple[Rewrite, ...] = field(default=(), compare=False)
    """The rewrites that made it."""
    defaults: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """Values of scalars that need not be given."""

    # -- looking -----------------------------------------------------------------------------

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def __getitem__(self, name: str) -> Node:
        found = self.by_name.get(name)
        if found is None:
            raise ProgramError(
                f"program {self.name} has no value {name!r}; it has {', '.join(self.by_name)}"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """The nodes that read each value, in their order."""
        out: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                out[name].append(node.name)
        return {name: tuple(users) for name, users in out.items()}

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors and scalars that the user gives, in the order of the parameters."""
        return tuple(node for node in self.nodes if node.op in ("input", "scalar"))

    @cached_property
    def states(self) -> dict[str, str]:
        """The inputs that a step updates, and the value that each has afterwards."""
        return {str(n.attr("target")): n.name for n in self.nodes if n.op == "update"}

    @cached_property
    def is_approximate(self) -> bool:
        """Whether moves round values on the wire."""
        return any(node.attr("wire") is not None for node in self.nodes)

    def find(self, name: str, *ops: str, noun: str = "") -> Node:
        """Return a node by its name, or by the variable it was assigned to and its operation.

        `g` finds the all-reduce in `g = all_reduce(g)`, though the input has that name too. A
        message about a node that is not found calls it by its operations, or by a noun.
        """
        if name in self.by_name and (not ops or self[name].op in ops):
            return self[name]
        found = [n for n in self.nodes if n.label == name and (not ops or n.op in ops)]
        if len(found) == 1:
            return found[0]
        what = (noun and noun + "s" * (len(found) > 1)) or " or ".join(ops) or "value"
        some = [n.name for n in (found or [n for n in self.nodes if not ops or n.op in ops])]
        raise ProgramError(
            f"program {self.name} has {len(found) or 'no'} {what} called {name!r}; "
            f"name one of {', '.join(some) or 'none'}"
        )

    def region(self, name: str) -> Region:
        """Return a region by name."""
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(r.name for r in self.regions) or "none"
        raise ProgramError(f"program {self.name} has no region {name!r}; it has {known}")

    def regions_of(self, node: str, kind: str) -> tuple[Region, ...]:
        """Return the regions of a kind that a node is in."""
        return tuple(r for r in self.regions if r.kind == kind and node in r.nodes)

    def region_by_node(self, *kinds: str) -> dict[str, Region]:
        """Return by node the region of some kinds that it is in."""
        return {name: r for r in self.regions if r.kind in kinds for name in r.nodes}

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be called: a program is not carried out before it is compiled."""
        raise ProgramError(
            f"program {self.name} is called; carry it out with a step, `with ps.Groups(mesh) as "
            "groups, ps.compile(program, groups) as step: step(x=...)`, or ps.interpret it"
        )

    # -- making others -----------------------------------------------------------------------

    def with_nodes(self, nodes: Iterable[Node], **changes: Any) -> Program:
        """Return the same program of other nodes."""
        return replace(self, nodes=tuple(nodes), **changes)

    def with_attrs(self, attrs: Mapping[str, Mapping[str, Attr]]) -> Program:
        """Return the same program with attributes of some nodes changed; None drops one."""
        return self.with_nodes(
            node.with_attrs(**attrs[node.name]) if node.name in attrs else node
            for node in self.nodes
        )

    def apply(self, name: str, /, *args: Attr, **options: Attr) -> Program:
        """Return the program after a rewrite, checked, with the rewrite in its history."""
        step = Rewrite(name=name, args=args, options=tuple(options.items()))
        made: Program = METHODS["rewritten"](self, step)
        return made

    def script(self) -> str:
        """Return the rewrites that made this program as text: `schedule.apply` makes it again."""
        text: str = METHODS["schedule_text"](self.history)
        return text

    def explain(self, costs: MachineCosts | None = None) -> Explanation:
        """Return bytes by lane, the predicted timeline and exposed communication, as text.

        Costs are by default those of an ordinary machine; `calibrate` measures this one's.
        """
        explanation: Explanation = METHODS["explain"](self, costs)
        return explanation

    # -- reading -----------------------------------------------------------------------------

    def __str__(self) -> str:
        how = ", approximate" if self.is_approximate else ""
        lines = [f"program {self.name} on {self.mesh}{how}"]
        lines += [f"  {node}" for node in self.nodes if node.op != "const"]
        lines += [f"  {region_text(region)}" for region in self.regions]
        return "\n".join([*lines, f"  return {', '.join(self.outputs)}"])

    @cached_property
    def digest(self) -> str:
        """A hash of what is computed and how, the same on all ranks that agree."""
        # Without labels, lines and history, which may differ where programs are the same.
        said = [repr((self.mesh, self.outputs, self.regions))]
        said += [repr((n.name, n.op, n.inputs, n.attrs, str(n.type))) for n in self.nodes]
        return xxhash.xxh3_128_hexdigest("\n".join(said).encode())


def _shown(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if isinstance(value, Type) else repr(value)


def region_text(region: Region) -> str:
    """Return a region in one line."""
    how = f" in {region.num_chunks} chunks" if region.num_chunks > 1 else ""
    return f"{region.kind} {region.name}{how}: {', '.join(region.nodes)}"


def free_name(name: str, *taken: Container[str]) -> str:
    """Return a name, with a number where it is taken.

    >>> free_name("fuse", {"fuse", "fuse.2"})
    'fuse.3'
    """
    numbered = (f"{name}.{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if not any(one in each for each in taken))
