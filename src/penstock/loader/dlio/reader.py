"""`PenstockReader`: Penstock reads the files, one of DLIO's own loaders does the rest.

A reader is asked for one sample at a time and is not told what comes next, so it cannot prefetch;
`loader` can. It is there for DLIO's other loaders, and to show what of a difference is the reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from dlio_benchmark.reader.reader_handler import FormatReader

from penstock.loader.dlio.files import open_files
from penstock.loader.dlio.ledger import Ledger
from penstock.loader.dlio.parse import Array, array_of, fitted, refuse_format


class PenstockReader(FormatReader):  # type: ignore[misc]  # DLIO has no types
    """DLIO's reader of one worker; it has a ledger of its own, named by its process."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        self._format = str(self._args.format)
        refuse_format(self._format, self._args.num_samples_per_file)
        self._dataset, self._numbers = open_files(self._file_list, self._format)
        self._ledger = Ledger(
            self._args.output_folder, f"reader_{dataset_type}_{self._args.my_rank}_{os.getpid()}"
        )

    def open(self, filename: str) -> Array:
        """Read a whole file through Penstock and return the array in it."""
        (raw,) = self._dataset[self._numbers[filename]].values()
        self._ledger.add(0, [self.image_idx], [len(raw)])
        return array_of(raw, self._format)

    def close(self, filename: str) -> None:
        """Nothing is held open."""

    def get_sample(self, filename: str, sample_index: int) -> None:
        """The file is the sample, and `open` has parsed it."""

    def next(self) -> Iterator[Any]:
        """Yield batches, for loaders that iterate."""
        yield from super().next()

    def read_index(self, image_idx: int, step: int) -> Any:
        """Return one sample, for loaders that ask by number.

        Not by DLIO's method: it formats the whole index map of the rank for a debug message, for
        each sample, also where nothing is logged.
        """
        self.step, self.image_idx = step, image_idx
        filename, _row = self.global_index_map[image_idx]
        return fitted(self.open(filename), self._args.max_dimension)

    def finalize(self) -> None:
        """Nothing is held open."""

    def is_index_based(self) -> bool:
        """Return True."""
        return True

    def is_iterator_based(self) -> bool:
        """Return True."""
        return True
