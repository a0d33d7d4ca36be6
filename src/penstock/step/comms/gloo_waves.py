"""Collectives as waves: pieces of a tensor that move one behind the other.

A large tensor is cut in pieces, so that adding overlaps with receiving, staging memory stays small,
and a connection carries both directions at once. A wave carries one piece of every rank's part: a
generator that posts messages and yields each that it waits for. `waves_in_flight` runs several.

"direct" collectives add in the order of ranks, on whichever rank: cutting a tensor differently, or
giving its parts to other ranks, changes no bit. A ring adds in the order of its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.step.comms.comm import Done
from penstock.step.comms.completion import Pending
from penstock.step.comms.gloo_wire import Lease, Message, Staging, WireOperation

__all__ = ["Wave", "combine", "pieces_of", "waves_in_flight"]

PIECE_BYTES = 2 << 20
WAVES_MAX = 4
"""Waves of one operation at once: enough that the wire never waits for Python."""
_HALVES = (torch.bfloat16, torch.float16)
_BY: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

Wave = Iterator[Message]
MakeWave = Callable[[Lease, int], Wave]
"""Makes the wave of one piece, given its buffers and its number."""


def waves_in_flight(
    make: MakeWave,
    count: int,
    staging: Staging,
    *,
    wave_bytes: int,
    in_turns: bool,
    window: int = WAVES_MAX,
) -> Iterator[Pending]:
    """Run `count` waves, several at once; the first ones begin on the caller's thread.

    Waves with one exchange are waited for one after the other, so that the next can begin as soon
    as possible. Those with several take turns: while one waits for its neighbour, others move.
    """
    active: deque[tuple[Wave, Message, Lease]] = deque()
    number = 0

    def begin(is_oldest: bool) -> None:
        nonlocal number
        while number < count and len(active) < window:
            # The oldest operation takes its buffers even over the limit: operations complete in
            # order, so without them it would wait for younger ones that wait for it.
            lease = staging.lease(wave_bytes, is_forced=is_oldest and not active)
            if lease is None:
                return
            wave = make(lease, number)
            number += 1
            first = next(wave, None)
            if first is None:
                lease.end()
            else:
                active.append((wave, first, lease))

    begin(False)
    yield Done()  # what follows runs on the lane's thread, when this is its oldest operation
    while True:
        begin(True)
        if not active:
            return
        wave, message, lease = active.popleft()
        yield message
        following = next(wave, None)
        if following is None:
            lease.end()
        elif in_turns:
            active.append((wave, following, lease))
        else:
            active.appendleft((wave, following, lease))


def pieces_of(parts: Sequence[torch.Tensor], number: int, length: int) -> list[torch.Tensor]:
    """Return one piece of every part, by its number; a piece beyond the end is empty."""
    if number == 0 and all(each.numel() <= length for each in parts):
        return list(parts)  # each call of torch may release Python's lock and wait for it
    return [each[number * length : (number + 1) * length] for each in parts]


def combine(operands: Sequence[torch.Tensor], out: torch.Tensor, op: str, lease: Lease) -> None:
    """Put the sum of operands, in their order, in `out`, which may be one of them.

    Halves are added in float32 and rounded once.
    """
    by, (first, second, *others) = _BY[op], operands
    target = out
    if not others:
        by(first, second, out=out)
    else:
        is_half = out.dtype in _HALVES
        total = lease.take(out.numel(), torch.float32 if is_half else out.dtype)
        if first.dtype == second.dtype == total.dtype:
            by(first, second, out=total)
        else:  # two halves would be added as halves
            by(total.copy_(first), second, out=total)
        for operand in others[:-1]:
            by(total, operand, out=total)
        target = total if is_half else out
        by(total, others[-1], out=target)
    if op == "mean":
        target.div_(len(operands))
    if target is not out:
        out.copy_(target)


# -- one exchange with each ------------------------------------------------------------------


def scatter_direct(
    job: WireOperation, lease: Lease, at: int, pieces: Sequence[torch.Tensor], out: torch.Tensor
) -> Wave:
    """Send each rank its piece, and add up the pieces that all have sent to this one."""
    mine = job.wire.rank
    operands, receipts = list(pieces), []
    if out.numel():
        for peer in reversed(job.others):
            operands[peer] = lease.take(out.numel(), job.sent)
            receipts.append(job.receive(at, peer, operands[peer]))
    sends = [job.send(lease, at, peer, pieces[peer]) for peer in job.others if pieces[peer].numel()]
    yield from receipts
    if receipts:
        assert pieces[mine].numel() == out.numel()
        combine(operands, out, job.op, lease)
    yield from sends


def gather_direct(
    job: WireOperation, lease: Lease, at: int, mine: torch.Tensor, outs: Sequence[torch.Tensor]
) -> Wave:
    """Send this rank's piece to each, and put the pieces of the others in their places."""
    places = {peer: job.place(lease, outs[peer]) for peer in reversed(job.others)}
    receipts = [(p, job.receive(at, p, place)) for p, place in places.items() if place.numel()]
    packed = job.packed(lease, mine)
    sends = [job.send(lease, at, peer, packed) for peer in job.others if packed.numel()]
    _keep(outs[job.wire.rank], packed)
    for peer, receipt in receipts:
        yield receipt
        _keep(outs[peer], places[peer])
    yield from sends


def _keep(out: torch.Tensor, data: torch.Tensor) -> None:
    """Copy, unless it is there already; a rank keeps the rounded values that it has sent."""
    if out.data_ptr() != data.data_ptr() or out.dtype != data.dtype:
        out.copy_(data)


def reduce_pair(job: WireOperation, lease: Lease, at: int, piece: torch.Tensor) -> Wave:
    """Exchange whole pieces with the only other rank, and add on both.

    That is as many bytes as scattering and gathering, in one step instead of two. Both ranks add
    the same values: each uses its own piece as rounded for the other.
    """
    me, other = job.wire.rank, 1 - job.wire.rank
    arrived, packed = lease.take(piece.numel(), job.sent), job.packed(lease, piece)
    receipt = job.receive(at, other, arrived)
    sent = job.send(lease, at, other, packed)
    yield receipt
    yield sent
    if packed.dtype != piece.dtype:
        piece.copy_(packed)
    combine([arrived, piece] if me else [piece, arrived], piece, job.op, lease)


# -- neighbours only -------------------------------------------------------------------------


def scatter_ring(
    job: WireOperation, lease: Lease, at: int, pieces: Sequence[torch.Tensor], out: torch.Tensor
) -> Wave:
    """Pass sums on to the right: each begins at the right neighbour of its owner."""
    me, size = job.wire.rank, job.wire.size
    left, right = (me - 1) % size, (me + 1) % size
    longest = max(piece.numel() for piece in pieces)
    buffers = [lease.take(longest, job.sent) for _ in range(2)]
    sending = pieces[left]
    for step in range(size - 1):
        mine = pieces[(me - 2 - step) % size]
        arrived = buffers[step % 2][: mine.numel()]
        receipt = job.receive(at + step, left, arrived) if mine.numel() else None
        sent = job.send(lease, at + step, right, sending) if sending.numel() else None
        if receipt is not None:
            yield receipt
            _BY[job.op](arrived, mine, out=arrived if step < size - 2 else out)
        if sent is not None:
            yield sent
        sending = arrived
    if job.op == "mean":
        out.div_(size)


def gather_ring(
    job: WireOperation, lease: Lease, at: int, mine: torch.Tensor, outs: Sequence[torch.Tensor]
) -> Wave:
    """Pass parts on to the right until every rank has all."""
    me, size = job.wire.rank, job.wire.size
    left, right = (me - 1) % size, (me + 1) % size
    sending, sends = job.packed(lease, mine), []
    _keep(outs[me], sending)
    for step in range(size - 1):
        out = outs[(me - 1 - step) % size]
        place = job.place(lease, out)
        receipt = job.receive(at + step, left, place) if place.numel() else None
        if sending.numel():
            sends.append(job.send(lease, at + step, right, sending))
        if receipt is not None:
            yield receipt
            _keep(out, place)
        sending = place
    yield from sends


# -- to and from one -------------------------------------------------------------------------


def broadcast_chain(
    job: WireOperation, lease: Lease, at: int, piece: torch.Tensor, root: int
) -> Wave:
    """Pass the root's piece on to the right; no rank sends it twice."""
    me, size = job.wire.rank, job.wire.size
    if me != root:
        yield job.receive(at, (me - 1) % size, piece)
    if (me + 1) % size != root:
        yield job.send(lease, at, (me + 1) % size, piece)


def reduce_chain(job: WireOperation, lease: Lease, at: int, piece: torch.Tensor, root: int) -> Wave:
    """Pass sums on to the left, from the left neighbour of the root all around to the root."""
    me, size = job.wire.rank, job.wire.size
    total = piece
    if (me + 1) % size != root:
        arrived = lease.take(piece.numel(), piece.dtype)
        yield job.receive(at, (me + 1) % size, arrived)
        total = piece if me == root else arrived
        _BY[job.op](piece, arrived, out=total)
    if me != root:
        yield job.send(lease, at, (me - 1) % size, total)
    elif job.op == "mean":
        total.div_(size)


def reduce_direct(
    job: WireOperation, lease: Lease, at: int, piece: torch.Tensor, root: int
) -> Wave:
    """Send a piece to the root, which adds up."""
    me = job.wire.rank
    if me != root:
        yield job.send(lease, at, root, piece)
        return
    operands, receipts = [piece] * job.wire.size, []
    for peer in reversed(job.others):
        operands[peer] = lease.take(piece.numel(), piece.dtype)
        receipts.append(job.receive(at, peer, operands[peer]))
    yield from receipts
    combine(operands, piece, job.op, lease)


# -- each to each ----------------------------------------------------------------------------


def exchange(
    job: WireOperation,
    lease: Lease,
    at: int,
    outs: dict[int, torch.Tensor],
    pieces: dict[int, torch.Tensor],
) -> Wave:
    """Send a piece to some ranks and receive one from some."""
    receipts = [job.receive(at, peer, out) for peer, out in outs.items() if out.numel()]
    sends = [job.send(lease, at, peer, each) for peer, each in pieces.items() if each.numel()]
    yield from receipts
    yield from sends
