"""Updates on a GPU: norms stay there, and no host waits to know them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from penstock.step.attached.flow import FlowBucket
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Stepper
from penstock.step.attached.streams import StreamFlow
from penstock.step.attached.update import _CLIP_EPS, Updates
from penstock.step.comms.comm import Comm

__all__ = ["StreamUpdates"]


class StreamUpdates(Updates):
    """How buckets are updated on the stream of updates."""

    def __init__(
        self,
        flow: StreamFlow,
        shares: Mapping[FlowBucket, Share],
        lane: Comm,
        *,
        clip: float | None,
        num_params: int,
        joint: Stepper | None = None,
    ) -> None:
        """Sum up norms over a lane of the device: in its order, they follow all scatters."""
        super().__init__(flow, shares, lane, clip=clip, joint=joint)
        self._num_params = num_params
        self._pieces = [
            (bucket, slice(each.start, each.stop)) for bucket in shares for each in bucket.segments
        ]
        owners = [each.param for bucket in shares for each in bucket.segments]
        self._owners = torch.tensor(owners, dtype=torch.int64).to(flow.buckets[0].whole.device)
        """The parameter of each piece. Made once: a copy to a device would make the host wait."""

    def _scale_down(self, most: float, order: float) -> None:
        self._flow.wait_reduced(self._flow.buckets)
        self.norm = self._norm(order)
        # As torch does it: where it is not a number, neither are the gradients.
        scale = (most / (self.norm + _CLIP_EPS)).clamp(max=1.0)
        sums = [bucket.reduced for bucket in self._flow.buckets]
        for dtype in {each.dtype for each in sums}:
            torch._foreach_mul_([each for each in sums if each.dtype == dtype], scale.to(dtype))

    def _ratios(
        self, directions: Mapping[FlowBucket, torch.Tensor], used: Collection[int]
    ) -> Mapping[int, Any]:
        made = self._owners.new_zeros(2, self._num_params, dtype=torch.float64)
        weights = {bucket: share.weights_of(bucket) for bucket, share in self._shares.items()}
        for squares, of in zip(made, (weights, directions), strict=True):
            pieces = [of[bucket][span] for bucket, span in self._pieces]
            if pieces:
                norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64))
                squares.index_add_(0, self._owners, norms.square())
        self._control.all_reduce(made).wait()
        long, short = made.sqrt()
        is_both = (long > 0) & (short > 0)
        ratios = torch.where(is_both, long / short, 1.0)
        return {param: ratios[param] for param in used}

    def _walk(self, weights: torch.Tensor, along: torch.Tensor, lr: float, ratio: Any) -> None:
        weights.addcmul_(along, ratio.to(weights.dtype), value=-lr)
