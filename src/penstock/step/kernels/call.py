"""One call of a kernel: its numbers, its tensors and where its results go, normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ProgramError
from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.draws import BlockPlace, halves
from penstock.step.program.ops import computed

__all__ = ["Given", "KernelCall", "Out", "call_of", "numbers_of", "several", "write"]

Given = Tensor | Sequence[Tensor]
"""A tensor, or one for each rank."""
Out = Given | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """What a backend is given."""

    inputs: dict[str, Given]
    numbers: dict[str, float]
    """Numbers of the host by name, seeds also as two halves."""
    outs: dict[str, Given]
    """Contiguous, none missing."""
    aliases: dict[str, str]
    """Outputs that have exactly the memory of an input, and which."""
    place: BlockPlace
    device: torch.device
    copied: tuple[tuple[str, Given], ...]
    """Outputs that a backend writes elsewhere first, and where they belong."""

    @property
    def widths(self) -> dict[str, int]:
        """How many tensors an input, or an output (`out NAME`), has if it is a list of them."""
        out = {n: len(t) for n, t in self.inputs.items() if not isinstance(t, Tensor)}
        return out | {f"out {n}": len(t) for n, t in self.outs.items() if not isinstance(t, Tensor)}

    def finish(self) -> None:
        """Copy what was written elsewhere to where it belongs."""
        for name, wanted in self.copied:
            made = self.outs[name]
            assert isinstance(made, Tensor)
            write(wanted, made)


def several(given: Out) -> Sequence[Tensor]:
    """Return the tensors of an argument as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, Tensor) else given


def write(out: Given, value: Tensor) -> None:
    """Copy a value to one tensor or to several."""
    for one in several(out):
        one.copy_(value.view(one.shape))


def numbers_of(body: KernelBody, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of the host that follow from the scalars of a call."""
    known: dict[str, float] = {}
    defaults = dict(body.defaults)
    for name in body.scalars:
        found = scalars.get(name, defaults.get(name))
        if found is None:
            raise ProgramError(f"a kernel of {body.name} needs a number for {name}")
        known[name] = found
    for node in body.host:
        if node.op == "const":
            known[node.name] = node.attr("value")
            continue
        args = [known[name] for name in node.inputs]
        known[node.name] = computed(node.op, args, dict(node.attrs), node.type.dtype).item()
    for name in body.numbers:
        stem, _, half = name.rpartition(" ")
        if half in ("low", "high") and stem in known:
            known[name] = halves(known[stem])[half == "high"]
    return known


def call_of(
    body: KernelBody,
    tensors: Sequence[Given],
    numbers: dict[str, float],
    out: Sequence[Out] | None,
    starts: tuple[int, ...] | None,
) -> KernelCall:
    """Return a call with a block, contiguous inputs and a place for every result."""
    if len(tensors) != len(body.inputs):
        raise ProgramError(
            f"a kernel of {body.name} reads {len(body.inputs)} tensors "
            f"({', '.join(body.inputs)}), got {len(tensors)}"
        )
    given = dict(zip(body.inputs, tensors, strict=True))
    wanted: Sequence[Out] = [None] * len(body.outputs) if out is None else out
    if len(wanted) != len(body.outputs):
        raise ProgramError(
            f"a kernel of {body.name} returns {len(body.outputs)} values "
            f"({', '.join(body.outputs)}), got room for {len(wanted)}"
        )
    named = dict(zip(body.outputs, wanted, strict=True))
    block = _block(body, given, named)
    place = BlockPlace(block, starts or (0,) * len(block), body.full)
    inputs = {name: _input(one, body, place) for name, one in given.items()}
    device = _device(inputs, named)
    outs, copied, aliases = _outs(body, inputs, named, place, device)
    return KernelCall(
        inputs=inputs,
        numbers=numbers,
        outs=outs,
        aliases=aliases,
        place=place,
        device=device,
        copied=tuple(copied),
    )


def _device(inputs: Mapping[str, Given], outs: Mapping[str, Out]) -> torch.device:
    for given in [*inputs.values(), *outs.values()]:
        for one in several(given):
            return one.device
    return torch.device("cpu")


def _block(
    body: KernelBody, given: Mapping[str, Given], outs: Mapping[str, Out]
) -> tuple[int, ...]:
    """Return the shape of the block: in each dimension the smallest length of any tensor."""
    out = list(body.full)
    values = {name: name for name in given} | dict(body.stores)
    for name, tensor in [*given.items(), *outs.items()]:
        dims = _dims(body, name, body.reach.get(values[name], ""))
        for one in several(tensor):
            if one.ndim != body.types[name].ndim:
                continue
            for dim, mine in dims:
                out[dim] = min(out[dim], one.shape[mine])
    return tuple(out)


def _dims(body: KernelBody, name: str, reach: str) -> list[tuple[int, int]]:
    """Return the dimensions of the block that a tensor has, with its own number of each."""
    last = len(body.full) - 1
    if body.types[name].shape == body.full:
        return [(dim, dim) for dim in range(last + 1)]
    if reach == "row":
        return [(dim, dim) for dim in range(last)]
    return [(last, -1)] if reach == "col" else []


def _input(given: Given, body: KernelBody, place: BlockPlace) -> Given:
    """Return an input contiguous, cut to the block if a rank has all of it."""
    parts = [_part(one, place) if body.reach else one for one in several(given)]
    made = [part.contiguous() for part in parts]
    return made[0] if isinstance(given, Tensor) else made


def _part(tensor: Tensor, place: BlockPlace) -> Tensor:
    for dim in range(-tensor.ndim, 0):
        if -dim <= len(place.block) and tensor.shape[dim] not in (1, place.block[dim]):
            tensor = tensor.narrow(dim, place.starts[dim], place.block[dim])
    return tensor


def _outs(
    body: KernelBody,
    inputs: Mapping[str, Given],
    wanted: Mapping[str, Out],
    place: BlockPlace,
    device: torch.device,
) -> tuple[dict[str, Given], list[tuple[str, Given]], dict[str, str]]:
    outs: dict[str, Given] = {}
    copied: list[tuple[str, Given]] = []
    aliases: dict[str, str] = {}
    taken = [
        (*_range(one), one.dtype, name) for name, given in inputs.items() for one in several(given)
    ]
    for name, value in body.stores:
        given = wanted[name]
        lies = _lies(given, taken)
        is_direct = all(one.is_contiguous() for one in several(given))
        if lies and body.reach.get(value) in ("col", "one"):
            is_direct = False  # Every part of the block reads the input, also the last one.
        if given is not None and is_direct and lies != "across":
            outs[name] = given
            if lies:
                aliases[name] = lies
            continue
        shape = _shape(body, name, value, place)
        if shape is None:
            continue
        made = torch.empty(shape, dtype=torch_dtype(body.types[name].dtype), device=device)
        outs[name] = [made] if name in body.copies else made
        if given is not None:
            copied.append((name, given))
            outs[name] = made
    return outs, copied, aliases


def _shape(body: KernelBody, name: str, value: str, place: BlockPlace) -> tuple[int, ...] | None:
    """Return the shape of a result; None if only torch knows it."""
    reach = body.reach.get(value)
    if reach is None:
        return None
    if reach == "full":
        return place.block
    if reach == "row":
        ndim = body.types[name].ndim
        return (*place.block[:-1], 1) if ndim == len(place.block) else place.block[:-1]
    if reach == "col":
        return (1,) * (body.types[name].ndim - 1) + place.block[-1:]
    return ()


def _lies(given: Out, taken: Sequence[tuple[int, int, torch.dtype, str]]) -> str:
    """Return the input with exactly an output's memory; "across" if they overlap otherwise."""
    found = ""
    for one in several(given):
        first, last = _range(one)
        for begin, end, dtype, name in taken:
            if begin >= last or end <= first:
                continue
            if (begin, end, dtype) != (first, last, one.dtype) or found:
                return "across"
            found = name
    return found


def _range(tensor: Tensor) -> tuple[int, int]:
    first: int = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.numel() * tensor.element_size()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()
