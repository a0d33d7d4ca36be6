"""Blocks: parameters whose memory comes and goes together.

A block is an arena of its own, a few modules that are used one after the other. What a rank keeps
of it all the time is its slices. Whole weights are there from a gather to a release, gradients from
backward until they are scattered. Memory is given back in place, by the size of its storage, so
that views of it, of autograd too, see what the next gather brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.step.attached.arenas import ArenaLayout, laid_out
from penstock.step.attached.flow import FlowBucket
from penstock.step.attached.released_params import Absence
from penstock.step.attached.share import Share
from penstock.step.comms.comm import Comm, Handle

__all__ = ["ParameterBlock", "KeptShare", "WeightSnapshot", "cut_in_blocks"]


class KeptShare(Share):
    """A share whose weights are kept in slices only."""

    def keep(self) -> None:
        """Keep my slices of the arena as they are."""
        self.masters = self.slices(self.arena.data)

    def put(self, bucket: FlowBucket) -> None:
        """Leave the arena alone: it may have no memory, and a gather puts them there."""

    def adopt(self, bucket: FlowBucket) -> None:
        """Take nothing over: `whole` does."""


class WeightSnapshot(NamedTuple):
    """Weights at some time, to compare with later."""

    versions: list[int]
    """Version of each parameter: torch counts its changes in place."""
    slices: list[torch.Tensor]
    """Copies of this rank's, by bucket."""


class ParameterBlock:
    """Whole weights and gradients of some parameters, there or not."""

    def __init__(
        self,
        share: Share,
        buckets: Sequence[FlowBucket],
        params: Sequence[torch.Tensor],
        fetch: Callable[[ParameterBlock], None],
    ) -> None:
        self.share = share
        self.buckets = list(buckets)
        self.numbers = frozenset(share.params)
        self.number = self.place_back = 0
        """Its position in forward, and in backward."""
        self.is_kept = False
        """Whether it stays from forward to backward, which uses it among the first."""
        self.calls = self.calls_left = 0
        """How often modules with weights in it are called in a forward."""
        self.graded: set[int] = set(share.params)
        """Parameters that backward has gradients for."""
        self.ungraded: set[int] = set()
        """Parameters whose gradients are to come in this backward."""
        self.is_here = self.is_again = self.is_unwanted = False
        self.was_needed_back = False
        """Whether any backward of this rank has read its weights."""
        self._params = list(params)
        self._absence = Absence(params, lambda: fetch(self))
        arena = share.arena
        self.data, self.grads = arena.data.untyped_storage(), arena.grads.untyped_storage()
        self._data_bytes, self._grads_bytes = self.data.nbytes(), self.grads.nbytes()
        self._paddings = _paddings(arena.layout)

    # -- weights -----------------------------------------------------------------------------

    def gather(self, comm: Comm, wire: str | None) -> None:
        """Begin to put all ranks' slices together; for others only, where they are here."""
        masters = self.share.masters
        assert masters is not None
        self.is_unwanted = False
        if self.is_here:
            for bucket in self.buckets:  # someone may use them, or change them
                mine = masters[bucket.share].to(bucket.mine.dtype, copy=True)
                whole = torch.empty_like(bucket.whole)
                self._gathered_aside(comm.all_gather(whole, mine, wire=wire), whole, mine)
            return
        self._take_memory()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.mine.copy_(masters[bucket.share])
                bucket.gathered = comm.all_gather(bucket.whole, bucket.mine, wire=wire)
        self.is_here = True

    def _take_memory(self) -> None:
        if self.data.nbytes() != self._data_bytes:
            self.data.resize_(self._data_bytes)

    def _give_memory_back(self) -> None:
        self.data.resize_(0)

    def _gathered_aside(self, handle: Handle, *tensors: torch.Tensor) -> None:
        """Note a gather for other ranks; the lane holds the tensors until it is done."""

    def arrive(self) -> None:
        """Return when the weights are there."""
        for bucket in self.buckets:
            if bucket.gathered is not None:
                bucket.gathered.wait()
                bucket.gathered = None
        self._come_back()

    def _come_back(self) -> None:
        self._absence.end()

    @property
    def is_under_way(self) -> bool:
        """Whether a gather is not over yet."""
        handles = [bucket.gathered for bucket in self.buckets]
        return any(handle is not None and not handle.is_done() for handle in handles)

    def release(self) -> None:
        """Give the memory of weights back."""
        for bucket in self.buckets:
            if bucket.gathered is not None:
                bucket.gathered.wait()
                bucket.gathered = None
        self._absence.begin()
        self._give_memory_back()
        self.is_here = self.is_again = self.is_unwanted = False

    def snapshot(self) -> WeightSnapshot:
        """Return what there is to know of weights, to find out what was changed."""
        slices = [bucket.mine.clone() for bucket in self.buckets]
        return WeightSnapshot([param._version for param in self._params], slices)

    def take_changed(self, seen: WeightSnapshot) -> None:
        """Take weights over that were changed since: those written to, and those that differ."""
        assert self.share.masters is not None
        self.share.arena.bring_home(self._params)
        numbers = zip(self.share.params, self._params, seen.versions, strict=True)
        written = {number for number, param, before in numbers if before != param._version}
        for bucket, before in zip(self.buckets, seen.slices, strict=True):
            exact, mine = self.share.masters[bucket.share], bucket.mine
            # By .data, which nobody counts; a GPU is not asked.
            if mine.device.type != "cpu" or not torch.equal(mine, before):
                exact.copy_(torch.where(mine != before, mine.to(exact.dtype), exact))
            for number, start, stop in bucket.segments:
                if number in written:
                    exact[start:stop].copy_(mine[start:stop])

    # -- gradients ---------------------------------------------------------------------------

    def make_room(self) -> None:
        """Take memory for gradients; zeros where some were sent, which must not be added twice."""
        if self.has_room:
            return
        self._take_room()
        flat = self.share.arena.grads
        if any(bucket.is_issued for bucket in self.buckets):
            flat.zero_()
            return
        for start, stop in self._paddings:
            flat[start:stop].zero_()

    def _take_room(self) -> None:
        self.grads.resize_(self._grads_bytes)

    @property
    def has_room(self) -> bool:
        """Whether gradients have memory."""
        return self.grads.nbytes() == self._grads_bytes

    def give_room_back(self) -> None:
        """Give the memory of gradients back."""
        self.grads.resize_(0)


def _paddings(layout: ArenaLayout) -> list[tuple[int, int]]:
    """Return what of an arena belongs to no parameter."""
    found, at = [], 0
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        if at < start:
            found.append((at, start))
        at = start + length
    if at < layout.length:
        found.append((at, layout.length))
    return found


def cut_in_blocks(
    layouts: Sequence[tuple[int, list[torch.Tensor], ArenaLayout]],
    model: nn.Module,
    *,
    unit_bytes: int,
) -> list[tuple[int, list[torch.Tensor], ArenaLayout]]:
    """Cut layouts into blocks of whole modules that have at least `unit_bytes`."""
    owners = _owners(model)
    made = []
    for group, params, layout in layouts:
        runs: list[list[torch.Tensor]] = []
        size_bytes = 0
        for param in params:
            is_other = not runs or owners.get(param) is not owners.get(runs[-1][-1])
            if not runs or (is_other and size_bytes >= unit_bytes):
                runs.append([])
                size_bytes = 0
            runs[-1].append(param)
            size_bytes += param.numel() * param.itemsize
        for run in runs:
            lengths = [param.numel() for param in run]
            unit_length = max(1, unit_bytes // run[0].itemsize)
            cut = laid_out(lengths, num_parts=layout.num_parts, unit_length=unit_length)
            made.append((group, run, cut))
    return made


def _owners(model: nn.Module) -> Mapping[torch.Tensor, nn.Module]:
    found: dict[torch.Tensor, nn.Module] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            found.setdefault(param, module)
    return found
