"""Trials of a function: they show where samples lie in its results, and what it keeps.

Five samples go in at once, then one and four. A result with a row for each has the rows of both
runs; a sum over samples is the sum of both. Values are drawn from those of the examples, so that
they are of a kind that the function can take, in float64 where it can compute with it. What cannot
be told from them is refused, such as a sum of which all samples but one have 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import ProgramError
from penstock.step.captured.graphs import Graphs, Joint, Tensors, traced_backward
from penstock.step.dtypes import TORCH, name_of, torch_dtype
from penstock.step.program.calls import Slot

__all__ = ["CheckedFunction", "check_traced", "found_of"]

_SAMPLES, _FIRST = 5, 2
"""Samples that are tried; and how many of them to find what is kept, at least two: shapes with a 1
in them may be computed in other ways."""
_FIRST_OF_PARTS = (0, _SAMPLES - _FIRST)
"""First samples of the latter: two places, as a sample may know that it is the first."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUGH = 5e-2
"""Tolerance of narrower types. All are parts of the largest value."""
_ROWS_MAX = 64
"""Samples of whole numbers to draw from, at the most."""
_STIR = 0.1
"""How far weights are moved, in parts of their size: a 0 would hide what it is multiplied with."""

Function = Callable[..., Tensors]
Place = tuple[int, int]
"""The dimension of a kept value that has samples, and how many of its rows belong to each."""


@dataclass(frozen=True, kw_only=True)
class CheckedFunction:
    """The results, kept values and costs of a function, as trials have shown them."""

    results: tuple[Slot, ...]
    kept: tuple[Slot, ...] = ()
    """As a program has them: rows of a sample have a dimension of their own."""
    places: tuple[Place, ...] = ()
    num_keepable: int = 0
    skip: frozenset[int] | None = None
    """Numbers of values that could be kept and are not; None keeps nothing."""
    flops: tuple[float, float] = (0.0, 0.0)
    """Floating-point operations of a sample, forward and backward."""
    why_not: str = ""
    """Why there is no backward."""

    def kept_shapes(self, samples: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of kept values as graphs have them, for so many samples."""
        shapes = [slot.of(samples).shape for slot in self.kept]
        return tuple(
            shape if rows == 1 else (*shape[:dim], shape[dim] * rows, *shape[dim + 2 :])
            for shape, (dim, rows) in zip(shapes, self.places, strict=True)
        )

    def by_samples(self, kept: Sequence[torch.Tensor], samples: int, like: torch.Tensor) -> Tensors:
        """Return kept values as a program has them; where a graph keeps nothing, zeros."""
        if not kept:
            return tuple(
                torch.zeros(s.of(samples).shape, dtype=torch_dtype(s.dtype), device=like.device)
                for s in self.kept
            )
        return tuple(_rows(one, at, samples) for one, at in zip(kept, self.places, strict=True))

    def split(self, values: Sequence[torch.Tensor], num_kept: int) -> tuple[Tensors, Tensors]:
        """Return kept values as graphs have them, and gradients of results."""
        count = len(self.kept)
        kept = [
            one if rows == 1 else one.flatten(dim, dim + 1)
            for one, (dim, rows) in zip(values[:count], self.places, strict=True)
        ]
        return tuple(kept) if num_kept else (), tuple(values[count:])


def found_of(
    function: Function,
    operands: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    name: str,
    *,
    by: Sequence[int],
    keep: bool,
) -> CheckedFunction:
    """Return what a function is, or refuse it: `dims` are where its operands have samples."""
    trial = _CheckTrial(function, operands, dims, name, by)
    results = trial.results()
    if not by or not any(slot.has_gradient for slot in results):
        why_not = "none of its operands or none of its results has elements with fractions"
        return CheckedFunction(results=results, flops=(trial.forward_flops(), 0.0), why_not=why_not)
    try:
        joint = trial.joint(trial.own)
    except ProgramError as error:
        return CheckedFunction(
            results=results, flops=(trial.forward_flops(), 0.0), why_not=str(error)
        )
    kept = trial.kept(joint.cut()) if keep and joint.keepable else {}
    skip = frozenset(range(len(joint.keepable))) - frozenset(kept) if kept else None
    graphs = joint.cut(skip)
    return CheckedFunction(
        results=results,
        kept=tuple(slot for slot, _ in kept.values()),
        places=tuple(place for _, place in kept.values()),
        num_keepable=graphs.num_keepable,
        skip=skip,
        flops=trial.flops(graphs),
    )


def check_traced(
    graph: Function, function: Function, operands: Sequence[torch.Tensor], name: str
) -> None:
    """Refuse a function that is another one while it is traced, and so may choose by values."""
    with torch.no_grad():
        pairs = zip(graph(*operands), function(*operands), strict=True)
    for number, (one, other) in enumerate(pairs):
        if not _close(one, other, _TOLERANCE.get(other.dtype, _ROUGH)):
            raise ProgramError(
                f"capture of {name!r}: result {number} of its graph is not what it computes: it "
                "does something else where torch.compiler.is_compiling(), or chooses by values; "
                "capture the parts that do not"
            )


class _CheckTrial:
    """A function, and values to try it on."""

    def __init__(
        self,
        function: Function,
        operands: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        name: str,
        by: Sequence[int],
    ) -> None:
        self._function, self._dims, self._name, self._by = function, dims, name, by
        self._given = operands
        self._samples = _SAMPLES if any(dim is not None for dim in dims) else 1
        generator = torch.Generator().manual_seed(0)
        self.own = [
            self._drawn(one, dim, generator) if dim is not None else _stirred(one, generator)
            for one, dim in zip(operands, dims, strict=True)
        ]
        try:
            self._run(self.own)
        except Exception as error:
            self._refuse(
                f"it fails on values like the examples' ({type(error).__name__}: {error}); give "
                "examples of several samples, and of whole numbers that are not all the same"
            )
        self._wide = [one.double() if one.is_floating_point() else one for one in self.own]
        try:
            self._run(self._wide)
        except Exception:  # It computes with a type of its own, or says what is wrong next.
            self._wide = self.own
        floats = [one.dtype for one in self._wide if one.is_floating_point()]
        self._tolerance = max((_TOLERANCE.get(dtype, _ROUGH) for dtype in floats), default=0.0)

    def _drawn(self, example: torch.Tensor, dim: int, generator: torch.Generator) -> torch.Tensor:
        if example.is_floating_point():
            return _drawn_floats(example, dim, generator)
        drawn = _drawn_whole(example, dim, generator)
        if (drawn != drawn.narrow(dim, 0, 1)).any():
            return drawn
        known = example.reshape(-1)
        if (known != known[:1]).any():
            return known[_places(known.numel(), drawn.shape, generator).to(known.device)]
        if known.is_cuda and known.dtype != torch.bool:
            # A number that it cannot take, as an index, would end the use of the device.
            self._refuse(
                f"an example has {known[:1].tolist()} everywhere, so that mixed samples would look "
                "like others; give whole numbers that differ"
            )
        return _varied(drawn, generator)

    def _run(self, operands: Sequence[torch.Tensor]) -> Tensors:
        with torch.no_grad():
            return self._function(*operands)

    def _part(self, operands: Sequence[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
        return [
            one if dim is None else one.narrow(dim, first, last - first).contiguous()
            for one, dim in zip(operands, self._dims, strict=True)
        ]

    # -- results -------------------------------------------------------------------------------

    def results(self) -> tuple[Slot, ...]:
        """Return the results, each with the dimension that has samples."""
        types = [one.dtype for one in self._run(self.own)]
        whole, again = self._run(self._wide), self._run(self._wide)
        for number, (one, other) in enumerate(zip(whole, again, strict=True)):
            if not self._close(one, other):
                self._refuse(
                    f"result {number} is another one each time: it draws random numbers; call "
                    ".eval(), or use dropout of the program"
                )
            if one.numel() and not one.isfinite().any():
                self._refuse(f"result {number} has no finite number for values like the examples'")
        dims: list[int | None] = [None] * len(whole)
        if self._samples > 1:
            parts = [self._alone(0, 1), self._alone(1, _SAMPLES)]
            dims = [self._dim(k, one, *(p[k] for p in parts)) for k, one in enumerate(whole)]
            self._check_many(dims)
        return tuple(
            Slot(
                name=f"result {k}",
                shape=tuple(one.shape),
                dtype=name_of(dtype),
                dim=dim,
                has_gradient=dtype.is_floating_point,
            )
            for k, (one, dtype, dim) in enumerate(zip(whole, types, dims, strict=True))
        )

    def _alone(self, first: int, last: int) -> Tensors:
        try:
            return self._run(self._part(self._wide, first, last))
        except Exception as error:
            self._refuse(
                f"it takes {_SAMPLES} samples and not {last - first} ({type(error).__name__}: "
                f"{error}); it has to take any number of them, or say batch_dim=None"
            )

    def _check_many(self, dims: Sequence[int | None]) -> None:
        """Refuse what mixes samples where there are as many as in the examples."""
        count = next(
            one.shape[d] for one, d in zip(self._given, self._dims, strict=True) if d is not None
        )
        if count <= _SAMPLES:
            return
        cuts = ((0, count), (0, count // 2), (count // 2, count))
        runs = [self._run(self._part(self._given, *cut)) for cut in cuts]
        types = [one.dtype for one in self._given if one.is_floating_point()]
        tolerance = max((_TOLERANCE.get(dtype, _ROUGH) for dtype in types), default=0.0)
        for number, (dim, whole, a, b) in enumerate(zip(dims, *runs, strict=True)):
            if not _close(a + b if dim is None else torch.cat([a, b], dim), whole, tolerance):
                self._refuse(
                    f"result {number} of {count} samples is not that of {count // 2} and of the "
                    "others: it mixes them; say batch_dim=None"
                )

    def _dim(
        self, number: int, whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> int | None:
        """Return the dimension of a result that has samples; None for a sum over them."""
        if a.shape == whole.shape:
            self._check_sum(number, whole, a, b)
            return None
        found = [d for d, n in enumerate(whole.shape) if a.ndim == whole.ndim and n != a.shape[d]]
        dim = found[0] if len(found) == 1 else None
        if dim is None or whole.shape[dim] != _SAMPLES:
            self._refuse(
                f"result {number} has shape {tuple(whole.shape)} for {_SAMPLES} samples and "
                f"{tuple(a.shape)} for one; samples need a dimension of their own"
            )
        if not self._close(torch.cat([a, b], dim), whole):
            self._refuse(
                f"rows of result {number} change with the other samples: it mixes them, as batch "
                "norm in training does; call .eval(), or say batch_dim=None"
            )
        return dim

    def _check_sum(
        self, number: int, whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        if whole.dtype == torch.bool:
            self._refuse(f"result {number} is true or false of all samples; return it for each")
        if self._close(a + b, whole):
            self._check_addends(number, whole)
            return
        if self._close(a, whole) and self._close(b, whole):
            why = "does not depend on samples; capture what makes it apart"
        elif self._close((a + (_SAMPLES - 1) * b) / _SAMPLES, whole):
            why = "is a mean over samples; return one number for each, and take the program's mean"
        else:
            why = "mixes samples; return a row for each of them, or say batch_dim=None"
        self._refuse(f"result {number} {why}")

    def _check_addends(self, number: int, whole: torch.Tensor) -> None:
        """Refuse what is no sum of all samples, or looks like one as long as the others have 0."""
        each = torch.stack([self._alone(k, k + 1)[number] for k in range(_SAMPLES)])
        if not self._close(each.sum(0), whole):
            self._refuse(f"result {number} mixes samples; return a row for each of them")
        if whole.numel() and not ((each != 0).sum(0) > 1).any():
            self._refuse(
                f"result {number} is 0 for values like the examples', but for one sample at most; "
                "nobody can tell whether it is a sum: give examples of which more add to it"
            )

    def _close(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return _close(one, other, self._tolerance)

    def _refuse(self, why: str) -> NoReturn:
        raise ProgramError(f"capture of {self._name!r}: {why}")

    # -- backward ------------------------------------------------------------------------------

    def joint(self, operands: Sequence[torch.Tensor]) -> Joint:
        """Return the graph, forward and backward, for some operands."""
        samples = [k for k, dim in enumerate(self._dims) if dim is not None]
        return traced_backward(self._function, operands, self._name, by=self._by, samples=samples)

    def kept(self, graphs: Graphs) -> dict[int, tuple[Slot, Place]]:
        """Return what can be kept: what has rows by samples that do not change with others."""
        count = graphs.num_kept
        alone = self.joint(self._part(self.own, 0, _FIRST)).cut()
        if alone.num_kept != count:
            return {}
        whole = graphs.keeping(*self.own)[-count:]
        parts = [
            alone.keeping(*self._part(self.own, at, at + _FIRST))[-count:] for at in _FIRST_OF_PARTS
        ]
        out = {}
        for k, one in enumerate(whole):
            place = self._place(one, [part[k] for part in parts])
            if place is not None and one.dtype in TORCH.values():
                shape = tuple(_rows(one, place, _SAMPLES).shape)
                slot = Slot(name=f"kept {k}", shape=shape, dtype=name_of(one.dtype), dim=place[0])
                out[k] = slot, place
        return out

    def _place(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Place | None:
        """Return where samples lie in a kept value; None where it tells of their places."""
        part = parts[0]
        found = [d for d, n in enumerate(whole.shape) if n != part.shape[d]]
        if len(found) != 1 or whole.shape[found[0]] % _SAMPLES:
            return None
        dim, rows = found[0], whole.shape[found[0]] // _SAMPLES
        if part.shape[dim] != _FIRST * rows:
            return None
        tolerance = _TOLERANCE.get(whole.dtype, _ROUGH) / 10
        wholes = [whole.narrow(dim, at * rows, _FIRST * rows) for at in _FIRST_OF_PARTS]
        pairs = zip(wholes, parts, strict=True)
        return (dim, rows) if all(_close(*pair, tolerance) for pair in pairs) else None

    # -- cost ----------------------------------------------------------------------------------

    def forward_flops(self) -> float:
        """Return the operations of a sample."""
        with FlopCounterMode(display=False) as counter:
            self._run(self.own)
        return float(counter.get_total_flops()) / self._samples

    def flops(self, graphs: Graphs) -> tuple[float, float]:
        """Return the operations of a sample, forward and backward; none is counted twice."""
        forward = self.forward_flops()
        made = graphs.keeping(*self.own)
        num_results = len(made) - graphs.num_kept
        dys = [torch.zeros_like(one) for one in made[:num_results] if one.is_floating_point()]
        with FlopCounterMode(display=False) as counter:
            graphs.backward(*self.own, *made[num_results:], *dys)
        again = 0.0 if graphs.num_kept else forward
        return forward, max(0.0, counter.get_total_flops() / self._samples - again)


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors are the same, but for what rounding does to the largest value.

    Whole numbers are the same or not: an index that is off by one is another.
    """
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    a, b = one.double(), other.double()
    is_number = b.isfinite()
    if not torch.equal(a.isfinite(), is_number):
        return False
    a, b = a[is_number], b[is_number]
    return not a.numel() or bool((a - b).abs().max() <= tolerance * (1.0 + b.abs().max()))


def _rows(one: torch.Tensor, place: Place, samples: int) -> torch.Tensor:
    dim, rows = place
    shape = (*one.shape[:dim], samples, rows, *one.shape[dim + 1 :])
    return one if rows == 1 else one.reshape(shape)


def _drawn_floats(example: torch.Tensor, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return samples of values that an example has, or of any if it has only one."""
    shape = _shape_of(example, dim)
    known = example.detach().reshape(-1)
    if (known == known[:1]).all():
        return torch.randn(shape, generator=generator).to(known)
    return known[_places(known.numel(), shape, generator).to(known.device)]


def _drawn_whole(example: torch.Tensor, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return samples of whole numbers; each place in them has what it has in some example."""
    rows = example.movedim(dim, 0)
    rows = rows[torch.randperm(len(rows), generator=generator)[:_ROWS_MAX].to(rows.device)]
    count = max(_SAMPLES, len(rows))
    order = torch.rand((count, *rows.shape[1:]), generator=generator).argsort(0)[:_SAMPLES]
    return rows.gather(0, (order % len(rows)).to(rows.device)).movedim(0, dim).contiguous()


def _varied(drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return whole numbers that are all the same, some of them one more."""
    noise = torch.randint(2, drawn.shape, generator=generator).to(drawn)
    if drawn.dtype == torch.bool:
        return noise
    return drawn + noise if drawn.max() < torch.iinfo(drawn.dtype).max else drawn - noise


def _shape_of(example: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*example.shape[:dim], _SAMPLES, *example.shape[dim + 1 :])


def _places(count: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(max(1, count), tuple(shape), generator=generator)


def _stirred(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return weights a little off, so that none is 0 or like another."""
    if not value.is_floating_point():
        return value.detach()
    noise = torch.randn(value.shape, generator=generator).to(value) * _STIR
    return value.detach() * (1.0 + noise) + torch.where(value == 0, noise, 0.0)
