"""DLIO's files as a Penstock data set."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import abspath, commonpath, dirname
from typing import Any

import penstock
from penstock.errors import ChangedError


def open_files(paths: Sequence[str], extension: str) -> tuple[penstock.Dataset, dict[str, int]]:
    """Return the folder of these files as a data set, and the number of each file in it, by path.

    Each file is a sample of one field that stays bytes. Paths are made absolute as DLIO makes them
    for its index map: links are left as they are.
    """
    folder = commonpath([dirname(abspath(path)) for path in paths])  # noqa: PTH100, PTH120
    options: dict[str, Any] = {"format": "files", "extensions": [extension], "classes": False}
    try:
        dataset = penstock.open(folder, **options)
    except ChangedError:
        # DLIO has generated the data again. Indexing reads the listing and nothing else.
        dataset = penstock.open(folder, rebuild=True, **options)
    numbers = {f"{folder}/{dataset.key(number)}": number for number in range(len(dataset))}
    return dataset.with_decoders(dict.fromkeys(dataset.fields)), numbers
