"""`IterableDataset`: a data set in the shape that torch's DataLoader reads.

It is for trainers that insist on a DataLoader. Where you are free to choose, use `penstock.Loader`,
which knows its own place in the stream.

A DataLoader with W workers asks them in turn for batches. So worker w makes steps w, w + W,
w + 2W, … of this rank, and the DataLoader yields the stream of a single process, in its order. Each
worker makes its own loader after the fork, and uses nothing of the parent's.

Every `iter` goes on with the next epoch, even if the last one was left early: with worker processes
nobody knows how much of it was used. `set_epoch` chooses another epoch; to go on inside of an
epoch, use `state_dict`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from torch.utils import data

from penstock.arguments import count_of, flag_of
from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.engine.convert import Convert, converter
from penstock.engine.decode import Collate, Transform
from penstock.engine.options import LoaderOptions
from penstock.engine.stream import stream_of
from penstock.errors import OptionError
from penstock.loader.loader import Loader
from penstock.loader.torch.callers import check_batch_size, refuse_splitters
from penstock.loader.torch.shared_epochs import SharedEpochTable, tag_here
from penstock.loader.torch.worker_position import WorkerPosition, worker_here
from penstock.loader.torch.world import world_here
from penstock.order import Cursor, Steps
from penstock.order.importance import Importance
from penstock.storage.tier_sizes import Disk, Memory
from penstock.world import World

_THREADS_MAX = 2
"""Threads of a worker process: one works while the other waits for a read."""


class ViewOptions(TypedDict, total=False):
    """The options of `penstock.Loader` that `IterableDataset` has as well."""

    batch_size: int | None
    global_batch_size: int | None
    epochs: int | None
    seed: int
    shuffle: Literal["default", "global", "blocks", "blocks-first"] | bool | None
    drop_last: bool
    transform: Transform | None
    collate: Collate | None
    pad: Mapping[str, Any] | None
    threads: int | None
    tiers: Sequence[Memory | Disk]
    look_ahead: int | str
    output: Literal["auto", "torch", "numpy"]


class IterableDataset(data.IterableDataset[Any]):
    """This rank's share of a data set, for `torch.utils.data.DataLoader`.

    Yields whole batches for `DataLoader(view, batch_size=None, num_workers=…)`. With
    `samples=True` it yields samples for `DataLoader(view, batch_size=b)`, where b is also the
    `batch_size` of the view. Then no mask tells padding from samples. On one rank there is no
    padding; on several ranks the last batch is filled up from the start of the epoch, as
    `DistributedSampler` does, unless `drop_last` leaves it out.

    Args:
        dataset: a `Dataset` or a `Mixture`.
        samples: yield single samples instead of batches.
        world: who takes part; by default torch's process group, or what a launcher says.
        options: as for `penstock.Loader`: `batch_size` or `global_batch_size`, `epochs`, `seed`,
            `shuffle`, `drop_last`, `transform`, `collate`, `pad`, `threads` (of each worker),
            `tiers`, `look_ahead`, `output`.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        samples: bool = False,
        world: World | None = None,
        **options: Unpack[ViewOptions],
    ) -> None:
        for name in options.keys() - ViewOptions.__annotations__.keys():
            raise OptionError(_why_not(name))
        if samples and (options.get("collate") or options.get("pad")):
            raise OptionError(
                "with samples=True the DataLoader makes the batches: give it collate_fn= instead "
                "of collate= or pad= here"
            )
        # Checked here, so that no worker process refuses them. `_loader` derives the `threads` and
        # `look_ahead` of each worker.
        checked = LoaderOptions(dataset=dataset, world=world, **options)
        if isinstance(checked.shuffle, Importance):
            raise OptionError(
                "importance sampling needs the losses of every batch, and worker processes of a "
                "DataLoader do not hear of them: use penstock.Loader for shuffle=Importance(…)"
            )
        self.samples = flag_of("samples", samples)
        self._world = world
        self._options = checked
        self._given = tuple(options)
        """Names of the options that the user gave; a worker's loader has its own defaults."""
        self._epoch_table = SharedEpochTable(checked.epochs)
        self._place: WorkerPosition | None = None
        self._resumed: WorkerPosition | None = None

    @property
    def dataset(self) -> Dataset | Mixture:
        """The data set; after `load_state_dict`, the version of the state."""
        return self._options.dataset

    @property
    def world(self) -> World:
        """Who takes part."""
        return self._world or world_here()

    @property
    def epochs(self) -> int | None:
        """Epochs of one iteration; None never ends."""
        return self._options.epochs

    def _steps(self, world: World) -> Steps:
        steps = stream_of(self._options, world).steps()
        if self.samples:
            _check_for_samples(steps, self.epochs)
        return steps

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a data set with epochs=None never ends, it has no length")
        steps = self._steps(self.world)
        if not self.samples:
            return self.epochs * steps.steps_per_epoch
        padded = steps.steps_per_epoch * steps.global_batch_size // steps.num_ranks
        return self.epochs * (min(padded, steps.num_samples) if steps.num_ranks == 1 else padded)

    # -- where the stream stands -------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at an epoch, in all workers; no change if it would anyway."""
        epoch = count_of("epoch", epoch, least=0)
        if self._resumed is not None and self._resumed.epoch == epoch:
            return
        self._resumed = None
        if self._epoch_table.next(0, tag_here())[0] != epoch:
            self._epoch_table.put(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this worker, for torchdata's StatefulDataLoader."""
        place = self._resumed or self._place or self._first_place(tag_here())
        return {**self._cursor_at(place), **place.to_state()}

    def _cursor_at(self, place: WorkerPosition) -> Mapping[str, Any]:
        """Return the state of a loader that begins at a place."""
        order, fingerprint = self._options.order, self.dataset.fingerprint
        cursor = Cursor.at(
            order, fingerprint=fingerprint, epoch=place.epoch, position=place.position
        )
        return cursor.to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place: this worker's own, or that of a `penstock.Loader`."""
        loader = self._loader(World(), share=1)
        loader.load_state_dict(state)
        if "num_workers" in state:
            self._resumed = WorkerPosition.from_state(state, self._first_place(tag_here()))
        else:
            self._resumed = None
            self._epoch_table.put(loader.state_dict()["epoch"], loader.state_dict()["position"])
        # The loader has moved to the version of the data set that the state was saved with.
        self._options = replace(self._options, dataset=loader.dataset)

    def _first_place(self, tag: int) -> WorkerPosition:
        worker, num_workers = worker_here()
        epoch, position = self._epoch_table.next(worker, tag)
        return WorkerPosition(
            epoch=epoch,
            position=position,
            worker=worker,
            num_workers=num_workers,
            global_batch_size=self._steps(self.world).global_batch_size,
        )

    # -- iterating ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        world = self.world
        refuse_splitters(world)
        tag = tag_here()
        here = self._first_place(tag)
        if self._resumed is not None:
            here = WorkerPosition.from_state(self._resumed.to_state(), here)
            self._resumed = None
        self._place = here
        self._epoch_table.begin(here.worker, here.num_workers, tag, (here.epoch, here.position))
        return self._items(here, world)

    def _items(self, place: WorkerPosition, world: World) -> Iterator[Any]:
        share = self._steps(world).share(world.rank)
        check_batch_size(sys._getframe(1), share[1] - share[0] if self.samples else None)
        loader = self._loader(world, share=place.num_workers)
        loader.load_state_dict(self._cursor_at(place))
        with loader:
            for batch in loader.part(place.next_step, place.num_workers):
                if self.samples:
                    yield from self._samples(batch, place, world)
                place = replace(place, steps=place.steps + 1, samples=0)
                self._place = place
                if not self.samples:
                    yield batch

    def _samples(self, batch: Any, place: WorkerPosition, world: World) -> Iterator[Any]:
        convert = converter(self._options.output)
        kept = batch.mask.tolist() if world.num_ranks == 1 else [True] * len(batch.mask)
        several = [s for s, is_kept in zip(batch[_SAMPLES], kept, strict=True) if is_kept]
        for i in range(place.samples, len(several)):
            done = i + 1 == len(several)
            self._place = replace(place, steps=place.steps + done, samples=0 if done else i + 1)
            yield _converted(several[i], convert)

    def _loader(self, world: World, *, share: int) -> Loader:
        """Return the loader of one of `share` worker processes."""
        options = {name: getattr(self._options, name) for name in self._given}
        options["look_ahead"] = max(1, self._options.look_ahead_bytes // share)
        options["threads"] = self._options.threads or _threads_for(world, share)
        if self.samples:
            options["collate"] = _as_they_are
        loader = Loader(self.dataset, world=world, **options)
        loader.is_inner = True  # The loop asks the DataLoader, which `penstock trace` watches.
        return loader

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group, and perhaps not the launcher's variables.
        refuse_splitters(self.world)
        return {**self.__dict__, "_world": self.world}

    def __repr__(self) -> str:
        what = "samples" if self.samples else "batches"
        return f"IterableDataset({self.dataset!r}, {what})"


_SAMPLES = "samples"
_WHY_NOT = {
    "peers": "worker processes of a DataLoader come and go, so nodes cannot lend each other what "
    "they hold here: use penstock.Loader for peers= and assignment=",
    "workers": "its processes are those of the DataLoader: give that num_workers=",
    "trace": "only penstock.Loader sees the whole run: use it for trace=",
}
_WHY_NOT["assignment"] = _WHY_NOT["peers"]


def _why_not(name: str) -> str:
    why = f"{_WHY_NOT[name]}. " if name in _WHY_NOT else ""
    return (
        f"IterableDataset has no option {name!r}: {why}It has samples, world, "
        f"{', '.join(ViewOptions.__annotations__)}"
    )


def _as_they_are(samples: list[Any]) -> dict[str, list[Any]]:
    return {_SAMPLES: samples}


def _converted(sample: Any, convert: Convert) -> Any:
    if isinstance(sample, Mapping):
        return {name: convert(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(convert(value) for value in sample)
    return convert(sample)


def _check_for_samples(steps: Steps, epochs: int | None) -> None:
    if steps.global_batch_size % steps.num_ranks:
        raise OptionError(
            f"a global batch of {steps.global_batch_size} samples is not the same number on each "
            f"of {steps.num_ranks} ranks, which samples=True needs; give batch_size="
        )
    if epochs != 1 and not steps.drop_last and steps.num_samples % steps.global_batch_size:
        raise OptionError(
            f"an epoch of {steps.num_samples} samples has no whole number of batches of "
            f"{steps.global_batch_size}, so with samples=True and epochs={epochs} a batch would "
            "reach into the next epoch; use epochs=1 or drop_last=True"
        )


def _threads_for(world: World, num_workers: int) -> int | None:
    """Return the threads of a worker process; None, the loader's own choice, if this is none."""
    if data.get_worker_info() is None:
        return None
    processes = num_workers * -(-world.num_ranks // world.num_nodes)
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // processes))
