"""Arenas: memory that the ranks of one host share.

    with HostArena(meeting(group), rank=rank, size=2, size_bytes="256MB") as arena:
        grad = arena.take(1_000_000)              # a tensor of mine that my peers can see
        theirs = arena.of(grad, rank=1)           # what rank 1 took in the same place

Each rank makes one segment and maps those of all others. All ranks take the same sizes in the same
order, so a tensor has the same offset in every segment and a peer's tensor is found without asking.
Memory that is taken and never written costs nothing: pages are allocated at the first write, near
the core that writes.

A segment is a memfd and has no name in any folder: its run id and rank appear only in
/proc/PID/maps, and peers open it as /proc/PID/fd/N. It is freed with its last mapping, so a rank
that is killed leaves nothing behind to clean up. Unlike files in /dev/shm, which containers limit
to 64 MB by default, a memfd is limited only by memory.

A token at the head of each segment proves that it is the right one, and not that of a process with
the same pid on another host.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from penstock.errors import OptionError, RendezvousError
from penstock.memory import memory_left_bytes
from penstock.units import bytes_of, show_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["HostArena", "Meet", "Segments", "meeting"]

Meet = Callable[[bytes], Sequence[bytes]]
"""Gives a few bytes to all ranks of the arena and returns those of each, by rank."""

HEAD_BYTES = 4096
"""The token, padded so that tensors begin on a page."""
TOKEN_BYTES = 16
ALIGN_BYTES = 128
"""Two cache lines: what one rank writes must not share one with what another rank reads."""
_PAGE_BYTES = 4096


def meeting(group: ProcessGroup | None = None) -> Meet:
    """Return how the ranks of a process group meet; without a group, all ranks."""
    from torch import distributed

    def meet(mine: bytes) -> list[bytes]:
        everyones: list[Any] = [b""] * distributed.get_world_size(group)
        distributed.all_gather_object(everyones, mine, group=group)
        return everyones

    return meet


class Segments(ABC):
    """Memory of each rank that all ranks map: a host's here, that of GPUs in `peer_memory`.

    Args:
        rank: which of them this is.
        size: how many they are.
        size_bytes: how much each rank may take, the same on all.
    """

    align_bytes: ClassVar[int]
    """Offsets of tensors are multiples of it."""
    round_bytes: ClassVar[int]
    """Sizes of segments are multiples of it."""

    def __init__(self, *, rank: int, size: int, size_bytes: int | str) -> None:
        if not 0 <= rank < size:
            raise OptionError(f"rank {rank} of {size} ranks; ranks are counted from 0")
        self.rank, self.size = rank, size
        self.size_bytes = -(-bytes_of(size_bytes) // self.round_bytes) * self.round_bytes
        self._bytes: list[Tensor] = []
        self._taken_bytes = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def open(self) -> None:
        """Make this rank's segment and map those of the others."""

    @abstractmethod
    def close(self) -> None:
        """Release all segments; a tensor that is still held keeps its segment alive."""

    @property
    @abstractmethod
    def host(self) -> HostArena:
        """The arena of words that processors of the host can read and write."""

    def take(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor of this rank that its peers see; it is zero until it is written.

        All ranks take the same sizes in the same order.
        """
        offset = self._taken_bytes
        need_bytes = count * dtype.itemsize
        if offset + need_bytes > self.size_bytes:
            raise OptionError(
                f"{count} elements of {dtype} need {show_bytes(need_bytes)}, the arena has "
                f"{show_bytes(self.size_bytes - offset)} left of {show_bytes(self.size_bytes)}; "
                f"make it with size_bytes={offset + need_bytes} or more"
            )
        self._taken_bytes = -(-(offset + need_bytes) // self.align_bytes) * self.align_bytes
        return self.at(self.rank, offset, count, dtype)

    def at(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor at an offset of a rank's segment."""
        assert self._bytes, "the arena is not open"
        return self._bytes[rank][offset : offset + count * dtype.itemsize].view(dtype)

    def of(self, tensor: Tensor, *, rank: int) -> Tensor:
        """Return a rank's tensor at the offset that this one has in this rank's segment."""
        offset = self.offset_of(tensor)
        if offset is None:
            raise OptionError(
                f"a tensor of {tensor.numel()} elements on {tensor.device} is not in the arena of "
                f"rank {self.rank}; take it from there: arena.take({tensor.numel()})"
            )
        return self.at(rank, offset, tensor.numel(), tensor.dtype).view(tensor.shape)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in this rank's segment; None if it is elsewhere."""
        mine = self._bytes[self.rank]
        if tensor.device != mine.device or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - mine.data_ptr()
        end = offset + tensor.numel() * tensor.element_size()
        return offset if offset >= 0 and end <= self.size_bytes else None

    def _end_if(self, troubles: Sequence[str], kind: type[Exception]) -> None:
        """Close and raise if any rank has failed: all do so, or some would wait for the others."""
        first = next((text for text in troubles if text), "")
        if first:
            self.close()
            raise kind(first)


class HostArena(Segments):
    """The segments of all ranks of one host, as one of them sees them.

    Args:
        meet: how these ranks exchange a few bytes; called by all of them, in the same order.
        rank: which of them this is.
        size: how many they are.
        size_bytes: how much each rank may take, the same on all.
        run_id: its name in /proc, for people who look there.
    """

    align_bytes, round_bytes = ALIGN_BYTES, _PAGE_BYTES

    def __init__(
        self,
        meet: Meet,
        *,
        rank: int,
        size: int,
        size_bytes: int | str,
        run_id: str = "shm",
    ) -> None:
        super().__init__(rank=rank, size=size, size_bytes=size_bytes)
        self._meet = meet
        self._name = f"penstock-{run_id}-{rank}"
        self._maps: list[mmap.mmap] = []
        self._pidfds: list[int] = []

    def open(self) -> None:
        """Make this rank's segment and map those of the others.

        Raises:
            OptionError: there is not so much memory.
            RendezvousError: the ranks are not on one host, or want different sizes.
        """
        with ExitStack() as stack:
            token, descriptor, trouble = secrets.token_bytes(TOKEN_BYTES), -1, ""
            try:
                descriptor = self._segment()
                stack.callback(os.close, descriptor)
                os.pwrite(descriptor, token, 0)
            except (OSError, OptionError) as error:
                trouble = str(error)
            mine: dict[str, object] = {"pid": os.getpid(), "fd": descriptor}
            mine |= {"bytes": self.size_bytes, "token": token.hex(), "bad": trouble}
            heard = [json.loads(text) for text in self._meet(json.dumps(mine).encode())]
            self._end_if([word["bad"] for word in heard], OptionError)
            troubles = (self._map(other, word) for other, word in enumerate(heard))
            trouble = next((text for text in troubles if text), "")
            # After this meeting all ranks have opened all segments: only now may the descriptors,
            # by which the others open them, be closed.
            troubles_last = self._meet(trouble.encode())
            self._end_if([text.decode() for text in troubles_last], RendezvousError)

    def _segment(self) -> int:
        total_bytes = HEAD_BYTES + self.size_bytes
        left_bytes = memory_left_bytes()
        if total_bytes * self.size > left_bytes:
            raise OptionError(
                f"{self.size} ranks want {show_bytes(total_bytes)} of shared memory each, "
                f"{show_bytes(total_bytes * self.size)} in all, and this host has "
                f"{show_bytes(left_bytes)} left; take a smaller arena or fewer ranks a host"
            )
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(self._name, flags)
        os.ftruncate(descriptor, total_bytes)
        # If a peer shrank a segment, our next access would end this process with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor

    def _map(self, other: int, word: dict[str, Any]) -> str:
        """Map the segment of a rank; return what is wrong with it, or an empty text."""
        who = f"rank {self.rank} cannot share memory with rank {other}"
        if word["bytes"] != self.size_bytes:
            return f"{who}: they take {self.size_bytes} and {word['bytes']} bytes; take the same"
        way_out = "ranks of other hosts or containers meet over sockets (gloo)"
        try:
            pidfd = os.pidfd_open(word["pid"])
            self._pidfds.append(pidfd)
            descriptor = os.open(f"/proc/{word['pid']}/fd/{word['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return f"{who}, process {word['pid']} there: {error.strerror}; {way_out}"
        try:
            if os.pread(descriptor, TOKEN_BYTES, 0).hex() != word["token"]:
                return f"{who}: its process {word['pid']} is another one here; {way_out}"
            self._maps.append(mmap.mmap(descriptor, HEAD_BYTES + self.size_bytes))
            with suppress(OSError):  # saves a sixth of a pass's time, if the host allows it
                self._maps[-1].madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"{who}, process {word['pid']} there: {error.strerror}; {way_out}"
        finally:
            os.close(descriptor)
        self._bytes.append(torch.frombuffer(self._maps[-1], dtype=torch.uint8)[HEAD_BYTES:])
        return ""

    def close(self) -> None:
        """Release all segments; a tensor that is still held keeps its segment alive."""
        while self._pidfds:
            os.close(self._pidfds.pop())
        self._maps, self._bytes = [], []

    @property
    def host(self) -> HostArena:
        """This arena: its memory is the host's."""
        return self

    def words(self, rank: int, offset: int, count: int) -> memoryview:
        """Return 64-bit integers in a rank's segment, to be read and written one by one."""
        start = HEAD_BYTES + offset
        return memoryview(self._maps[rank])[start : start + 8 * count].cast("q")

    def pidfd(self, rank: int) -> int:
        """Return the descriptor that becomes readable when the process of a rank ends."""
        return self._pidfds[rank]
