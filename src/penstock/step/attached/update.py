"""The update of all slices at the end of a step, with or without norms that all must know first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from penstock.step.attached.flow import Flow, Parcel
from penstock.step.attached.optimizers import trust_ratio
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Options, SliceRun, Stepper
from penstock.step.comms.comm import Comm

__all__ = ["Updates"]

_CLIP_EPS = 1e-6
"""torch's own, in clip_grad_norm_."""


class Updates:
    """How parcels are updated. Without norms each goes as soon as it is reduced."""

    def __init__(
        self,
        flow: Flow,
        shares: Mapping[Parcel, Share],
        word: Comm,
        *,
        clip: float | None,
        joint: Stepper | None = None,
    ) -> None:
        """Update these shares; a joint stepper makes one step of all at once."""
        self.norm: torch.Tensor | None = None
        """Of all gradients of the last step, before clipping; only known where they are clipped."""
        self._flow = flow
        self._shares = shares
        self._word = word
        self._clip = clip
        self._joint = joint
        self._all = list(dict.fromkeys(shares.values()))
        self._has_norms = any(share.rule.has_norms for share in shares.values())

    def run(self, options: Options, used: set[int]) -> None:
        """Begin the update of one step, with options as they are now."""
        for share in self._all:
            share.follow(used)
            if self._joint is None:
                share.update(None, options)
        skipped = set().union(*(share.params for share in self._all)) - used
        if self._clip is not None:
            self._scale_down(self._clip, 2.0)
        elif self._has_norms or self._joint is not None:
            self._flow.wait_reduced(self._flow.parcels)
        if self._joint is not None:
            self._step_at_once(self._joint, options)
            self._flow.go(lambda _: None, skipped)
        elif self._has_norms:
            self._flow.go(self._with_norms(options, used), skipped)
        else:
            self._flow.go(lambda parcel: self._update(parcel, options), skipped)

    def _update(self, parcel: Parcel, options: Options) -> None:
        self._shares[parcel].update(parcel, options)

    def _step_at_once(self, stepper: Stepper, options: Options) -> None:
        """Make one step of all slices, for an optimizer that counts its steps by itself."""
        every: list[tuple[Parcel | None, Share]] = [*self._shares.items()]
        every += [(None, share) for share in self._all]
        ready = [(parcel, share, share.ready(parcel)[0]) for parcel, share in every]
        by_group: dict[int, list[SliceRun]] = {}
        for _, share, runs in ready:
            by_group.setdefault(share.group, []).extend(runs)
        stepper.step(options, by_group)
        for parcel, share, runs in ready:
            share.put_all(parcel, runs)

    def _with_norms(self, options: Options, used: set[int]) -> Callable[[Parcel], None]:
        """Find the directions of all slices, and return what goes along them."""
        directions = {
            parcel: share.update(parcel, options) for parcel, share in self._shares.items()
        }
        ratios = self._ratios(directions, used)

        def walk(parcel: Parcel) -> None:
            share = self._shares[parcel]
            if used.isdisjoint(parcel.params):
                return
            weights, lr = share.weights_of(parcel), float(options.groups[share.group]["lr"])
            for param, start, stop in parcel.segments:
                if param in used:
                    along = directions[parcel][start:stop]
                    self._walk(weights[start:stop], along, lr, ratios[param])
            share.put(parcel)

        return walk

    def _walk(self, weights: torch.Tensor, along: torch.Tensor, lr: float, ratio: Any) -> None:
        weights.sub_(along, alpha=lr * ratio)

    def skip(self) -> None:
        """End a step without an update."""
        self._flow.go(lambda _: None, set().union(*(share.params for share in self._all)))

    # -- scaling -----------------------------------------------------------------------------

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a number."""
        self._flow.wait_reduced(self._flow.parcels)
        for parcel in self._flow.parcels:
            parcel.reduced.mul_(factor.to(parcel.reduced.device))

    def found_inf(self) -> torch.Tensor:
        """Return 1 if any gradient of any rank is infinite or no number, and 0 otherwise."""
        found = self._flow.parcels[0].reduced.new_zeros(1, dtype=torch.float32)
        for parcel in self._flow.parcels:
            found += (~parcel.reduced.isfinite()).any()
        found.clamp_(max=1.0)
        self._word.all_reduce(found, op="max").wait()
        return found.view(())

    # -- clipping ----------------------------------------------------------------------------

    def clip_norm(self, most: float, order: float) -> None:
        """Scale all gradients so that their norm is at most so much."""
        self._scale_down(most, order)

    def clip_value(self, most: float) -> None:
        """Have no element of a gradient be larger than so much, whatever its sign."""
        self._flow.wait_reduced(self._flow.parcels)
        for parcel in self._flow.parcels:
            parcel.reduced.clamp_(-most, most)

    def _scale_down(self, most: float, order: float) -> None:
        self._flow.wait_reduced(self._flow.parcels)
        self.norm = self._norm(order)
        scale = min(1.0, most / (float(self.norm) + _CLIP_EPS))
        if scale != 1.0:  # also where it is not a number: torch lets that through as well
            for parcel in self._flow.parcels:
                parcel.reduced.mul_(scale)

    def _norm(self, order: float) -> torch.Tensor:
        sums = [parcel.reduced for parcel in self._flow.parcels]
        norms = torch.stack(torch._foreach_norm(sums, order, dtype=torch.float64))
        if order == math.inf:
            total = norms.max()
            self._word.all_reduce(total, op="max").wait()
            return total
        total = norms.pow(order).sum()
        self._word.all_reduce(total).wait()
        return total.pow(1 / order)

    def _ratios(
        self, directions: Mapping[Parcel, torch.Tensor], used: Collection[int]
    ) -> Mapping[int, Any]:
        """Return how long each parameter is beside its proposed step."""
        places = {param: place for place, param in enumerate(sorted(used))}
        squares = torch.zeros(len(places), 2, dtype=torch.float64)
        for parcel, direction in directions.items():
            weights = self._shares[parcel].weights_of(parcel)
            for param, start, stop in parcel.segments:
                if param in places:
                    for side, tensor in enumerate((weights, direction)):
                        norm = torch.linalg.vector_norm(tensor[start:stop], dtype=torch.float64)
                        squares[places[param], side] += norm**2
        if places:
            self._word.all_reduce(squares).wait()
        norms = squares.sqrt().tolist()
        return {param: trust_ratio(*norms[place]) for param, place in places.items()}
