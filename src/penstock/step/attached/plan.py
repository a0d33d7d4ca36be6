"""What all ranks agree on before the first update: sizes of units, and the orders of both lanes.

Rank 0 decides by what its own first step has shown; the others take that over. Ranks that are not
attached to the same thing are told so before anything else is sent.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import OptionError
from penstock.step.attached.arenas import Arena, ArenaLayout, Take, laid_out
from penstock.step.attached.elementwise import Rule
from penstock.step.attached.flow import FlowBucket, FlowPlan, Lanes
from penstock.step.attached.record import Record
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Stepper
from penstock.step.comms.comm import Comm

__all__ = [
    "Agreement",
    "agree",
    "buffers_of",
    "check_same",
    "described_of",
    "make_layouts",
    "grad_places",
    "make_flow_plan",
    "make_shares",
    "params_of_modules",
    "share_buffers",
    "share_weights",
]

UNIT_S = 0.008
"""Time that a unit should take on the wire: much more than a latency, less than most layers."""
UNIT_BYTES_MIN, UNIT_BYTES_MAX = 256 << 10, 8 << 20
UNIT_BYTES_MAX_GPU = 32 << 20
"""A network between GPUs is done with less before its next operation has begun."""
UNITS_MAX = 200
"""Each costs the processor some 0.2 ms a step, whatever its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Decisions that are the same on all ranks."""

    unit_bytes: int
    by_use: tuple[int, ...]
    """Numbers of parameters, in the order of their first use in forward."""
    by_readiness: tuple[int, ...]
    """Numbers in the order in which backward has their gradients."""


def described_of(
    optimizer: Optimizer, params: Sequence[torch.Tensor], model: nn.Module, options: str
) -> list[str]:
    """Return what must be the same on all ranks, one line a thing."""
    groups = optimizer.param_groups
    number_of = {param: i for i, group in enumerate(groups) for param in group["params"]}
    return [
        f"{type(optimizer).__name__} {options}",
        *(
            f"parameter {number}: {tuple(param.shape)} {param.dtype} in group {number_of[param]}"
            for number, param in enumerate(params)
        ),
        *(
            f"buffer {name!r}: {tuple(buffer.shape)} {buffer.dtype}"
            for name, buffer in buffers_of(model).items()
        ),
    ]


def check_same(texts: Sequence[str], comm: Comm) -> None:
    """Raise on all ranks unless all have the same parameters and options."""
    sums = torch.tensor([zlib.crc32(text.encode()) for text in texts], dtype=torch.int64)
    total = torch.tensor([zlib.crc32("\n".join(texts).encode())], dtype=torch.int64)
    low, high = total.clone(), total.clone()
    comm.all_reduce(low, op="min").wait()
    comm.all_reduce(high, op="max").wait()
    if int(low) == int(high):
        return
    count = torch.tensor([len(texts)], dtype=torch.int64)
    comm.all_reduce(count, op="min").wait()
    low, high = sums[: int(count)].clone(), sums[: int(count)].clone()
    comm.all_reduce(low, op="min").wait()
    comm.all_reduce(high, op="max").wait()
    differ = (low != high).nonzero().flatten().tolist()
    what = texts[differ[0]] if differ else f"{len(texts)} lines, another rank has {int(count)}"
    raise OptionError(
        f"rank {comm.rank} of {comm.size} attaches something else than another rank: {what}; "
        "all ranks need the same model, optimizer and options"
    )


def share_weights(params: Sequence[torch.Tensor], comm: Comm, hosts: Comm) -> float:
    """Give all ranks the weights of rank 0; return the bytes a second that it took.

    What of a model on a GPU is on the host goes between hosts.
    """
    is_mixed = len({param.device.type for param in params}) > 1
    comm.barrier()
    begin_s, size_bytes = time.perf_counter(), 0
    copies = [param.detach().clone(memory_format=torch.contiguous_format) for param in params]
    handles = [
        (hosts if is_mixed and copy.device.type == "cpu" else comm).broadcast(copy, root=0)
        for copy in copies
        if copy.numel()
    ]
    for handle in handles:
        handle.wait()
    comm.barrier()
    taken_s = time.perf_counter() - begin_s
    with torch.no_grad():
        for param, copy in zip(params, copies, strict=True):
            param.copy_(copy)
            size_bytes += copy.numel() * copy.element_size()
    return size_bytes / taken_s


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that have values."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.numel() and buffer.layout == torch.strided and buffer.device.type != "meta"
    }


def share_buffers(buffers: Mapping[str, torch.Tensor], hosts: Comm) -> None:
    """Give all ranks the buffers of rank 0, of whatever type."""
    for buffer in buffers.values():
        row = buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
        hosts.broadcast(row.view(-1).view(torch.uint8), root=0).wait()
        copy = row.to(buffer.device)
        # Not where it changes nothing: elements may share memory, as those of an expanded one.
        if not torch.equal(copy, buffer):
            with torch.no_grad():
                buffer.copy_(copy)


def agree(
    record: Record,
    sizes_bytes: Sequence[int],
    unit_bytes: int | None,
    rate: float,
    comm: Comm,
    *,
    is_gpu: bool = False,
) -> Agreement:
    """Return what rank 0 proposes."""
    if unit_bytes is None:
        # Of W slices, W - 1 are sent.
        wanted = int(rate * UNIT_S * comm.size / max(1, comm.size - 1))
        largest = UNIT_BYTES_MAX_GPU if is_gpu else UNIT_BYTES_MAX
        most = min(largest, max(UNIT_BYTES_MIN, wanted))
        unit_bytes = max(most, sum(sizes_bytes) // UNITS_MAX)
    count = len(sizes_bytes)
    orders = [*record.by_use(count), *record.by_readiness(count)]
    words = torch.tensor([unit_bytes, *orders], dtype=torch.int64)
    comm.broadcast(words, root=0).wait()
    unit_bytes, *orders = words.tolist()
    return Agreement(
        unit_bytes=unit_bytes,
        by_use=tuple(orders[:count]),
        by_readiness=tuple(orders[count:]),
    )


def make_layouts(
    optimizer: Optimizer, numbers: Mapping[torch.Tensor, int], agreement: Agreement, size: int
) -> list[tuple[int, list[torch.Tensor], ArenaLayout]]:
    """Return what shares an arena: parameters of a group and a type, the first one used first."""
    place = {number: position for position, number in enumerate(agreement.by_use)}
    made = []
    for group_number, group in enumerate(optimizer.param_groups):
        mine = [param for param in group["params"] if param in numbers]
        for dtype in sorted({param.dtype for param in mine}, key=str):
            params = [param for param in mine if param.dtype == dtype]
            params.sort(key=lambda param: place[numbers[param]])
            lengths = [param.numel() for param in params]
            unit_length = max(1, agreement.unit_bytes // dtype.itemsize)
            layout = laid_out(lengths, num_parts=size, unit_length=unit_length)
            made.append((group_number, params, layout))
    return made


def make_shares(
    optimizer: Optimizer,
    rule: Rule,
    numbers: Mapping[torch.Tensor, int],
    layouts: Sequence[tuple[int, list[torch.Tensor], ArenaLayout]],
    *,
    rank: int,
    take: Take,
    kind: type[Share] = Share,
) -> tuple[list[Share], Stepper | None]:
    """Move parameters into arenas; return also what makes the steps of all, if it is one."""
    shares, joint = [], Stepper(optimizer, rule) if rule.is_joint else None
    make = partial(kind, optimizer=optimizer, rule=rule, rank=rank, joint=joint)
    for group, params, layout in layouts:
        # What comes and goes does so for an arena as a whole, by the size of its storage.
        arena = Arena(params, layout, take=take, is_one=kind is not Share)
        arena.move_in(params)
        shares.append(make(arena, [numbers[param] for param in params], group=group))
    return shares, joint


def grad_places(shares: Sequence[Share]) -> list[torch.Tensor]:
    """Return where the gradients of all parameters lie, by number."""
    views = {
        number: share.arena.grad_views[index]
        for share in shares
        for index, number in enumerate(share.params)
    }
    return [views[number] for number in range(len(views))]


def make_flow_plan(
    shares: Sequence[Share], agreement: Agreement, lanes: Lanes, *, wire: str | None
) -> tuple[FlowPlan, dict[FlowBucket, Share]]:
    """Return the orders of gathers and scatters of all buckets, and the share of each bucket."""
    first = {number: position for position, number in enumerate(agreement.by_use)}
    ready = {number: position for position, number in enumerate(agreement.by_readiness)}
    found = [
        (
            FlowBucket(
                share.arena,
                unit,
                rank=lanes.gather.rank,
                reduced=share.reduced,
                params=[share.params[param] for param in unit.params],
            ),
            share,
        )
        for share in shares
        for unit in share.arena.layout.units
    ]
    found.sort(key=lambda each: min(first[number] for number in each[0].params))
    buckets = [bucket for bucket, _ in found]
    # Of buckets that are ready together, the one used first goes first: it is gathered first too.
    order = sorted(
        range(len(found)), key=lambda at: (max(ready[n] for n in buckets[at].params), at)
    )
    plan = FlowPlan(
        buckets=buckets,
        scatter_order=order,
        lanes=lanes,
        num_params=len(agreement.by_use),
        wire=wire,
    )
    return plan, dict(found)


def params_of_modules(
    model: nn.Module, numbers: Mapping[torch.Tensor, int], record: Record
) -> dict[nn.Module, set[int]]:
    """Return what each module waits for: its own parameters, and those it was seen to use.

    Parameters that nobody was seen to use may be used by anyone: all wait for them.
    """
    everyone = {number for number in numbers.values() if number not in record.used}
    needs: dict[nn.Module, set[int]] = {}
    for module in model.modules():
        wanted = {numbers[p] for p in module.parameters(recurse=False) if p in numbers}
        wanted |= {number for number, users in record.users.items() if module in users}
        if wanted or module is model:
            wanted |= everyone
        needs[module] = wanted
    return needs
