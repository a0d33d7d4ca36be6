"""Torch models inside a program: a module or a function, captured as a graph of ATen operations.

    block = capture(module, x, flat=True)

    @program
    def step(x: S(0)["batch", 64], w: R["n"], lr):
        loss = mean(block(x, w))
        (g,) = grad(loss, (w,))
        return update(w, w - lr * all_reduce(g))

    step = compile(step.on(mesh(dp=2), batch=32, n=block.num_weights), groups, calls=block.calls)

Parameters and buffers become operands. Samples lie along a dimension of the examples, which is
tried out: on values like the examples', some samples alone have to give what they give among
others. A result has a row for each sample, or is a sum over them; everything else is refused.
Graphs are traced for the shapes that a rank has, when it first has them. A module is in training or
not as it was when captured; any other change since then is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.errors import ProgramError
from penstock.step.captured.checks import CheckedFunction, check_traced, found_of
from penstock.step.captured.graphs import (
    Graphs,
    Joint,
    Tensors,
    graph_digest,
    traced,
    traced_backward,
)
from penstock.step.dtypes import name_of, torch_dtype
from penstock.step.program.calls import BACKWARD, KEEPING, WEIGHTS, Function, Slot

__all__ = ["Captured", "capture"]

Dims = int | None | Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class Captured(Function):
    """A captured function: inside of a program it is called, outside its `calls` carry it out."""

    calls: Mapping[str, Callable[..., Any]] = field(compare=False, repr=False)
    """The `calls=` of `compile` and `interpret`, for tensors and for arrays."""
    graph: Any = field(compare=False, repr=False)
    """The forward, of the shapes of the examples; `print(graph.code)` shows it."""
    body: CapturedBody = field(compare=False, repr=False)

    @property
    def num_weights(self) -> int:
        """Elements of all parameters that are trained."""
        return sum(math.prod(shape) for shape in self.body.weights)

    def values(self) -> Tensors:
        """Return copies of the module's parameters and buffers, as operands after the examples."""
        held = [value.detach().clone() for value in self.body.state.values()]
        return self.body.packed(held)

    def restore(self, *values: torch.Tensor) -> None:
        """Write such values, trained meanwhile, back into the module."""
        state = list(self.body.state.values())
        wanted = [slot.shape for slot in self.operands[self.body.num_examples :]]
        if [tuple(value.shape) for value in values] != wanted:
            raise ProgramError(
                f"{self.name} has values of shapes {', '.join(map(str, wanted))}, got "
                f"{', '.join(str(tuple(value.shape)) for value in values)}; gather slices first"
            )
        given = self.body.unpacked([*([None] * self.body.num_examples), *values])
        for held, value in zip(state, given[self.body.num_examples :], strict=True):
            held.detach().copy_(value)


def capture(
    what: nn.Module | Callable[..., Any],
    *examples: torch.Tensor,
    batch_dim: Dims = 0,
    name: str | None = None,
    flat: bool = False,
    keep: bool = True,
) -> Captured:
    """Return a module or a function of tensors as something that a program can call.

    Called in a program it takes values like the examples, then the module's parameters and buffers,
    each one or, with `flat`, all that are trained as one vector: `y = block(x, w)`. The number of
    samples may be another one.

    Args:
        what: computes, from tensors, a tensor or a tuple of them; draws no random numbers and
            changes nothing.
        examples: tensors of the shapes and types that it will be given.
        batch_dim: along which samples lie, of all examples or of each; None for one that every
            sample needs all of, and None alone where samples may depend on each other.
        name: what programs call it.
        flat: whether parameters that are trained are one operand, a vector.
        keep: whether the backward reads what the forward has kept, or computes it again.

    >>> import torch
    >>> import penstock.step as ps
    >>> block = capture(torch.nn.Linear(4, 2), torch.zeros(3, 4), flat=True)
    >>> @ps.program
    ... def forward(x: ps.S(0)["batch", 4], w: ps.R["n"]):
    ...     return block(x, w)
    >>> made = forward.on(ps.mesh(dp=2), batch=8, n=block.num_weights)
    >>> str(made[made.outputs[0]].type)
    'f32[8×2] dp:S(0)'
    """
    if not examples or not all(isinstance(one, torch.Tensor) for one in examples):
        raise ProgramError("capture takes examples, a tensor for each argument of what is captured")
    called = name or _name_of(what)
    body = CapturedBody.of(what, examples, _dims(batch_dim, examples), called, flat=flat)
    operands = [one.detach().contiguous() for one in (*examples, *body.state.values())]
    graph = traced(body.function, operands, called)
    check_traced(graph, body.function, operands, called)
    found = found_of(body.function, operands, body.dims, called, by=body.by, keep=keep)
    found = _unhooked(found, body)
    operand_slots = body.slots(operands)
    digest = xxhash.xxh3_128_hexdigest(
        repr((graph_digest(graph), operand_slots, found.results, found.kept)).encode()
    )
    runs = _CapturedGraphs(body, operand_slots, found, digest, _CapturedTrace.of(graph, operands))
    return Captured(
        name=called,
        operands=operand_slots,
        results=found.results,
        kept=found.kept,
        flops=found.flops,
        why_no_gradient=found.why_not,
        digest=digest,
        calls=runs.calls(),
        graph=graph,
        body=body,
    )


def _unhooked(found: CheckedFunction, body: CapturedBody) -> CheckedFunction:
    """Return what was found; without a backward where hooks would change what it makes."""
    hooked = next((name for name, held in body.state.items() if _has_hooks(held)), None)
    if hooked is None or found.why_not:
        return found
    why_not = f"{hooked} has hooks on its gradient, which nobody would call; remove them"
    return replace(found, kept=(), places=(), skip=None, why_not=why_not)


def _has_hooks(held: torch.Tensor) -> bool:
    """Whether a parameter's gradient is changed, or looked at, when it is there."""
    return bool(held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None))


def _name_of(what: Any) -> str:
    found = type(what).__name__ if isinstance(what, nn.Module) else getattr(what, "__name__", "")
    return found.lower() if found.isidentifier() else "captured"


def _dims(said: Dims, examples: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    each = (said,) * len(examples) if said is None or isinstance(said, int) else tuple(said)
    if len(each) != len(examples):
        raise ProgramError(f"batch_dim for {len(each)} examples of {len(examples)}")
    for dim, example in zip(each, examples, strict=True):
        if dim is not None and not 0 <= dim < example.ndim:
            raise ProgramError(
                f"batch_dim={dim} of an example of shape {tuple(example.shape)}; say it for each "
                "example, None for one that has no samples"
            )
    lengths = {e.shape[d] for d, e in zip(each, examples, strict=True) if d is not None}
    if len(lengths) > 1 or 0 in lengths:
        raise ProgramError(f"examples have {' and '.join(map(str, sorted(lengths)))} samples")
    return each


# -- operands ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CapturedBody:
    """A function of tensors, and how they are packed into operands of a program."""

    name: str
    function: Callable[..., Tensors]
    """Takes examples, then weights, then whatever else the module has."""
    num_examples: int
    names: tuple[str, ...]
    dims: tuple[int | None, ...]
    by: tuple[int, ...]
    """Numbers of the arguments that have gradients."""
    state: dict[str, torch.Tensor]
    """The module's own tensors, weights first."""
    weights: tuple[tuple[int, ...], ...]
    """Shapes of the parameters that are trained."""
    is_flat: bool

    @staticmethod
    def of(
        what: Any, examples: Tensors, dims: tuple[int | None, ...], name: str, *, flat: bool
    ) -> CapturedBody:
        """Return the function of a module's own tensors as well."""
        state: dict[str, torch.Tensor] = {}
        trained: list[str] = []
        if isinstance(what, nn.Module):
            params = dict(what.named_parameters())
            trained = [n for n, p in params.items() if p.requires_grad and p.is_floating_point()]
            state = {n: params[n] for n in trained}
            state |= {n: p for n, p in params.items() if n not in state} | dict(
                what.named_buffers()
            )
        if flat and len({state[n].dtype for n in trained}) > 1:
            raise ProgramError(f"parameters of {name} have several types; capture without flat")
        num = len(examples)
        floats = [k for k, example in enumerate(examples) if example.is_floating_point()]
        return CapturedBody(
            name=name,
            function=_over_leaves(what, num, tuple(state), name),
            num_examples=num,
            names=(*_argument_names(what, num), *state),
            dims=(*dims, *([None] * len(state))),
            by=(*floats, *range(num, num + len(trained))),
            state=state,
            weights=tuple(tuple(state[n].shape) for n in trained),
            is_flat=flat and bool(trained),
        )

    def unpacked(self, operands: Sequence[Any]) -> list[Any]:
        """Return what the function takes, of what a program gives."""
        if not self.is_flat:
            return list(operands)
        at = self.num_examples
        sizes = [math.prod(shape) for shape in self.weights]
        views = operands[at].split(sizes)
        weights = [view.view(shape) for view, shape in zip(views, self.weights, strict=True)]
        return [*operands[:at], *weights, *operands[at + 1 :]]

    def packed(self, held: Sequence[torch.Tensor]) -> Tensors:
        """Return a module's tensors as operands, given its weights and then the others."""
        count = len(self.weights)
        if not self.is_flat:
            return tuple(held)
        return (torch.cat([one.reshape(-1) for one in held[:count]]), *held[count:])

    def gradients(self, found: Sequence[torch.Tensor]) -> Tensors:
        """Return gradients of operands, given those by what the function takes."""
        count = len(self.weights)
        if not self.is_flat:
            return tuple(found)
        others, weights = found[: len(found) - count], found[len(found) - count :]
        return (*others, torch.cat([one.reshape(-1) for one in weights]))

    def slots(self, leaves: Sequence[torch.Tensor]) -> tuple[Slot, ...]:
        """Return the operands of a program's call."""
        whole = [
            Slot(
                name=self.names[k],
                shape=tuple(leaf.shape),
                dtype=name_of(leaf.dtype),
                dim=self.dims[k],
                has_gradient=k in self.by,
            )
            for k, leaf in enumerate(leaves)
        ]
        if not self.is_flat:
            return tuple(whole)
        at, count = self.num_examples, len(self.weights)
        size = sum(math.prod(shape) for shape in self.weights)
        vector = Slot(name="weights", shape=(size,), dtype=whole[at].dtype)
        return (*whole[:at], vector, *whole[at + count :])


def _argument_names(what: Any, count: int) -> list[str]:
    try:
        params = inspect.signature(what.forward if isinstance(what, nn.Module) else what).parameters
        names = [p.name for p in params.values() if p.kind != p.VAR_POSITIONAL][:count]
    except (TypeError, ValueError):
        names = []
    return names + [f"x{k}" for k in range(len(names), count)]


def _over_leaves(
    what: Any, num_examples: int, names: tuple[str, ...], name: str
) -> Callable[..., Tensors]:
    modules = what.modules() if isinstance(what, nn.Module) else ()
    modes = [(module, module.training) for module in modules]

    def function(*leaves: torch.Tensor) -> Tensors:
        examples = leaves[:num_examples]
        if isinstance(what, nn.Module):
            own = dict(zip(names, leaves[num_examples:], strict=True))
            with _as_it_was(modes):
                out = torch.func.functional_call(what, own, examples)
            # What is assigned to a name of the module stands there now, and would be lost.
            pairs = zip(names, leaves[num_examples:], strict=True)
            changed = next((n for n, leaf in pairs if own[n] is not leaf), None)
            if changed is not None:
                raise ProgramError(
                    f"capture of {name!r}: it assigns to {changed}, which would stay as it is; "
                    "return the new value as a result, and give the old one as an example"
                )
        else:
            out = what(*examples)
        results = tuple(out) if isinstance(out, tuple | list) else (out,)
        for one in results:
            if not isinstance(one, torch.Tensor):
                raise ProgramError(
                    f"{name} returns a {type(one).__name__}; a tensor or a tuple of them will do: "
                    "capture a module whose forward returns one of it, such as "
                    "`self.model(x, use_cache=False).logits` of one of transformers"
                )
        return results

    return function


@contextmanager
def _as_it_was(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Have modules in training, or not, as they were once."""
    now = [(module, module.training) for module, _ in modes]
    try:
        for module, mode in modes:
            module.training = mode
        yield
    finally:
        for module, mode in now:
            module.training = mode


# -- carrying out ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CapturedTrace:
    """The graph of a function when it was captured, to find out whether it has changed."""

    digest: str
    operands: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

    @staticmethod
    def of(graph: Any, operands: Sequence[torch.Tensor]) -> _CapturedTrace:
        return _CapturedTrace(
            graph_digest(graph), tuple((o.shape, o.dtype, o.device) for o in operands)
        )

    def check(self, body: CapturedBody) -> None:
        """Refuse a function that has become another one."""
        shapes = ShapeEnv()  # For what has as many elements as values say.
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True):
            like = [torch.empty(size, dtype=dtype, device=at) for size, dtype, at in self.operands]
        if graph_digest(traced(body.function, like, body.name)) != self.digest:
            raise ProgramError(
                f"{body.name} computes something else than when it was captured: a tensor or a "
                "number that it reads has changed, or torch computes in another mode (autocast); "
                "capture it again, or give what changes as an operand"
            )


class _CapturedGraphs:
    """The graphs of one captured function, by the shapes of what they are given."""

    def __init__(
        self,
        body: CapturedBody,
        operands: tuple[Slot, ...],
        found: CheckedFunction,
        digest: str,
        before: _CapturedTrace,
    ) -> None:
        self.body, self.operands, self.found, self.digest = body, operands, found, digest
        self._before = before
        self._graphs: dict[Any, Graphs] = {}
        self._again: dict[Any, Graphs] = {}
        self._forward: dict[Any, Any] = {}
        self._has_zeros = False
        """Whether some shapes keep nothing: what a backward reads may be of those, in chunks."""

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return what carries a program's calls out, by name."""
        name, slots = self.body.name, self.operands
        by = tuple(slot for slot in slots if slot.has_gradient)
        weights = tuple(slot for slot in by if slot.dim is None)
        results, kept = self.found.results, self.found.kept
        out: dict[str, Callable[..., Any]] = {name: _CapturedCall(self, "forward", results)}
        if kept:
            out[name + KEEPING] = _CapturedCall(self, "keeping", (*results, *kept))
        if not self.found.why_not:
            out[name + BACKWARD] = _CapturedCall(self, "backward", by)
            out[name + WEIGHTS] = _CapturedCall(self, "weights", weights)
        return out

    def forward(self, leaves: Sequence[torch.Tensor]) -> Tensors:
        key = _key(leaves)
        if key not in self._forward:
            self._before.check(self.body)
            self._forward[key] = traced(self.body.function, leaves, self.body.name)
        out: Tensors = self._forward[key](*leaves)
        return out

    def graphs(self, leaves: Sequence[torch.Tensor]) -> Graphs:
        """Return the graphs for some shapes; where they would keep other things, they keep none."""
        key = _key(leaves)
        if key not in self._graphs:
            self._before.check(self.body)
            joint = self._traced(leaves)
            made = joint.cut(self.found.skip)
            if made.num_kept and not self._keeps_the_same(made, leaves):
                made = self._again[key] = joint.cut(None)
                self._has_zeros = True
            self._graphs[key] = made
        return self._graphs[key]

    def backward_graphs(self, leaves: Sequence[torch.Tensor]) -> Graphs:
        """Return the graphs of a backward, which keep nothing where there may be nothing to read.

        A forward of other shapes may have come before it, chunk by chunk.
        """
        made, key = self.graphs(leaves), _key(leaves)
        if not made.num_kept or not self._has_zeros:
            return made
        if key not in self._again:
            self._again[key] = self._traced(leaves).cut(None)
        return self._again[key]

    def _keeps_the_same(self, made: Graphs, leaves: Sequence[torch.Tensor]) -> bool:
        shapes = self.found.kept_shapes(self.num_samples(leaves))
        return made.num_keepable == self.found.num_keepable and made.kept_shapes == shapes

    def num_samples(self, leaves: Sequence[torch.Tensor]) -> int:
        """Return how many samples operands have."""
        pairs = zip(leaves, self.body.dims, strict=True)
        return next((leaf.shape[dim] for leaf, dim in pairs if dim is not None), 1)

    def _traced(self, leaves: Sequence[torch.Tensor]) -> Joint:
        body = self.body
        samples = [k for k, dim in enumerate(body.dims) if dim is not None]
        return traced_backward(body.function, leaves, body.name, by=body.by, samples=samples)


def _key(leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves)


@dataclass(frozen=True, eq=False)
class _CapturedCall:
    """One of the calls of a captured function; of arrays it makes arrays, with 64 bits."""

    runs: _CapturedGraphs
    which: str
    results: tuple[Slot, ...]

    @property
    def digest(self) -> str:
        """Digest of the function."""
        return self.runs.digest

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        slots = self.runs.operands
        values = self._tensors(given)
        pairs = zip(slots, values[: len(slots)], strict=True)
        lengths = [value.shape[slot.dim] for slot, value in pairs if slot.dim is not None]
        with torch.no_grad():
            if lengths and not lengths[0]:
                made = self._of_nothing(values[0])
            else:
                made = self._made(values)
            out = _apart(made, values)
        is_array = any(isinstance(value, np.ndarray) for value in given)
        return tuple(_array(one) for one in out) if is_array else out

    def _tensors(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """Return what is given as tensors; numbers of the host have the types that they should."""
        where = next((one.device for one in given if isinstance(one, torch.Tensor)), None)
        found = self.runs.found
        slots = [*self.runs.operands]
        if len(given) > len(slots):
            slots += [*found.kept, *(slot for slot in found.results if slot.has_gradient)]
        return [
            torch.tensor(one, dtype=torch_dtype(slot.dtype), device=where)
            if isinstance(one, int | float)
            else _tensor(one)
            for one, slot in zip(given, slots, strict=True)
        ]

    def _of_nothing(self, like: torch.Tensor) -> Tensors:
        """Return what no samples make: no rows, and sums of nothing."""
        made = [slot.of(0) for slot in self.results]
        return tuple(
            torch.zeros(one.shape, dtype=torch_dtype(one.dtype), device=like.device) for one in made
        )

    def _made(self, values: list[torch.Tensor]) -> Tensors:
        runs, body = self.runs, self.runs.body
        count = len(runs.operands)
        leaves = [one.contiguous() for one in body.unpacked(values[:count])]
        if self.which == "forward":
            return tuple(one.contiguous() for one in runs.forward(leaves))
        if self.which == "keeping":
            return self._keeping(runs.graphs(leaves), leaves)
        graphs = runs.backward_graphs(leaves)
        kept, dys = runs.found.split(values[count:], graphs.num_kept)
        graph = graphs.backward if self.which == "backward" else graphs.weights
        found = graph(*leaves, *graphs.read(kept, dys))
        return tuple(one.contiguous() for one in body.gradients(found))

    def _keeping(self, graphs: Graphs, leaves: list[torch.Tensor]) -> Tensors:
        found = self.runs.found
        out = graphs.keeping(*leaves)
        num = len(found.results)
        results = tuple(one.contiguous() for one in out[:num])
        samples = self.runs.num_samples(leaves)
        return (*results, *found.by_samples(out[num:], samples, leaves[0]))


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.from_numpy(np.array(value, order="C"))


def _array(tensor: torch.Tensor) -> Any:
    """Return an array; of bfloat16, which arrays have not, one that is wide enough."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _apart(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Tensors:
    """Return results in memory of their own: that of operands may be written over."""
    theirs = {one.untyped_storage().data_ptr() for one in given}
    return tuple(one.clone() if one.untyped_storage().data_ptr() in theirs else one for one in made)
