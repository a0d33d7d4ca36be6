"""The update of all slices at the end of a step, with or without norms that all must know first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.step.attached.flow import Flow, Parcel
from penstock.step.attached.optimizers import Group, trust_ratio
from penstock.step.attached.share import Share
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
    ) -> None:
        self.norm: torch.Tensor | None = None
        """Of all gradients of the last step, before clipping; only known where they are clipped."""
        self._flow = flow
        self._shares = shares
        self._word = word
        self._clip = clip
        self._has_norms = any(share.rule.has_norms for share in shares.values())

    def run(self, groups: Sequence[Group], steps: Mapping[int, int], skipped: set[int]) -> None:
        """Begin the update of one step, with the options of groups as they are now."""

        def update(parcel: Parcel) -> None:
            share = self._shares[parcel]
            share.update(parcel, groups[share.group], steps)

        if self._clip is not None:
            self._scale_down(self._clip, 2.0)
        elif self._has_norms:
            self._flow.wait_reduced(self._flow.parcels)
        if not self._has_norms:
            self._flow.go(update, skipped)
            return
        directions = {
            parcel: share.update(parcel, groups[share.group], steps)
            for parcel, share in self._shares.items()
        }
        ratios = self._ratios(directions, steps)

        def walk(parcel: Parcel) -> None:
            share = self._shares[parcel]
            if not any(param in steps for param in parcel.params):
                return
            weights, lr = share.weights_of(parcel), float(groups[share.group]["lr"])
            for param, start, stop in parcel.segments:
                if param in steps:
                    along = directions[parcel][start:stop]
                    self._walk(weights[start:stop], along, lr, ratios[param])
            share.put(parcel)

        self._flow.go(walk, skipped)

    def _walk(self, weights: torch.Tensor, along: torch.Tensor, lr: float, ratio: Any) -> None:
        weights.sub_(along, alpha=lr * ratio)

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
        self, directions: Mapping[Parcel, torch.Tensor], steps: Mapping[int, int]
    ) -> Mapping[int, Any]:
        """Return how long each parameter is beside its proposed step."""
        places = {param: place for place, param in enumerate(sorted(steps))}
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
