"""The update of all slices at the end of a step, with or without norms that all must know first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from penstock.step.attached.flow import BucketFlow, FlowBucket
from penstock.step.attached.optimizers import trust_ratio
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Options, SliceRun, Stepper
from penstock.step.comms.comm import Comm

__all__ = ["Updates"]

_CLIP_EPS = 1e-6
"""torch's own, in clip_grad_norm_."""


class Updates:
    """How buckets are updated. Without norms each goes as soon as it is reduced."""

    def __init__(
        self,
        flow: BucketFlow,
        shares: Mapping[FlowBucket, Share],
        control: Comm,
        *,
        clip: float | None,
        joint: Stepper | None = None,
    ) -> None:
        """Update these shares; a joint stepper makes one step of all at once."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients of the last step before clipping; None where nothing clips."""
        self._flow = flow
        self._shares = shares
        self._control = control
        self._clip = clip
        self._joint = joint
        self._all = list(dict.fromkeys(shares.values()))
        self._has_norms = any(share.rule.has_norms for share in shares.values())

    def run(self, options: Options, used: set[int]) -> None:
        """Begin the update of one step, with options as they are now."""
        with self._flow.updating():
            for share in self._all:
                share.follow(used)
                if self._joint is None:
                    share.update(None, options)
            skipped = set().union(*(share.params for share in self._all)) - used
            if self._clip is not None:
                self._scale_down(self._clip, 2.0)
            elif self._has_norms or self._joint is not None:
                self._flow.wait_reduced(self._flow.buckets)
            self._flow.go(self._update_of(options, used), skipped)

    def _update_of(self, options: Options, used: set[int]) -> Callable[[FlowBucket], None]:
        """Return what updates a bucket; where all sums are needed first, they are there."""
        if self._joint is not None:
            self._step_at_once(self._joint, options)
            return lambda _: None
        if self._has_norms:
            return self._with_norms(options, used)

        def update(bucket: FlowBucket) -> None:
            self._shares[bucket].update(bucket, options)

        return update

    def _step_at_once(self, stepper: Stepper, options: Options) -> None:
        """Make one step of all slices, for an optimizer that counts its steps by itself."""
        every: list[tuple[FlowBucket | None, Share]] = [*self._shares.items()]
        every += [(None, share) for share in self._all]
        ready = [(bucket, share, share.ready(bucket)[0]) for bucket, share in every]
        by_group: dict[int, list[SliceRun]] = {}
        for _, share, runs in ready:
            by_group.setdefault(share.group, []).extend(runs)
        stepper.step(options, by_group)
        for bucket, share, runs in ready:
            share.put_all(bucket, runs)

    def _with_norms(self, options: Options, used: set[int]) -> Callable[[FlowBucket], None]:
        """Find the directions of all slices, and return what goes along them."""
        directions = {
            bucket: share.update(bucket, options) for bucket, share in self._shares.items()
        }
        ratios = self._ratios(directions, used)

        def walk(bucket: FlowBucket) -> None:
            share = self._shares[bucket]
            if used.isdisjoint(bucket.params):
                return
            weights, lr = share.weights_of(bucket), float(options.groups[share.group]["lr"])
            for param, start, stop in bucket.segments:
                if param in used:
                    along = directions[bucket][start:stop]
                    self._walk(weights[start:stop], along, lr, ratios[param])
            share.put(bucket)

        return walk

    def _walk(self, weights: torch.Tensor, along: torch.Tensor, lr: float, ratio: Any) -> None:
        weights.sub_(along, alpha=lr * ratio)

    def skip(self) -> None:
        """End a step without an update."""
        with self._flow.updating():
            self._flow.go(lambda _: None, set().union(*(share.params for share in self._all)))

    # -- gradients that users read ---------------------------------------------------------------

    def show_means(self) -> None:
        """Put the means of all ranks where users find gradients."""
        with self._flow.updating(self._flow.buckets[0].grads):
            self._flow.gather_means()

    def take_means(self) -> None:
        """Go on with what users have made of the means."""
        with self._flow.updating(self._flow.buckets[0].reduced):
            self._flow.take_means()

    # -- scaling -----------------------------------------------------------------------------

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a number."""
        with self._flow.updating():
            self._flow.wait_reduced(self._flow.buckets)
            for bucket in self._flow.buckets:
                bucket.reduced.mul_(factor.to(bucket.reduced.device))

    def found_inf(self) -> torch.Tensor:
        """Return 1 if any gradient of any rank is infinite or no number, and 0 otherwise."""
        found = self._flow.buckets[0].reduced.new_zeros(1, dtype=torch.float32)
        with self._flow.updating(found):
            for bucket in self._flow.buckets:
                found += (~bucket.reduced.isfinite()).any()
            found.clamp_(max=1.0)
            self._control.all_reduce(found, op="max").wait()
        return found.view(())

    # -- clipping ----------------------------------------------------------------------------

    def clip_norm(self, most: float, order: float) -> None:
        """Scale all gradients so that their norm is at most so much."""
        with self._flow.updating():
            self._scale_down(most, order)

    def clip_value(self, most: float) -> None:
        """Clip every element of the gradients to this size."""
        with self._flow.updating():
            self._flow.wait_reduced(self._flow.buckets)
            for bucket in self._flow.buckets:
                bucket.reduced.clamp_(-most, most)

    def _scale_down(self, most: float, order: float) -> None:
        self._flow.wait_reduced(self._flow.buckets)
        self.norm = self._norm(order)
        scale = min(1.0, most / (float(self.norm) + _CLIP_EPS))
        if scale != 1.0:  # also where it is not a number: torch lets that through as well
            for bucket in self._flow.buckets:
                bucket.reduced.mul_(scale)

    def _norm(self, order: float) -> torch.Tensor:
        sums = [bucket.reduced for bucket in self._flow.buckets]
        norms = torch.stack(torch._foreach_norm(sums, order, dtype=torch.float64))
        if order == math.inf:
            total = norms.max()
            self._control.all_reduce(total, op="max").wait()
            return total
        total = norms.pow(order).sum()
        self._control.all_reduce(total).wait()
        return total.pow(1 / order)

    def _ratios(
        self, directions: Mapping[FlowBucket, torch.Tensor], used: Collection[int]
    ) -> Mapping[int, Any]:
        """Return how long each parameter is beside its proposed step."""
        places = {param: place for place, param in enumerate(sorted(used))}
        squares = torch.zeros(len(places), 2, dtype=torch.float64)
        for bucket, direction in directions.items():
            weights = self._shares[bucket].weights_of(bucket)
            for param, start, stop in bucket.segments:
                if param in places:
                    for side, tensor in enumerate((weights, direction)):
                        norm = torch.linalg.vector_norm(tensor[start:stop], dtype=torch.float64)
                        squares[places[param], side] += norm**2
        if places:
            self._control.all_reduce(squares).wait()
        norms = squares.sqrt().tolist()
        return {param: trust_ratio(*norms[place]) for param, place in places.items()}
