"""Graphs of ATen operations: a function of tensors traced forward and backward, and cut in parts.

The forward and the backward of a function are traced as one graph, by `make_fx` of its `vjp`, with
operations in place replaced by those that are not. What does not depend on gradients of results is
the forward. The values of it that the rest reads are what has to be kept; of those, what depends on
no sample (a transposed weight) is computed again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import fx
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.errors import ProgramError
from penstock.step.program.lines import line_in

__all__ = ["Graphs", "Joint", "Tensors", "graph_digest", "traced", "traced_backward"]

Tensors = tuple[torch.Tensor, ...]
_SHARES = ("p", "dropout_p", "dropout")
"""Names that operations have for the share that they drop."""
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
"""Flags behind `torch.compiler.is_compiling` and `is_exporting`; torch.export sets them, too."""


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """A function for tensors of certain shapes: operands in, results out."""

    forward: Callable[..., Tensors]
    keeping: Callable[..., Tensors]
    """Results, then what is kept."""
    backward: Callable[..., Tensors]
    """Takes operands, kept values and gradients of results; returns gradients of operands."""
    weights: Callable[..., Tensors]
    """The same for operands without samples only."""
    kept_shapes: tuple[tuple[int, ...], ...]
    kept_strides: tuple[tuple[int, ...], ...]
    """Strides for which the backward was traced: its views need them."""
    dtypes: tuple[torch.dtype, ...]
    """Types of kept values, then of gradients of results. NumPy has no bfloat16."""
    num_keepable: int
    """Values that could be kept; some may be computed again instead."""

    @property
    def num_kept(self) -> int:
        """How many values are kept."""
        return len(self.kept_shapes)

    def read(self, kept: Sequence[torch.Tensor], dys: Sequence[torch.Tensor]) -> Tensors:
        """Return kept values and gradients with strides and types that backward was traced for."""
        of = iter(self.dtypes)
        pairs = zip(kept, self.kept_strides, strict=True)
        laid_out = [_laid_out(one.to(next(of)), strides) for one, strides in pairs]
        return (*laid_out, *(dy.to(next(of)).contiguous() for dy in dys))


def _laid_out(one: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if one.stride() == strides:
        return one
    small = one
    for dim, stride in enumerate(strides):
        small = small.narrow(dim, 0, 1) if not stride else small
    reach = 0
    for stride, length in sorted(zip(strides, small.shape, strict=True)):
        if length > 1 and stride <= reach:
            return one  # Elements lay in one place, as those of windows do: it has no such views.
        reach += stride * (length - 1)
    made = torch.empty_strided(small.shape, strides, dtype=one.dtype, device=one.device)
    return made.copy_(small).expand(one.shape)


def graph_digest(graph: Any) -> str:
    """Return the digest of what a graph computes: its operations, and the constants they read."""
    digest = xxhash.xxh3_128(graph.code.encode())
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            held = getattr(graph, node.target).detach().cpu().contiguous().reshape(-1)
            digest.update(repr((node.target, held.dtype)).encode())
            digest.update(held.view(torch.uint8).numpy())
    return digest.hexdigest()


def traced(function: Callable[..., Tensors], operands: Sequence[torch.Tensor], name: str) -> Any:
    """Return the graph of a function for some operands; refuse what a graph cannot say."""
    graph = _graph_of(function, operands, name)
    for node in graph.graph.nodes:
        why = _why_not(graph, node)
        if why:
            raise ProgramError(f"capture of {name!r}: {why}")
    return graph


def _why_not(graph: Any, node: fx.Node) -> str:
    """Return why a graph with such a node would not do what the function does, if so."""
    if node.op == "get_attr" and getattr(getattr(graph, str(node.target)), "requires_grad", False):
        return (
            "it has parameters that are not its own, which would stay as they are; capture the "
            "module that has them, or give them as examples"
        )
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        changed = next(iter(node.all_input_nodes), node)
        if changed.op == "get_attr":
            return (
                "it changes a tensor that is neither its parameter nor its buffer; give that as an "
                "example, and return the new value as a result"
            )
        if changed.op == "placeholder":
            number = [n for n in graph.graph.nodes if n.op == "placeholder"].index(changed)
            return (
                f"it changes its operand {number}, as batch norm in training changes its "
                "statistics; call .eval(), or use a layer that keeps nothing"
            )
    if _draws(node):
        return (
            f"it draws random numbers ({node.target}), which nobody could draw again for its "
            "backward; call .eval(), or use dropout of the program"
        )
    return ""


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers; attention has a share to drop, which may be 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    known = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((one.name for one in known), node.args, strict=False)) | node.kwargs
    shares = [given.get(one.name, one.default_value) for one in known if one.name in _SHARES]
    return not shares or any(shares)


def traced_backward(
    function: Callable[..., Tensors],
    operands: Sequence[torch.Tensor],
    name: str,
    *,
    by: Sequence[int],
    samples: Sequence[int],
) -> Joint:
    """Return a function and its backward, as one graph.

    Args:
        function: of tensors, to a tuple of tensors.
        operands: tensors of the shapes and types that it is for.
        name: for errors.
        by: the operands that gradients are taken by.
        samples: the operands that have samples.
    """
    with torch.no_grad():
        results = function(*operands)
    dys = [
        torch.zeros_like(result, memory_format=torch.contiguous_format)
        for result in results
        if result.is_floating_point()
    ]
    graph = _graph_of(_joint(function, len(operands), by), [*operands, *dys], name)
    nodes = list(graph.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    returned = list(nodes[-1].args[0])
    ins, tangents = given[: len(operands)], given[len(operands) :]
    gradients = returned[len(results) :]
    return Joint(
        graph=graph,
        ins=ins,
        tangents=tangents,
        made=returned[: len(results)],
        gradients=gradients,
        weights=[d for d, k in zip(gradients, by, strict=True) if k not in samples],
        keepable=_keepable(nodes, set(tangents), {ins[k] for k in samples}),
    )


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The graph of a function and of its backward, which can be cut where one likes."""

    graph: Any
    ins: list[fx.Node]
    tangents: list[fx.Node]
    made: list[fx.Node]
    gradients: list[fx.Node]
    weights: list[fx.Node]
    keepable: list[fx.Node]

    def cut(self, skip: Collection[int] | None = ()) -> Graphs:
        """Return the graphs; what of the values that could be kept is skipped, None for all."""
        kept = [] if skip is None else [n for k, n in enumerate(self.keepable) if k not in skip]
        read = [*self.ins, *kept, *self.tangents]
        return Graphs(
            forward=_part(self.graph, self.ins, self.made),
            keeping=_part(self.graph, self.ins, [*self.made, *kept]),
            backward=_part(self.graph, read, self.gradients),
            weights=_part(self.graph, read, self.weights),
            kept_shapes=tuple(tuple(node.meta["val"].shape) for node in kept),
            kept_strides=tuple(node.meta["val"].stride() for node in kept),
            dtypes=tuple(node.meta["val"].dtype for node in (*kept, *self.tangents)),
            num_keepable=len(self.keepable),
        )


def _graph_of(function: Callable[..., Any], operands: Sequence[torch.Tensor], name: str) -> Any:
    try:
        with torch.no_grad(), _as_if_exported():
            return make_fx(
                functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True
            )(*operands)
    except ProgramError:
        raise
    except Exception as error:
        line = line_in(error.__traceback__, _is_users)
        why = str(error).partition("\n")[0]
        raise ProgramError(
            f"capture of {name!r}: torch cannot trace it ({type(error).__name__}: {why}"
            + (f", in {line}" if line else "")
            + "); what it computes may depend on shapes and not on values, and takes examples by "
            "place: capture a module that calls it otherwise, or what is in front of that line and "
            "behind it"
        ) from error


def _is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to what is captured, and neither to torch nor to us."""
    room = str(frame.f_globals.get("__name__"))
    return room.partition(".")[0] != "torch" and not room.startswith("penstock.step.captured")


@contextmanager
def _as_if_exported() -> Iterator[None]:
    """Have libraries see that a graph is made: theirs then do not look at the values of tensors."""
    flags = [n for n in _FLAGS if hasattr(torch.compiler, n)]
    before = [getattr(torch.compiler, name) for name in flags]
    try:
        for name in flags:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, was in zip(flags, before, strict=True):
            setattr(torch.compiler, name, was)


def _joint(
    function: Callable[..., Tensors], num_operands: int, by: Sequence[int]
) -> Callable[..., list[torch.Tensor]]:
    """Return a function of operands and gradients of results: results, then gradients."""

    def joint(*given: torch.Tensor) -> list[torch.Tensor]:
        operands, dys = list(given[:num_operands]), given[num_operands:]

        def results_of(*chosen: torch.Tensor) -> tuple[Tensors, Tensors]:
            for k, value in zip(by, chosen, strict=True):
                operands[k] = value
            results = function(*operands)
            floats = tuple(r for r in results if r.is_floating_point())
            return floats, tuple(r.detach() for r in results)

        made: Any = vjp(results_of, *(operands[k] for k in by), has_aux=True)
        _, pull, results = made
        return [*results, *pull(tuple(dys))]

    return joint


def _keepable(
    nodes: Sequence[fx.Node], tangents: set[fx.Node], samples: set[fx.Node]
) -> list[fx.Node]:
    """Return the values of samples, made before there are gradients, that gradients are made of."""
    late, of_samples = _below(nodes, tangents), _below(nodes, samples)
    out: dict[fx.Node, None] = {}
    for node in nodes:
        if node in late and node.op != "output":
            out |= dict.fromkeys(n for n in node.all_input_nodes if n not in late)
    found = [n for n in nodes if n in out and n in of_samples and n.op != "placeholder"]
    return [n for n in found if _has_a_shape(n)]


def _has_a_shape(node: fx.Node) -> bool:
    """Whether it is a tensor of a shape that does not depend on values."""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and all(isinstance(n, int) for n in made.shape)


def _below(nodes: Sequence[fx.Node], first: Iterable[fx.Node]) -> set[fx.Node]:
    out = set(first)
    for node in nodes:
        if any(n in out for n in node.all_input_nodes):
            out.add(node)
    return out


def _part(joint: Any, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Any:
    """Return the graph that leads from some values to others."""
    needed = set(outputs)
    for node in reversed(joint.graph.nodes):
        if node in needed and node not in inputs:
            needed.update(node.all_input_nodes)
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in inputs}
    for node in joint.graph.nodes:
        if node in needed and node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in outputs))
    return fx.GraphModule(joint, graph)
