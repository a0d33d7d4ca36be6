"""Writing a data set: samples in, shards that any tool reads and their index out.

>>> import numpy as np
>>> with Writer("memory://writer-example/", shard_size="1MB") as writer:
...     for number in range(3):
...         writer.write({"npy": np.arange(number), "cls": number})
>>> writer.version
1
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.dataset.catalog import Manifest
from penstock.dataset.part import Part
from penstock.dataset.versions import addition_of
from penstock.dataset.writer_destination import Destination, open_destination
from penstock.dataset.writer_index import index_shard
from penstock.dataset.writer_layouts import EncodedSample, ShardLayout, TarLayout, npy_layout
from penstock.errors import DatasetError, ExistsError, OptionError
from penstock.storage.options import StoreOptions
from penstock.units import bytes_of

_log = logging.getLogger("penstock.dataset")

ShardFormat = Literal["tar", "npy"]


def write_shard(
    place: Destination,
    number: int,
    layout: ShardLayout,
    encoded: list[EncodedSample],
    *,
    is_new: bool,
) -> Part:
    """Put a shard whole and return its index."""
    data = layout.join(encoded)
    try:
        info = place.store.write(place.key(number), data, only_if_absent=is_new)
    except ExistsError as error:
        raise DatasetError(
            f"{error}: another writer is at work in {place.store.uri}; let it finish, then append"
        ) from error
    return index_shard(layout, info, data)


class Writer:
    """Writes samples to a folder or any store, as plain tar or `.npy`, with an index.

    `format="tar"` writes WebDataset tar: a sample is a dictionary from extensions to values, see
    `writer_encode` for what becomes of which value. `format="npy"` writes rows of arrays: all
    samples have the same fields of the same type and shape; a single field is a plain array,
    several are one array of records.

    Nothing is visible to readers of the index before `close`, which commits all shards as one
    version; the end of the `with` block calls it. A writer that is left by an exception commits
    nothing: shards that it has written stay where they are, belong to no version, and the
    exception says which they are and how to keep them.
    """

    def __init__(
        self,
        uri: str | Path,
        *,
        format: ShardFormat = "tar",
        shard_size: int | str = "128MB",
        append: bool = False,
        store: StoreOptions | None = None,
        workers: int = 2,
    ) -> None:
        """Take note of where and how to write; nothing is touched yet.

        Args:
            uri: a folder, a bucket or a prefix in one.
            format: "tar" or "npy".
            shard_size: where to begin the next shard; a larger sample is a shard of its own.
            append: add to a data set that is there, as a new version of it.
            store: endpoint, credentials and the like, where the environment does not say.
            workers: shards that are written at the same time, while the next one is filled.
        """
        self._shard_bytes = check_shards(format, shard_size)
        if workers < 1:
            raise OptionError(f"a writer needs at least 1 worker, got {workers}")
        self._uri, self._format, self._append = uri, format, append
        self._options, self._workers = store, workers
        self._layout: ShardLayout | None = TarLayout() if format == "tar" else None
        self._place: Destination | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._encoded: list[EncodedSample] = []
        self._filled_bytes = 0
        self._running: set[Future[None]] = set()
        # Threads of the executor add to it, each its own shard; it is read when all have ended.
        self._parts: dict[int, Part] = {}
        self.manifest: Manifest | None = None
        """What was committed; None before."""
        self.num_samples = 0
        """Samples written so far, by this writer."""
        self.num_shards = 0
        """Shards begun so far, without the one that is being filled."""

    @property
    def version(self) -> int:
        """The version that was committed; 0 before."""
        return self.manifest.version if self.manifest else 0

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _begin(self) -> Destination:
        if self.manifest is not None:
            raise DatasetError(
                f"{self._uri} was closed as version {self.version}; open a new Writer with "
                "append=True to add to it"
            )
        if self._place is None:
            name = f"writer-{secrets.token_hex(6)}"
            self._place, _ = open_destination(
                self._uri, self._format, name, append=self._append, options=self._options
            )
            self._executor = ThreadPoolExecutor(self._workers, "penstock-write")
        return self._place

    def write(self, sample: Mapping[str, Any], key: str | None = None) -> None:
        """Add a sample: values by field name.

        The key names it in a tar (`key.jpg`, `key.cls`); without one samples are numbered. As in
        WebDataset a key may also be the sample's `__key__`; other names with two underscores are
        left out.
        """
        place = self._begin()
        fields = {n: _own(value) for n, value in sample.items() if not n.startswith("__")}
        key = key or sample.get("__key__") or sample_key(place.num_samples_before, self.num_samples)
        if self._layout is None:
            self._layout = npy_layout(fields)
            place.check_layout(self._layout)
        encoded = self._layout.encode(key, fields)
        if self._encoded and self._filled_bytes + encoded.size_bytes > self._shard_bytes:
            self._flush(place, self._layout)
        self._encoded.append(encoded)
        self._filled_bytes += encoded.size_bytes
        self.num_samples += 1

    def _flush(self, place: Destination, layout: ShardLayout) -> None:
        assert self._executor is not None
        number, encoded = self.num_shards, self._encoded
        self._encoded, self._filled_bytes = [], 0
        self.num_shards += 1
        # Back-pressure: at most so many whole shards are in memory, beside the one being filled.
        self._wait(self._workers - 1)

        def write() -> None:
            self._parts[number] = write_shard(place, number, layout, encoded, is_new=True)

        self._running.add(self._executor.submit(write))  # Its errors are raised by `_wait`.

    def _wait(self, running_max: int) -> None:
        """Wait until at most so many shards are being written; an error of one is raised here."""
        while len(self._running) > running_max:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def close(self) -> None:
        """Write what is left and commit the version; afterwards, and only then, it can be read."""
        if self.manifest is not None:
            return
        place = self._begin()
        try:
            if self._encoded:
                assert self._layout is not None
                self._flush(place, self._layout)
            self._wait(0)
            if self._layout is None or not self._parts:
                place.forget()
                raise DatasetError(f"nothing was written to {self._uri}: a data set needs a sample")
            parts = [self._parts[number] for number in range(self.num_shards)]
            self.manifest = place.commit(addition_of(parts), self._layout)
        except BaseException as error:
            self._abandon(error)
            raise
        self._stop()
        # Outside of the block above: the version is committed, whatever happens to the note.
        place.forget(self.manifest)

    def _stop(self) -> None:
        # Waits for shards that are being written: none may appear after the writer has said which
        # shards there are.
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _abandon(self, error: BaseException) -> None:
        self._stop()
        place, self._encoded = self._place, []
        if place is None or self.manifest is not None:
            return
        if not self.num_shards:
            place.forget()
            return
        note = place.left()
        error.add_note(note)
        _log.warning(note)


def _own(value: Any) -> Any:
    # The caller may use its buffer again before the shard is written.
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def sample_key(num_samples_before: int, position: int) -> str:
    """Return the key of a sample that has none of its own.

    >>> sample_key(100, 23)
    '000000123'
    """
    return f"{num_samples_before + position:09}"


def check_shards(format: str, shard_size: int | str) -> int:
    """Return the size of a shard in bytes, or raise when it or the format makes no sense."""
    if format not in ("tar", "npy"):
        raise OptionError(f"shards are written as 'tar' or 'npy', not {format!r}")
    shard_bytes = bytes_of(shard_size)
    if shard_bytes < 1:
        raise OptionError(f"shard_size must be at least 1 byte, got {shard_size!r}; try '128MB'")
    return shard_bytes
