"""Versions of an index: immutable, numbered, committed by one conditional put.

A catalog is a folder of the store: `v000001.json`, `v000002.json`, … and `parts/`. A version is a
small manifest that names its parts; parts are named by their content and never change. Writing a
version is one conditional put of its manifest, so of two writers exactly one wins and readers see
all of a version or nothing. Old versions stay: who reads one is not disturbed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.clock import Clock, SystemClock
from penstock.dataset.catalog_copies import Copy, local_copy
from penstock.dataset.columns import parse_columns
from penstock.dataset.part import Part, open_part, part_of
from penstock.errors import FormatError, NotFoundError, OptionError
from penstock.storage.base import Store
from penstock.storage.folder import FolderStore

FOLDER = ".penstock"
"""Where an index lies beside its data."""
_LAYOUT = 1
_LOOK_AGAIN_S = 0.5


class PartRef(msgspec.Struct, frozen=True, kw_only=True):
    """A part as a manifest names it."""

    name: str
    """Hash of the whole file, marks of the store included: another file has another name."""
    fingerprint: str
    """Hash of what the samples are; equal for copies of a data set."""
    num_samples: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a data set."""

    layout: int = _LAYOUT
    version: int
    format: str
    options: dict[str, Any]
    num_samples: int
    num_objects: int
    size_bytes: int
    parts: list[PartRef]

    @property
    def fingerprint(self) -> str:
        """A hash of what this version holds, known without opening any of it."""
        return xxhash.xxh3_128_hexdigest("".join(r.fingerprint for r in self.parts).encode())


def cache_folder() -> Path:
    """Return the folder where indexes and work in progress of this user are kept."""
    if "PENSTOCK_CACHE" in os.environ:
        return Path(os.environ["PENSTOCK_CACHE"])
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (base / "penstock").mkdir(parents=True, exist_ok=True)
        if os.access(base / "penstock", os.W_OK):
            return base / "penstock"
    except (OSError, RuntimeError):
        pass  # Containers often run as a user without a home.
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """The versions of one data set."""

    store: Store
    """Where the catalog lies; not always where the data lies."""
    prefix: str
    """Its folder there, ending with `/`."""

    @property
    def uri(self) -> str:
        """Where this catalog lies, for messages."""
        return self.store.uri + self.prefix

    def versions(self) -> list[int]:
        """Return the numbers of all versions, oldest first."""
        if not self.store.can_list:
            return self._probe_versions()
        names = (o.key[len(self.prefix) :] for o in self.store.list(self.prefix + "v"))
        return sorted(int(n[1:-5]) for n in names if n.endswith(".json") and n[1:-5].isdigit())

    def _probe_versions(self) -> list[int]:
        found: list[int] = []
        try:
            while True:
                self.store.info(self._key(len(found) + 1))
                found.append(len(found) + 1)
        except NotFoundError:
            return found

    def _key(self, version: int) -> str:
        return f"{self.prefix}v{version:06}.json"

    def read(self, version: int | None = None) -> Manifest | None:
        """Return a version, or the latest, or None when there is none at all."""
        if version is None:
            versions = self.versions()
            if not versions:
                return None
            version = versions[-1]
        try:
            data = self.store.read(self._key(version))
        except NotFoundError:
            have = ", ".join(map(str, self.versions())) or "none"
            raise OptionError(f"{self.uri} has no version {version}; it has: {have}") from None
        return _parsed(data, f"{self.uri} version {version}")

    def read_soon(self, version: int, wait_s: float, clock: Clock | None = None) -> Manifest:
        """Return a version that somebody has seen, waiting for it to be seen here too."""
        clock = clock or SystemClock()
        end_s = clock.now_s() + wait_s
        # A listing also makes a network file system look again.
        while clock.now_s() < end_s and version not in self.versions():
            clock.sleep(min(_LOOK_AGAIN_S, wait_s))
        manifest = self.read(version)
        assert manifest is not None
        return manifest

    def newest(self, known: int) -> int:
        """Return the number of the latest version, asking once when it is the known one still.

        Numbers have no gaps: where the next one is missing, there is none after it.
        """
        try:
            self.store.info(self._key(known + 1))
        except NotFoundError:
            return known
        return self.versions()[-1]

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible, or raise `ExistsError` when another writer was first."""
        data = msgspec.json.format(msgspec.json.encode(manifest))
        self.store.write(self._key(manifest.version), data, only_if_absent=True)

    def _part_key(self, name: str) -> str:
        return f"{self.prefix}parts/{name}.idx"

    def add_part(self, part: Part) -> PartRef:
        """Store a part; it is seen by nobody until a version names it."""
        folder = cache_folder() / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f".penstock-tmp-{secrets.token_hex(8)}.idx"
        try:
            part.save(own)
            size_bytes = own.stat().st_size
            with own.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            name = xxhash.xxh3_128_hexdigest(memoryview(data))
            self.store.write(self._part_key(name), memoryview(data))
            if not isinstance(self.store, FolderStore):
                own.replace(folder / f"{name}.idx")  # Who writes an index usually reads it next.
        finally:
            own.unlink(missing_ok=True)
        return PartRef(
            name=name,
            fingerprint=part.fingerprint,
            num_samples=part.num_samples,
            size_bytes=size_bytes,
        )

    def part(self, ref: PartRef) -> Part:
        """Return a part, mapped from where it lies or from a copy in the user's cache."""
        key = self._part_key(ref.name)
        if isinstance(self.store, FolderStore):
            return open_part(self.store.path_of(key))
        if self.store.source == "memory":
            return part_of(parse_columns(self.store.read(key), self.store.uri + key))
        copy = Copy(
            store=self.store,
            key=key,
            name=ref.name,
            size_bytes=ref.size_bytes,
            folder=cache_folder() / "parts",
        )
        return open_part(local_copy(copy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a data set was found: a catalog, and the version there."""

    catalog: Catalog
    manifest: Manifest


class _Layout(msgspec.Struct):
    layout: int = 0


def _parsed(data: memoryview, name: str) -> Manifest:
    way_out = "use the Penstock that wrote it, or index anew with `penstock index --rebuild`"
    try:
        layout = msgspec.json.decode(data, type=_Layout).layout
        if layout == _LAYOUT:
            return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{name} is damaged ({error}); {way_out}") from error
    raise FormatError(f"{name} has layout {layout}, this Penstock reads {_LAYOUT}; {way_out}")
