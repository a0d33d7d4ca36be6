"""The ledger of a run: which samples were delivered in which epoch, and how many bytes were read.

DLIO runs its stock loader when a class name is misspelt, and its readers throw the data away. So a
table of utilisation proves nothing by itself; beside a ledger it does. A ledger is a file of JSON
lines in DLIO's output folder, one writer a file, appended to as samples are delivered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Samples that were delivered together."""

    epoch: int
    """Epochs count from 1, as DLIO's do; 0 where the writer is not told."""
    ids: list[int]
    """DLIO's global sample numbers, in the order of delivery."""
    sizes_bytes: list[int]
    """Bytes that were read for each of them."""


class Ledger:
    """Appends entries to one file of its own."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self._path = Path(folder, f"penstock_{name}.ledger")

    def add(self, epoch: int, ids: Iterable[int], sizes_bytes: Iterable[int]) -> None:
        """Append one entry."""
        entry = {
            "epoch": epoch,
            "ids": [int(i) for i in ids],
            "sizes_bytes": [int(size) for size in sizes_bytes],
        }
        # Opened for each entry: a torch worker that DLIO ends by a signal then loses none of them.
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_ledgers(folder: str | Path, kind: str) -> list[LedgerEntry]:
    """Return the entries of all ledgers of a kind ("loader_train", "reader_train", …)."""
    return [
        LedgerEntry(**json.loads(line))
        for path in sorted(Path(folder).glob(f"penstock_{kind}_*.ledger"))
        for line in path.read_text().splitlines()
    ]
