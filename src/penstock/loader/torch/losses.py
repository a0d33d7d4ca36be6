"""Losses on their way from a GPU, and between the ranks of a process group.

Nothing here waits while the training loop goes on: copies and collectives are begun, and looked at
some steps later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import distributed

from penstock.dataset.part import Ints
from penstock.loader.losses import StepMark, check_marks
from penstock.loader.torch.world import group_of
from penstock.order.importance import StepLosses
from penstock.world import World

_HEAD = 5
"""Numbers of 32 bits in front of a rank's losses: how many losses there are, epoch, step, and two
for the digest."""


class DeviceLosses:
    """Losses that are copied from a GPU."""

    def __init__(self, ids: Ints, losses: torch.Tensor) -> None:
        self._ids = ids
        self._copy = HostCopy(losses.detach().float())

    def is_here(self) -> bool:
        """Return whether the copy is done."""
        return self._copy.is_here()

    def result(self) -> StepLosses:
        """Return the losses; waits for the copy."""
        return StepLosses(self._ids, self._copy.array().copy())


class HostCopy:
    """A tensor that is being copied to page-locked memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(tensor.device))

    def is_here(self) -> bool:
        """Return whether the copy is done."""
        return bool(self._done.query())

    def array(self) -> Any:
        """Return the values; waits for the copy."""
        self._done.synchronize()
        return self._host.numpy()


class GroupExchange:
    """Brings losses together with the collectives of a process group.

    Every rank begins one exchange a step, at the same place of the program.
    """

    def __init__(self, world: World, share_max: int) -> None:
        """`share_max` is the largest number of samples that a rank has in a step."""
        self._group = group_of(world)
        self._num_ranks = world.num_ranks
        self._share_max = share_max
        on_gpu = distributed.get_backend(self._group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        self._stream: Any = None
        """This stream waits for other ranks, so that the training loop's own stream does not."""
        if on_gpu:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, ids: Ints, losses: Any, mark: StepMark) -> GatheredLosses:
        """Send this rank's losses on their way."""
        share, count = self._share_max, len(ids)
        mine = np.zeros(_HEAD + 3 * share, np.int32)
        mine[:3] = count, mark.epoch, mark.step
        mine[3:_HEAD] = np.array([mark.digest], np.uint64).view(np.int32)
        mine[_HEAD : _HEAD + 2 * count] = np.ascontiguousarray(ids, np.int64).view(np.int32)
        at = slice(_HEAD + 2 * share, _HEAD + 2 * share + count)
        values = torch.as_tensor(losses).detach().to(self._device, torch.float32)
        sent = self._sent(torch.from_numpy(mine))
        sent[at] = values.view(torch.int32)
        parts = torch.empty(self._num_ranks, len(mine), dtype=torch.int32, device=self._device)
        work = distributed.all_gather(list(parts), sent, group=self._group, async_op=True)
        return GatheredLosses(work, parts, share, self._stream)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of the collective."""
        if self._device == "cpu":
            return tensor
        # Page-locked, because any other copy waits for all the work that the GPU has queued.
        return tensor.pin_memory().to(self._device, non_blocking=True)


class GatheredLosses:
    """Losses of all ranks that are being gathered."""

    def __init__(self, work: Any, parts: torch.Tensor, share: int, stream: Any) -> None:
        self._work = work
        self._parts = parts
        self._share = share
        self._copy: HostCopy | None = None
        """Of parts that lie on a GPU."""
        if stream is not None:
            with torch.cuda.stream(stream):
                work.wait()  # Of the GPU's streams, only this one waits.
                self._copy = HostCopy(parts)
            parts.record_stream(stream)

    def is_here(self) -> bool:
        """Return whether everything has come."""
        if self._copy is None:
            return bool(self._work.is_completed())
        return self._copy.is_here()

    def result(self) -> StepLosses:
        """Return the losses of the whole global batch; raises if ranks have different scores."""
        if self._copy is None:
            self._work.wait()
            return joined(self._parts.numpy(), self._share)
        return joined(self._copy.array(), self._share)


def joined(parts: Any, share: int) -> StepLosses:
    """Return what all ranks have sent, in the order of ranks."""
    digests = parts[:, 3:_HEAD].copy().view(np.uint64)[:, 0]
    numbers = zip(parts[:, 1].tolist(), parts[:, 2].tolist(), digests.tolist(), strict=True)
    check_marks([StepMark(*each) for each in numbers])
    ids, losses = [], []
    for part in parts:
        count = int(part[0])
        ids.append(part[_HEAD : _HEAD + 2 * count].copy().view(np.int64))
        at = _HEAD + 2 * share
        losses.append(part[at : at + count].copy().view(np.float32))
    return StepLosses(np.concatenate(ids), np.concatenate(losses))
