"""Arenas on GPUs: device memory of each rank that the other ranks of its host have mapped.

    with PeerArena(meeting(group), rank=rank, size=2, size_bytes="1GB") as arena:
        grad = arena.take(1_000_000)              # on this rank's GPU, and its peers can see it
        theirs = arena.of(grad, rank=1)           # what rank 1 took in the same place

As in shared memory (`shm_memory`) all ranks take the same sizes in the same order, so a tensor has
the same offset in every segment. A peer's tensor is a pointer that kernels of this rank read and
write; ranks may use one GPU together, or GPUs that reach each other's memory.

Segments travel as CUDA IPC handles. A handle is opened on the GPU of the rank that opens it: the
driver then lets kernels there reach the memory, wherever it lies, and torch sees a tensor of its
own device. Ranks must be on the same host and not in containers that hide processes from each
other. It was tried with several ranks on one GPU, not yet with GPUs that reach each other.

Words that the host reads and writes, such as flags, are in a small arena of shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from penstock.errors import OptionError, PeerError, RendezvousError
from penstock.step.comms.shm_flags import LINE_WORDS, Flags
from penstock.step.comms.shm_memory import HostArena, Meet, Segments

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PeerArena"]

HOST_BYTES = 1 << 20
"""For flags and calls: about a thousand bytes for each communicator."""
CLOSE_S = 5.0
"""How long an owner waits, before it frees its memory, for the ranks that have it mapped."""
ALIGN_BYTES = 512
"""Offsets of tensors: as in torch's own allocator, more than any load of a kernel needs."""


class _CudaShareHandle(msgspec.Struct, array_like=True, frozen=True):
    """What `UntypedStorage._share_cuda_` returns, in its order."""

    device: int
    memory: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    needs_event: bool


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others about its segment."""

    size_bytes: int
    trouble: str = ""
    handles: tuple[_CudaShareHandle | None, ...] = ()
    """One for each peer, because torch counts releases by handle; None for the rank itself."""


class PeerArena(Segments):
    """The segments of all ranks of one host on their GPUs, as one of them sees them.

    Args:
        meet: how these ranks exchange a few bytes; called by all of them, in the same order.
        rank: which of them this is.
        size: how many they are.
        size_bytes: how much each rank may take, the same on all.
        device: this rank's GPU; by default the current one.
    """

    align_bytes = round_bytes = ALIGN_BYTES

    def __init__(
        self,
        meet: Meet,
        *,
        rank: int,
        size: int,
        size_bytes: int | str,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(rank=rank, size=size, size_bytes=size_bytes)
        self.meet = meet
        self._host = HostArena(meet, rank=rank, size=size, size_bytes=HOST_BYTES, run_id="peer")
        self._device = device
        self._flags: Flags | None = None

    @property
    def host(self) -> HostArena:
        """The arena of words that processors of the host can read and write."""
        return self._host

    @property
    def device(self) -> torch.device:
        """This rank's GPU."""
        assert self._device is not None, "the arena is not open"
        return self._device

    def open(self) -> None:
        """Make this rank's segment and map those of the others.

        Raises:
            OptionError: there is not so much memory, or no GPU.
            RendezvousError: the ranks are not on one host, or want different sizes.
        """
        offer = _Offer(size_bytes=self.size_bytes)
        mine: Tensor | None = None
        try:
            mine = self._segment()
            others = (None if other == self.rank else _handle(mine) for other in range(self.size))
            offer = msgspec.structs.replace(offer, handles=tuple(others))
        except (RuntimeError, OptionError) as error:
            trouble = f"rank {self.rank} has no memory for its peers: {error}"
            offer = msgspec.structs.replace(offer, trouble=trouble)
        heard = self._offers(self.meet(msgspec.msgpack.encode(offer)))
        self._end_if([each.trouble for each in heard], OptionError)
        assert mine is not None
        trouble = self._map_all(mine, heard)
        self._end_if([text.decode() for text in self.meet(trouble.encode())], RendezvousError)
        self._host.open()
        offset = self._host.offset_of(self._host.take(LINE_WORDS, torch.int64))
        assert offset is not None
        self._flags = Flags(self._host, offset, timeout_s=CLOSE_S)

    def _offers(self, texts: Sequence[bytes]) -> list[_Offer]:
        """Return the offers of all ranks, as plain values of known types: nothing is unpickled."""
        try:
            heard = [msgspec.msgpack.decode(text, type=_Offer) for text in texts]
        except msgspec.MsgspecError as error:
            raise RendezvousError(
                f"what a rank says about its GPU memory cannot be read ({error}); run the same "
                "version of Penstock on all ranks"
            ) from error
        for other, offer in enumerate(heard):
            if offer.trouble:
                continue
            mine = offer.handles[self.rank : self.rank + 1]
            if len(offer.handles) != self.size or (mine[0] is None) != (other == self.rank):
                raise RendezvousError(
                    f"rank {other} offers its GPU memory to {len(offer.handles)} ranks, itself "
                    f"excepted, where {self.size} meet; give every rank its own rank= and the same "
                    "size="
                )
        return heard

    def _segment(self) -> Tensor:
        if not torch.cuda.is_available():
            raise OptionError("there is no GPU here; ranks without one share memory with shm")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if self._device is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        made = torch.zeros(self.size_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return made

    def _map_all(self, mine: Tensor, heard: Sequence[_Offer]) -> str:
        """Map the segments of all ranks; return what is wrong with one, or an empty text."""
        for other, offer in enumerate(heard):
            who = f"rank {self.rank} cannot map memory of rank {other}'s GPU"
            if offer.size_bytes != self.size_bytes:
                return (
                    f"{who}: they take {self.size_bytes} and {offer.size_bytes} bytes; take the "
                    "same"
                )
            try:
                handle = offer.handles[self.rank]
                self._bytes.append(mine if handle is None else self._mapped(handle))
            except RuntimeError as error:
                return (
                    f"{who}: {error}; ranks of other hosts, of other containers or on GPUs that "
                    "do not reach each other meet over nccl"
                )
        return ""

    def _mapped(self, handle: _CudaShareHandle) -> Tensor:
        # On our own device, not on the handle's: the driver lets kernels here reach the memory.
        _, *where = msgspec.structs.astuple(handle)
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *where)
        room = torch.empty(0, dtype=torch.uint8, device=self.device)
        return room.set_(storage, 0, (self.size_bytes,), (1,))

    def close(self) -> None:
        """Release all segments; a tensor that is still held keeps its segment alive.

        First those of the others, then its own, once the others have released it too: if an owner
        ends while its memory is mapped, the memory vanishes under the ranks that use it.
        """
        if self._bytes:
            torch.cuda.synchronize(self._device)
            mine = self._bytes[self.rank : self.rank + 1]  # none if opening failed before it
            self._bytes = []
            if self._flags is not None:
                with suppress(PeerError):  # a rank that is gone holds nothing any more
                    self._flags.sync()
            del mine
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        if self._flags is not None:
            self._flags.close()
            self._flags = None
        self._host.close()


def _handle(segment: Tensor) -> _CudaShareHandle:
    """Return what a peer needs to map a segment; each peer needs one of its own."""
    storage: Any = segment.untyped_storage()
    return _CudaShareHandle(*storage._share_cuda_())
