"""State in DTensors, for torch.distributed.checkpoint: each rank saves and loads its part.

`get_state_dict` and its like return DTensors where ranks have slices, as with FSDP2; `state_dict`
itself returns whole tensors, as torch's optimizers do. A DTensor is cut
along one dimension, and slices here are cut without regard for dimensions. So units are gathered
one after the other, and each rank takes its part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from penstock.step.attached.arenas import dense_strides
from penstock.step.attached.share import Share
from penstock.step.comms.comm import Comm
from penstock.step.program.layouts import part
from penstock.step.program.mesh import Mesh

__all__ = ["Sharding", "is_asked_for", "whole_of"]

_ASKS = "torch.distributed.checkpoint.state_dict"


def is_asked_for() -> bool:
    """Whether torch.distributed.checkpoint asks for a state, and not a user."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _ASKS:
            return True
        frame = frame.f_back
    return False


def whole_of(value: Any) -> Any:
    """Return a DTensor as a whole tensor, and all else as it is; all ranks call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Sharding:
    """How state is cut into DTensors: along the dimension that is outermost in memory.

    With one rank, tensors stay whole.
    """

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self._mesh, self._axis, self._device = mesh, axis, device
        self.size = mesh.size(axis)
        self._device_mesh: Any = None

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all ranks have as a DTensor, with a copy of this rank's part."""
        shape, strides = tensor.shape, dense_strides(tensor)
        row = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        row = row.copy_(tensor).as_strided((tensor.numel(),), (1,))
        start, stop = self._span(shape, strides)
        return self._placed(row[start:stop].clone(), shape, strides)

    def collect(self, share: Share, slices: torch.Tensor, lane: Comm) -> list[torch.Tensor]:
        """Return the DTensors of an arena's parameters from all ranks' slices; all call it."""
        arena, layout = share.arena, share.arena.layout
        places = zip(arena.shapes, arena.strides, strict=True)
        spans = [self._span(shape, strides) for shape, strides in places]
        rows = [slices.new_empty(stop - start) for start, stop in spans]
        for unit in layout.units:
            low, high = layout.share_of(unit)
            flat = slices.new_empty(unit.stop - unit.start)
            lane.all_gather(flat, slices[low:high]).wait()
            for index in unit.params:
                begin, end = (layout.starts[index] + at for at in spans[index])
                first, last = max(begin, unit.start), min(end, unit.stop)
                if first < last:
                    mine = flat[first - unit.start : last - unit.start]
                    rows[index][first - begin : last - begin].copy_(mine)
        facts = zip(rows, arena.shapes, arena.strides, strict=True)
        return [self._placed(row, shape, strides) for row, shape, strides in facts]

    def _span(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
        """Return where this rank's part lies in the memory of a whole tensor."""
        if self.size == 1 or not shape:
            return 0, torch.Size(shape).numel()
        dim = _outer(shape, strides)
        start, stop = part(shape[dim], self.size, self._mesh_of_ranks().get_local_rank())
        row = torch.Size(shape).numel() // max(1, shape[dim])
        return start * row, stop * row

    def _placed(self, row: torch.Tensor, shape: torch.Size, strides: Sequence[int]) -> torch.Tensor:
        if self.size == 1 or not shape:
            return row.as_strided(shape, strides)
        from torch.distributed.tensor import DTensor, Shard

        dim, mesh = _outer(shape, strides), self._mesh_of_ranks()
        start, stop = part(shape[dim], self.size, mesh.get_local_rank())
        local = row.as_strided([*shape[:dim], stop - start, *shape[dim + 1 :]], strides)
        made: torch.Tensor = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=tuple(strides)
        )
        return made

    def _mesh_of_ranks(self) -> Any:
        """Return the DeviceMesh of the axis; all ranks make it together."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            sizes = tuple(size for _, size in self._mesh.axes)
            names = self._mesh.names
            mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=tuple(names))
            self._device_mesh = mesh[self._axis]
        return self._device_mesh


def _outer(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the dimension along which a part of a tensor is one run of memory."""
    return max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim], -dim))
