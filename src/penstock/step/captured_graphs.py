"""Graphs of ATen operations: a function of tensors traced forward and backward, and cut in parts.

The forward and the backward of a function are traced as one graph, by `make_fx` of its `vjp`, with
operations in place replaced by those that are not. What does not depend on gradients of results is
the forward. The values of it that the rest reads are what has to be kept; of those, what depends on
no sample (a transposed weight) is computed again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.errors import ProgramError

__all__ = ["Graphs", "Tensors", "traced", "traced_backward"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """A function for tensors of certain shapes: operands in, results out."""

    forward: Callable[..., Tensors]
    keeping: Callable[..., Tensors]
    """Results, then what is kept."""
    backward: Callable[..., Tensors]
    """Of operands, what was kept and gradients of results: gradients of operands."""
    weights: Callable[..., Tensors]
    """The same, only by operands that have no samples."""
    num_kept: int
    num_keepable: int
    """What could be kept; some of it may be computed again instead."""


def traced(function: Callable[..., Tensors], operands: Sequence[torch.Tensor], name: str) -> Any:
    """Return the graph of a function for some operands; refuse what a graph cannot say."""
    graph = _graph_of(function, operands, name)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and getattr(graph, node.target).requires_grad:
            raise ProgramError(
                f"capture of {name!r}: it has parameters that are not its own, which would stay as "
                "they are; capture the module that has them, or give them as examples"
            )
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            number = [n for n in graph.graph.nodes if n.op == "placeholder"].index(node.args[0])
            raise ProgramError(
                f"capture of {name!r}: it changes its operand {number}, as batch norm in training "
                "changes its statistics; call .eval(), or use a layer that keeps nothing"
            )
    return graph


def traced_backward(
    function: Callable[..., Tensors],
    operands: Sequence[torch.Tensor],
    name: str,
    *,
    by: Sequence[int],
    samples: Sequence[int],
    skip: Collection[int] | None = (),
) -> Graphs:
    """Return the graphs of a function and of its backward.

    Args:
        function: of tensors, to a tuple of tensors.
        operands: tensors of the shapes and types that it is for.
        name: for errors.
        by: the operands that gradients are taken by.
        samples: the operands that have samples.
        skip: what is not kept of what could be, but computed again; None: all of it.
    """
    with torch.no_grad():
        results = function(*operands)
    dys = [torch.zeros_like(result) for result in results if result.is_floating_point()]
    joint = _graph_of(_joint(function, len(operands), by), [*operands, *dys], name)
    nodes = list(joint.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    returned = list(nodes[-1].args[0])
    made, gradients = returned[: len(results)], returned[len(results) :]
    ins, tangents = given[: len(operands)], given[len(operands) :]
    keepable = _keepable(nodes, set(tangents), {ins[k] for k in samples})
    kept = [] if skip is None else [n for k, n in enumerate(keepable) if k not in skip]
    weights = [d for d, k in zip(gradients, by, strict=True) if k not in samples]
    read = [*ins, *kept, *tangents]
    return Graphs(
        forward=_part(joint, ins, made),
        keeping=_part(joint, ins, [*made, *kept]),
        backward=_part(joint, read, gradients),
        weights=_part(joint, read, weights),
        num_kept=len(kept),
        num_keepable=len(keepable),
    )


def _graph_of(function: Callable[..., Any], operands: Sequence[torch.Tensor], name: str) -> Any:
    try:
        with torch.no_grad():
            return make_fx(
                functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True
            )(*operands)
    except Exception as error:
        raise ProgramError(
            f"capture of {name!r}: torch cannot trace it ({type(error).__name__}: {error}); what "
            "it computes may depend on shapes, and not on values"
        ) from error


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
    return [n for n in nodes if n in out and n in of_samples and n.op != "placeholder"]


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
