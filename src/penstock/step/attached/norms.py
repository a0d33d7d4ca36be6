"""Updates on a GPU: norms stay there, and no host waits to know them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from penstock.step.attached.flow import Parcel
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Options, Stepper
from penstock.step.attached.streams import StreamFlow
from penstock.step.attached.update import _CLIP_EPS, Updates
from penstock.step.comms.comm import Comm

__all__ = ["StreamUpdates"]


class StreamUpdates(Updates):
    """How parcels are updated on the stream of updates."""

    def __init__(
        self,
        flow: StreamFlow,
        shares: Mapping[Parcel, Share],
        lane: Comm,
        *,
        clip: float | None,
        num_params: int,
        joint: Stepper | None = None,
    ) -> None:
        """Sum up norms over a lane of the device: in its order, they follow all scatters."""
        super().__init__(flow, shares, lane, clip=clip, joint=joint)
        self._streams = flow
        self._num_params = num_params
        self._pieces = [
            (parcel, slice(each.start, each.stop)) for parcel in shares for each in parcel.segments
        ]
        owners = [each.param for parcel in shares for each in parcel.segments]
        self._owners = torch.tensor(owners, dtype=torch.int64).to(flow.parcels[0].whole.device)
        """Whose each piece is; made once, a copy to a device would have the host wait."""

    def run(self, options: Options, used: set[int]) -> None:
        """Ask for the update of one step, with options as they are now."""
        with self._streams.updating():
            super().run(options, used)

    def skip(self) -> None:
        """End a step without an update."""
        with self._streams.updating():
            super().skip()

    def scale(self, factor: torch.Tensor) -> None:
        """Ask for gradients that are multiplied by a number."""
        with self._streams.updating():
            super().scale(factor)

    def found_inf(self) -> torch.Tensor:
        """Ask whether any gradient of any rank is infinite or no number."""
        with self._streams.updating():
            found = super().found_inf()
        self._streams.follow(found)
        return found

    def clip_norm(self, most: float, order: float) -> None:
        """Ask for gradients that are clipped by their norm."""
        with self._streams.updating():
            super().clip_norm(most, order)

    def clip_value(self, most: float) -> None:
        """Ask for gradients whose elements are clipped."""
        with self._streams.updating():
            super().clip_value(most)

    def _scale_down(self, most: float, order: float) -> None:
        self._flow.wait_reduced(self._flow.parcels)
        self.norm = self._norm(order)
        # As torch does it: where it is not a number, neither are the gradients.
        scale = (most / (self.norm + _CLIP_EPS)).clamp(max=1.0)
        sums = [parcel.reduced for parcel in self._flow.parcels]
        for dtype in {each.dtype for each in sums}:
            torch._foreach_mul_([each for each in sums if each.dtype == dtype], scale.to(dtype))

    def _ratios(
        self, directions: Mapping[Parcel, torch.Tensor], used: Collection[int]
    ) -> Mapping[int, Any]:
        made = self._owners.new_zeros(2, self._num_params, dtype=torch.float64)
        weights = {parcel: share.weights_of(parcel) for parcel, share in self._shares.items()}
        for squares, of in zip(made, (weights, directions), strict=True):
            pieces = [of[parcel][span] for parcel, span in self._pieces]
            if pieces:
                norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64))
                squares.index_add_(0, self._owners, norms.square())
        self._word.all_reduce(made).wait()
        long, short = made.sqrt()
        is_both = (long > 0) & (short > 0)
        ratios = torch.where(is_both, long / short, 1.0)
        return {param: ratios[param] for param in used}

    def _walk(self, weights: torch.Tensor, along: torch.Tensor, lr: float, ratio: Any) -> None:
        weights.addcmul_(along, ratio.to(weights.dtype), value=-lr)
