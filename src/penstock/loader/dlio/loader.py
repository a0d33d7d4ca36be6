"""`PenstockDataLoader`: Penstock's `Loader` in the place of DLIO's torch loader.

DLIO makes a loader, calls `read` once, then `next` for each epoch and `finalize` after it. The
order of an epoch comes from DLIO's own sampler, with its seed, over the block of samples that DLIO
gives to this rank. So it is the order of the torch loader, sample for sample. The orders of all
epochs are drawn in `read` and joined to one view of the data set, which the Loader walks as stored;
it therefore reads ahead across the end of an epoch.

A step of 5 ms leaves no time for a hand-over between processes, which takes half a millisecond. So
batches of little data are made and handed over several at a time, and `next` yields views of them.

DLIO's torch loader delivers its first batch when each of its workers has read one or more: they
share the disk. Utilisation leaves out that first step, and the store works during it. So the first
step here also waits until as many batches are made as DLIO's configuration has in flight.

Each rank is a world of its own to Penstock: DLIO has divided the samples already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from math import ceil
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.data_loader.torch_data_loader import dlio_sampler

import penstock
from penstock.errors import OptionError
from penstock.loader.dlio.files import open_files
from penstock.loader.dlio.ledger import Ledger
from penstock.loader.dlio.parse import parsed_sample, refuse_format

_Step = tuple[list[int], list[int], Any]
"""Positions in the view, sizes and images of the samples of one step."""
_HAND_OVER_BYTES = 16 << 20
"""Batches that are smaller than this together are handed over together."""
_LOOK_AHEAD_BYTES_MIN = 512_000_000
"""The Loader's default, which is raised where DLIO's configuration asks for more."""


class PenstockDataLoader(BaseDataLoader):  # type: ignore[misc]  # DLIO has no types
    """DLIO's data loader, carried out by Penstock; `reader.read_threads` is the number of workers.

    With `read_threads: 0` batches are made in the process of the rank, as DLIO's torch loader does.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._loader: penstock.Loader | None = None
        self._steps: Iterator[_Step] = iter(())
        self._samples: list[int] = []
        """DLIO's sample numbers of all epochs, in the order of delivery."""
        self._ledger = Ledger(
            self._args.output_folder, f"loader_{dataset_type}_{self._args.my_rank}"
        )
        self._delivered: tuple[list[int], list[int]] = ([], [])
        """Numbers and sizes of the samples delivered in this epoch."""

    def read(self) -> None:
        """Open the data set and start the Loader, which reads ahead from here on."""
        args = self._args
        refuse_format(str(self.format_type), args.num_samples_per_file)
        if args.preprocess_time:
            raise OptionError(
                f"reader.preprocess_time is {args.preprocess_time}; Penstock does not emulate it"
            )
        train = self.dataset_type is DatasetType.TRAIN
        index_map = args.train_global_index_map if train else args.val_global_index_map
        if not index_map:
            raise OptionError(
                "DLIO gave this rank no samples: set reader.data_loader_sampler to index"
            )
        files = args.file_list_train if train else args.file_list_eval
        dataset, numbers = open_files(files, str(self.format_type))
        self._samples = self._order_of_all_epochs()
        view = dataset.select([numbers[index_map[sample][0]] for sample in self._samples])
        size_bytes = self.batch_size * dataset.size_bytes // len(dataset)
        num_together = max(1, _HAND_OVER_BYTES // size_bytes)
        self._loader = penstock.Loader(
            view,
            batch_size=self.batch_size * num_together,
            shuffle=None,
            world=penstock.World(),
            transform=partial(parsed_sample, format=str(self.format_type), side=args.max_dimension),
            workers=args.read_threads or "here",
            look_ahead=max(_LOOK_AHEAD_BYTES_MIN, self._batches_ahead() * size_bytes),
        )
        steps = _steps_of(self._loader, self.batch_size)
        # Processes start here, not in the first step: DLIO sets its loaders up before an epoch.
        self._steps = _filled_first(chain([next(steps)], steps), self._batches_ahead())

    def next(self) -> Iterator[Any]:
        """Yield the batches of one epoch, each a tensor as DLIO's torch loader has it."""
        self._delivered = ([], [])
        for _ in range(self._steps_per_epoch()):
            positions, sizes_bytes, images = next(self._steps)
            # Before the yield: DLIO leaves the last iteration of an epoch there.
            self._delivered[0].extend(self._samples[i] for i in positions)
            self._delivered[1].extend(sizes_bytes)
            yield images

    def finalize(self) -> None:
        """Write the ledger of the epoch that has ended; end the Loader after the last one."""
        self._ledger.add(self.epoch_number, *self._delivered)
        self.epoch_number += 1
        if self.epoch_number > self._args.epochs and self._loader is not None:
            self._loader.close()

    def _order_of_all_epochs(self) -> list[int]:
        """Return DLIO's samples as its torch loader would draw them, cut to whole steps."""
        args = self._args
        sampler = dlio_sampler(
            args.my_rank,
            args.comm_size,
            self.num_samples,
            args.sample_shuffle,
            args.epochs,
            args.seed,
        )
        used = self._steps_per_epoch() * self.batch_size
        # The sampler shuffles its own list further in each epoch, so it is kept for all of them.
        return [sample for _ in range(args.epochs) for sample in list(sampler)[:used]]

    def _batches_ahead(self) -> int:
        """Return how many batches DLIO's torch loader would have in flight."""
        num_workers, prefetch_size = self._args.read_threads, self._args.prefetch_size
        if not num_workers:
            return 1  # torch reads nothing ahead without workers
        # DLIO divides by the workers and rounds up; 0 means torch's default, two for each worker.
        return int(num_workers * (ceil(prefetch_size / num_workers) or 2))

    def _steps_per_epoch(self) -> int:
        """Return how many batches DLIO takes before it ends an epoch."""
        steps = int(self.num_samples // (self.batch_size * self._args.comm_size))
        if steps < 1:
            raise OptionError(
                f"{self.num_samples} samples are no whole step of {self._args.comm_size} ranks "
                f"with batches of {self.batch_size}"
            )
        train = self.dataset_type is DatasetType.TRAIN
        limit = int(self._args.total_training_steps) if train else 0
        return min(steps, limit) if limit > 0 else steps


def _steps_of(loader: penstock.Loader, batch_size: int) -> Iterator[_Step]:
    """Yield the steps of all epochs, cut from batches of several steps."""
    for batch in loader:
        positions, sizes_bytes = batch.ids.tolist(), batch["size_bytes"].tolist()
        for first in range(0, len(positions), batch_size):
            step = slice(first, first + batch_size)
            yield positions[step], sizes_bytes[step], batch["image"][step]


def _filled_first(steps: Iterator[_Step], num_ahead: int) -> Iterator[_Step]:
    """Yield steps, the first of them when so many are there."""
    ahead = deque(islice(steps, num_ahead))
    while ahead:
        yield ahead.popleft()  # not from a list, which would keep the memory of all of them
    yield from steps
