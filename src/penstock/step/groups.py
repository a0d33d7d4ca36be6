"""From a mesh to process groups: one private group for each axis and each lane.

All groups are made from torch's default group, which the launcher or the user has made; there is no
second rendezvous. A group of its own keeps the orders of lanes apart: an all-gather of one lane can
never be taken for one of another. All ranks open the same lanes in the same order.

    with Groups(mesh(dp=2, tp=2)) as groups:
        scatter, gather = groups.comm("dp", "rs"), groups.comm("dp", "ag")

An axis of one rank needs no group, and a mesh of one rank not even a default group.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
from torch import distributed

from penstock.errors import OptionError
from penstock.step.comms.comm import Comm, OneRankComm
from penstock.step.comms.gloo import GlooComm
from penstock.step.comms.peer import PeerComm
from penstock.step.comms.peer_memory import PeerArena
from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_memory import HostArena, Meet, meeting
from penstock.step.comms.timeouts import default_timeout_s
from penstock.step.loads.shared_wire import WatchedComm, Wire
from penstock.step.program.mesh import Mesh
from penstock.units import bytes_of

__all__ = ["Groups"]

_LANES_MAX = 16
"""For how many lanes of an axis an arena has stages."""
_BACKENDS = ("gloo", "nccl", "shm", "peer")
_SHARED = ("shm", "peer")
"""Those whose ranks map each other's memory: of the host, or of its GPUs."""


class Groups:
    """The Comms of one rank of a mesh, from `with` to the end of its block."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        backend: str | Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        shared: int | str = "64MB",
        over: Wire | None = None,
    ) -> None:
        """Name the mesh; the rest follows the default group.

        Args:
            mesh: has as many ranks as the default group.
            backend: gloo, nccl, or where the ranks of an axis are on one host, shm for tensors of
                the host and peer for those of GPUs that reach each other; one for all, or by axis.
                Without it nccl where the default group has it, else gloo.
            timeout_s: how long an operation waits for a rank; without it the default group's.
            shared: memory that each rank shares along an axis with shm or peer, for `take`.
            over: the wire that loads and this communication share, if loads should give way.
        """
        by_axis = dict.fromkeys(mesh.names, backend) if isinstance(backend, str) else backend or {}
        for axis, name in by_axis.items():
            mesh.size(axis)
            if name not in _BACKENDS:
                raise OptionError(f"no Comm over {name!r}; there are {', '.join(_BACKENDS)}")
        if timeout_s is not None and not timeout_s > 0:
            raise OptionError(f"timeout_s must be more than 0 seconds, got {timeout_s}")
        self.mesh = mesh
        self._backends = dict(by_axis)
        self._timeout_s = timeout_s
        self._shared = shared
        self.over = over
        self._arenas: dict[str, HostArena | PeerArena] = {}
        self._comms: dict[tuple[str, str], Comm] = {}
        self._groups: list[distributed.ProcessGroup] = []
        self.num_closed = 0
        """How often they were closed: Comms and arenas from before are gone."""

    def __enter__(self) -> Self:
        has_group = distributed.is_available() and distributed.is_initialized()
        num_ranks = distributed.get_world_size() if has_group else 1
        if num_ranks != self.mesh.num_ranks:
            raise OptionError(self._other_ranks(num_ranks if has_group else None))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _other_ranks(self, num_ranks: int | None) -> str:
        said = f"the mesh {self.mesh} has {self.mesh.num_ranks} ranks"
        if num_ranks is None:
            return (
                f"{said}, and there is no group of processes; start as many, with torchrun say, "
                "and call torch.distributed.init_process_group first"
            )
        return (
            f"{said}, torch's default group has {num_ranks}; make a mesh of {num_ranks} ranks, or "
            f"start {self.mesh.num_ranks} processes"
        )

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for a rank, whatever carries it."""
        return default_timeout_s() if self._timeout_s is None else self._timeout_s

    @property
    def rank(self) -> int:
        """This process's place in the mesh."""
        return distributed.get_rank() if self.mesh.num_ranks > 1 else 0

    def backend_of(self, axis: str) -> str:
        """Return what carries the communication along an axis."""
        return self._backends.get(axis) or _default_backend()

    def comm(self, axes: str | tuple[str, ...], lane: str = "net") -> Comm:
        """Return the Comm of an axis, or of several together, and a lane; made when first asked.

        All ranks of the mesh must call this in the same order, also those that are not in the new
        group: torch makes groups only together.
        """
        names = (axes,) if isinstance(axes, str) else axes
        key = (".".join(names), lane)
        if key not in self._comms:
            made = self._make(names, lane)
            # Communication through memory does not use the wire.
            if self.over is not None and not isinstance(made, ShmComm | OneRankComm):
                made = WatchedComm(made, self.over)
            self._comms[key] = made
        return self._comms[key]

    def for_hosts(self) -> Groups:
        """Return groups of the same ranks for tensors of the host."""
        return Groups(self.mesh, backend="gloo", timeout_s=self._timeout_s)

    def take(self, count: int, dtype: torch.dtype = torch.float32, *, axis: str) -> torch.Tensor:
        """Return memory that the ranks of an axis with shm or peer can read and write.

        All of them take the same sizes in the same order.
        """
        self.comm(axis, "shared")
        return self._arenas[axis].take(count, dtype)

    def close(self) -> None:
        """Complete what is under way and free arenas and process groups."""
        self.num_closed += 1
        # In this order: Comms have stages in the arenas and operations under way in the groups.
        comms, self._comms = list(self._comms.values()), {}
        for comm in comms:
            comm.close()
        arenas, self._arenas = list(self._arenas.values()), {}
        for arena in arenas:
            arena.close()
        groups, self._groups = self._groups, []
        for group in groups:
            distributed.destroy_process_group(group)

    def _make(self, axes: tuple[str, ...], lane: str) -> Comm:
        axis = ".".join(axes)
        chosen = {self.backend_of(name) for name in axes}
        # Of several axes together, the ranks of some may be on other hosts.
        backend = chosen.pop() if len(chosen) == 1 else "gloo"
        is_shared = backend in _SHARED
        if is_shared and axis in self._arenas:
            return self._over(axis)
        group = self._new_group(axes, "gloo" if is_shared else backend)
        if is_shared:
            self._arenas[axis] = self._new_arena(group, axes, backend)
            return self._over(axis)
        if backend == "nccl":
            from penstock.step.comms.nccl import NcclComm

            return NcclComm(group, axis=axis)
        return OneRankComm(axis) if group is None else GlooComm(group, axis=axis, lane=lane)

    def _new_group(self, axes: tuple[str, ...], backend: str) -> distributed.ProcessGroup | None:
        """Return a private process group of this rank's axis; None if it is alone on it."""
        if self.mesh.size(*axes) == 1:
            return None
        timeout = timedelta(seconds=self.timeout_s)
        mine: distributed.ProcessGroup | None = None
        for ranks in self.mesh.groups(*axes):
            group = distributed.new_group(list(ranks), timeout=timeout, backend=backend)
            if self.rank in ranks:
                mine = group
        assert mine is not None, f"rank {self.rank} is in no group of {'.'.join(axes)}"
        self._groups.append(mine)
        return mine

    def _new_arena(
        self, group: distributed.ProcessGroup | None, axes: tuple[str, ...], backend: str
    ) -> HostArena | PeerArena:
        meet: Meet = meeting(group) if group is not None else lambda mine: [mine]
        rank, size = self.mesh.coordinate(self.rank, *axes), self.mesh.size(*axes)
        # The stages of lanes come on top of what the user may take.
        shared_bytes = bytes_of(self._shared) + _LANES_MAX * ShmComm.need_bytes(size)
        kind = HostArena if backend == "shm" else PeerArena
        arena = kind(meet, rank=rank, size=size, size_bytes=shared_bytes)
        arena.open()
        return arena

    def _over(self, axis: str) -> Comm:
        arena = self._arenas[axis]
        if isinstance(arena, PeerArena):
            return PeerComm(arena, axis=axis, timeout_s=self.timeout_s)
        return ShmComm(arena, axis=axis, timeout_s=self.timeout_s)


def _default_backend() -> str:
    """Return what the default group has: nccl if possible, gloo otherwise."""
    if not distributed.is_initialized():
        return "gloo"
    return "nccl" if "nccl" in str(distributed.get_backend()) else "gloo"
