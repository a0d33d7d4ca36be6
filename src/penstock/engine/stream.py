"""The stream of batches: which samples, in which order, from which place on. It reads no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints
from penstock.engine.job import BatchJob, BatchSlot, SampleGroup
from penstock.errors import OptionError
from penstock.order import (
    BlocksOrder,
    ColdOrder,
    GlobalOrder,
    MixtureOrder,
    Order,
    SequentialOrder,
    Steps,
)
from penstock.order.importance import Importance, ImportanceCourse, ImportanceOrder
from penstock.order.importance.options import Floats
from penstock.order.mixture import PERIOD_DEFAULT
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.options import LoaderOptions

RUN_BYTES = 4 << 20
"""Size of the runs that `blocks` keeps together, where a format has no blocks of its own."""
WINDOW_BYTES = 256 << 20
"""Size of the samples that `blocks` mixes. It is part of the order, so no machine may change it."""
_WINDOW_SAMPLES_MIN = 4096
_POSITIONS_AHEAD = 16_384
_SHARES_TOGETHER_MAX = 16
"""Up to this number, computing the ids of all ranks at once is faster than step by step."""


Assign = Callable[[Ints, Ints], Ints]
"""Takes the samples of a global batch and the size of each rank's share. Returns places in the
global batch: first those of rank 0's samples, then those of rank 1, and so on. The result must be
the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """Everything that decides which batch comes when, on one rank."""

    dataset: Dataset | Mixture
    order: Order
    world: World
    global_batch_size: int
    drop_last: bool
    assign: Assign | None = None
    """Assigns the samples of a global batch to ranks; None: each rank has a run of positions."""

    def everybody(self) -> BatchStream:
        """Return the same stream in whole global batches, as a world of one rank has it."""
        return replace(self, world=World(), assign=None)

    def steps(self, start: int = 0) -> Steps:
        """Return the steps of an epoch from a position on."""
        return Steps(
            num_samples=self.order.num_samples,
            global_batch_size=self.global_batch_size,
            num_ranks=self.world.num_ranks,
            drop_last=self.drop_last,
            start=start,
        )

    @property
    def course(self) -> ImportanceCourse | None:
        """The order as far as it is known, if it depends on losses."""
        return self.order if isinstance(self.order, ImportanceCourse) else None

    def is_next_known(self, slot: BatchSlot) -> bool:
        """Return whether the samples of the batch after this one are known."""
        epoch, start = slot.cursor_after
        stop = min(start + self.global_batch_size, self.order.num_samples)
        return self.course is None or self.course.is_known(epoch, stop)

    def slots(
        self, epoch: int, position: int, end_epoch: int | None, part: tuple[int, int] = (0, 1)
    ) -> Iterator[BatchSlot]:
        """Yield the batches of this rank from a place on, epoch after epoch.

        With `part=(k, n)`, yield only every n-th batch from the k-th on, counted across epochs;
        other processes make the others.
        """
        skip, every = part
        for e in count(epoch):
            if end_epoch is not None and e >= end_epoch:
                return
            start = position if e == epoch else 0
            num_steps = self.steps(start).num_steps
            yield from self._epoch_slots(e, start, range(skip, num_steps, every))
            skip = skip - num_steps if skip >= num_steps else (skip - num_steps) % every

    def _epoch_slots(self, epoch: int, start: int, chosen: range) -> Iterator[BatchSlot]:
        steps = self.steps(start)
        if self.assign is not None:
            yield from self._assigned_slots(self.assign, epoch, start, chosen)
            return
        done_before = start // self.global_batch_size
        share = steps.share(self.world.rank)
        ahead = max(1, _POSITIONS_AHEAD // (self.global_batch_size * chosen.step))
        if self.course is not None:
            ahead = 1  # Later batches may not be known yet.
        size = self.global_batch_size
        for first in range(0, len(chosen), ahead):
            several = chosen[first : first + ahead]
            # One row a batch, because making an array for each takes longer than its ids.
            begins = start + np.array(several)[:, None] * size
            positions = begins + np.arange(*share)
            masks = np.ones(positions.shape, bool)
            if several[-1] + 1 == steps.num_steps:
                masks[-1] = steps.positions(several[-1], self.world.rank)[1]
            for i, ids in enumerate(self._ids(epoch, steps, several, share)):
                step = several[i]
                is_last = step + 1 == steps.num_steps
                yield BatchSlot(
                    epoch=epoch,
                    step=done_before + step,
                    ids=ids,
                    positions=positions[i],
                    mask=masks[i],
                    num_counted=int(masks[i].sum()) if is_last else len(ids),
                    cursor_after=(epoch + 1, 0) if is_last else (epoch, start + (step + 1) * size),
                    weights=self._weights(epoch, positions[i]),
                    digest=0 if self.course is None else self.course.digest_at(epoch, begins[i, 0]),
                )

    def _weights(self, epoch: int, positions: Ints) -> Floats | None:
        """Return the factors of losses; 0 beyond the end of the epoch."""
        if self.course is None:
            return None
        stop = min(self.order.num_samples, int(positions[-1]) + 1)
        weights = np.zeros(len(positions), np.float32)
        known = self.course.weights(epoch, min(stop, int(positions[0])), stop)
        weights[: len(known)] = known
        return weights

    def _assigned_slots(
        self, assign: Assign, epoch: int, start: int, chosen: range
    ) -> Iterator[BatchSlot]:
        """Yield this rank's batches where `assign` gives samples to ranks."""
        shares = [self.steps(start).share(rank) for rank in range(self.world.num_ranks)]
        sizes = np.array([stop - first for first, stop in shares])
        mine = slice(*shares[self.world.rank])
        for whole in self.everybody()._epoch_slots(epoch, start, chosen):
            here = assign(whole.ids, sizes)[mine]
            mask = whole.mask[here]
            yield replace(
                whole,
                ids=whole.ids[here],
                positions=whole.positions[here],
                mask=mask,
                num_counted=int(mask.sum()),
                weights=None if whole.weights is None else whole.weights[here],
            )

    def _ids(self, epoch: int, steps: Steps, several: range, share: tuple[int, int]) -> list[Ints]:
        """Return this rank's ids for some steps; a few thousand ids at once are fastest."""
        low, high = share
        size = self.global_batch_size
        out = []
        if self.world.num_ranks * several.step <= _SHARES_TOGETHER_MAX:
            start, _ = steps.bounds(several[0])
            _, stop = steps.bounds(several[-1])
            run = self.order.ids(epoch, start, stop)
            firsts = [(step - several[0]) * size for step in several]
            out = [run[first + low : first + high] for first in firsts]
            if stop - start < firsts[-1] + size:
                out[-1] = self._padded(epoch, steps, several[-1])
            return out
        for step in several:
            begin, end = steps.bounds(step)
            if end - begin < size:
                out.append(self._padded(epoch, steps, step))
            else:
                out.append(self.order.ids(epoch, begin + low, begin + high))
        return out

    def _padded(self, epoch: int, steps: Steps, step: int) -> Ints:
        positions, mask = steps.positions(step, self.world.rank)
        if self.course is not None:
            # Ids at the beginning of the epoch are not known any more, so the last one fills up.
            positions = np.where(mask, positions, self.order.num_samples - 1)
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        return np.concatenate([self.order.ids(epoch, int(r[0]), int(r[-1]) + 1) for r in runs])


def stream_of(
    options: LoaderOptions,
    world: World,
    assign: Assign | None = None,
    course: ImportanceCourse | None = None,
) -> BatchStream:
    """Return the stream of one rank for a user's options."""
    total = options.global_batch_size or (options.batch_size or 0) * world.num_ranks
    return BatchStream(
        dataset=options.dataset,
        order=options.order if course is None else course,
        world=world,
        global_batch_size=total,
        drop_last=options.drop_last,
        assign=assign,
    )


def jobs_of(
    stream: BatchStream, slots: Iterator[BatchSlot], batches_a_job: int
) -> Iterator[BatchJob]:
    """Yield jobs: the next batches, with the places of their samples."""
    dataset = stream.dataset
    num_batches = 1  # The training loop waits for the first batch, so it is made alone.
    while several := _several(stream, slots, num_batches):
        num_batches = batches_a_job
        ids = several[0].ids if len(several) == 1 else np.concatenate([s.ids for s in several])
        groups = [_group(bound, where, local) for bound, where, local in dataset.groups(ids)]
        yield BatchJob(slots=several, groups=groups, num_samples=len(ids))


def _several(stream: BatchStream, slots: Iterator[BatchSlot], num_batches: int) -> list[BatchSlot]:
    """Return the batches of the next job; batches that are not known yet are left for later."""
    several = list(islice(slots, 1))
    while several and len(several) < num_batches and stream.is_next_known(several[-1]):
        found = next(slots, None)
        if found is None:
            break
        several.append(found)
    return several


def _group(bound: BoundPart, where: Ints, local_ids: Ints) -> SampleGroup:
    if bound.by_block:
        # Samples of one block side by side, so that each piece needs few blocks.
        by_block = np.argsort(local_ids, kind="stable")
        where, local_ids = where[by_block], local_ids[by_block]
    return SampleGroup(bound=bound, where=where, local_ids=local_ids)


def make_order(
    dataset: Dataset | Mixture,
    shuffle: Importance | str | bool | None,
    seed: int,
    global_batch_size: int | None,
) -> Order:
    """Return the order for a user's `shuffle`."""
    shuffle = shuffle_of(shuffle)
    if isinstance(shuffle, Importance):
        plain = make_order(dataset, "global", seed, global_batch_size)
        assert isinstance(plain, GlobalOrder | MixtureOrder)
        return ImportanceOrder(plain=plain, options=shuffle)
    if isinstance(dataset, Mixture):
        if shuffle not in ("global", "default"):
            raise OptionError(
                f"shuffle={shuffle!r}: a mixture is drawn at random; leave out shuffle="
            )
        return MixtureOrder(
            sizes=tuple(map(len, dataset.datasets)),
            weights=dataset.weights,
            seed=seed,
            num_samples=dataset.samples_per_epoch,
            period=global_batch_size or PERIOD_DEFAULT,
        )
    if len(dataset) == 0:
        raise OptionError(f"{dataset!r} is empty; there is nothing to load")
    if shuffle is None:
        return SequentialOrder(num_samples=len(dataset))
    if shuffle in ("global", "default"):
        return GlobalOrder(num_samples=len(dataset), seed=seed)
    starts = block_starts(dataset)
    blocks = BlocksOrder(
        block_starts=starts, seed=seed, window_blocks=_window_blocks(dataset, starts)
    )
    if shuffle == "blocks":
        return blocks
    return ColdOrder(first=blocks, later=GlobalOrder(num_samples=len(dataset), seed=seed))


def shuffle_of(shuffle: Importance | str | bool | None) -> Importance | str | None:
    """Return the kind of order for a user's `shuffle`; None, False and "sequential" are as stored.

    True, which torch's users write, is the default: "global", unless that would read blocks over
    and over.
    """
    if isinstance(shuffle, bool | np.bool_):
        return "default" if shuffle else None
    if shuffle is None or shuffle == "sequential":
        return None
    if isinstance(shuffle, Importance):
        return shuffle
    if isinstance(shuffle, str) and shuffle in ("default", "global", "blocks", "blocks-first"):
        return shuffle
    raise OptionError(
        f"shuffle={shuffle!r}: there are 'global' (or True), 'blocks', 'blocks-first', None (or "
        "False) and penstock.Importance(…)"
    )


def _window_blocks(dataset: Dataset, starts: Ints) -> int:
    num_blocks = len(starts) - 1
    block_bytes = max(1, dataset.size_bytes // num_blocks)
    block_samples = max(1, len(dataset) // num_blocks)
    return max(4, WINDOW_BYTES // block_bytes, -(-_WINDOW_SAMPLES_MIN // block_samples))


def block_starts(dataset: Dataset) -> Ints:
    """Return the first sample of each block: the format's own, or runs of a few megabytes."""
    if dataset.selection is not None:
        # A selection may have any order, so its runs have equal numbers of samples.
        mean = max(1, dataset.size_bytes // int(dataset.starts[-1]))
        return _even_starts(len(dataset), max(1, RUN_BYTES // mean))
    starts = [np.zeros(1, np.int64)]
    for bound in dataset.bound:
        table = bound.part.tables[0]
        if table.addressing == "blocks":
            own = table.block_starts()
        else:
            own = _run_starts(table.first_sample, table.sample_bytes())
        starts.append(own[1:] + bound.first)
    return np.concatenate(starts)


def _even_starts(num_samples: int, run: int) -> Ints:
    return np.append(np.arange(0, num_samples, run), num_samples).astype(np.int64)


def _run_starts(first_sample: Ints, lengths: Ints) -> Ints:
    """Return where runs of about `RUN_BYTES` start; no run crosses the end of an object."""
    ends = np.cumsum(lengths, dtype=np.int64)
    before = np.concatenate([[0], ends[:-1]])
    number = np.repeat(np.arange(len(first_sample) - 1), np.diff(first_sample))
    inside = before - before[np.minimum(first_sample[:-1], len(before) - 1)][number]
    run = inside // RUN_BYTES
    is_first = np.ones(len(run), bool)
    is_first[1:] = (run[1:] != run[:-1]) | (number[1:] != number[:-1])
    return np.append(np.flatnonzero(is_first), len(run)).astype(np.int64)
