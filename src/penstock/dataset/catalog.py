"""Versions of an index: immutable, numbered, committed by one conditional put.

A catalog is a folder of the store: `v000001.json`, `v000002.json`, … and `parts/`. A version is a
small manifest that names its parts; parts are named by their content and never change. Writing a
version is one conditional put of its manifest, so of two writers exactly one wins and readers see
all of a version or nothing. Old versions stay, so their readers are not disturbed.

A manifest records the data set that it is a version of: the names that were asked for, the format
and its options. So a version is never mistaken for one of another data set, wherever its file lies.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from penstock.clock import Clock, SystemClock
from penstock.dataset.catalog_copies import CachedPart, local_copy
from penstock.dataset.columns import REINDEX
from penstock.dataset.part import Part, open_part
from penstock.dataset.part_files import open_verified, part_verified
from penstock.errors import CorruptError, FormatError, NotFoundError, OptionError
from penstock.storage.base import Store
from penstock.storage.folder import FolderStore
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX, checked_hash
from penstock.storage.patterns import EVERYTHING

FOLDER = ".penstock"
"""Where an index lies beside its data."""
_LAYOUT = 1
_LOOK_AGAIN_S = 0.5


_log = logging.getLogger("penstock.dataset")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class PartRef(msgspec.Struct, frozen=True, kw_only=True):
    """A part as a manifest names it."""

    name: str
    """Hash of the whole file, marks of the store included: another file has another name."""
    fingerprint: str
    """Hash of what the samples are; equal for copies of a data set."""
    num_samples: _Count
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    uri: str = ""
    """Where the objects lay when they were indexed; empty in manifests of older Penstocks."""

    def __post_init__(self) -> None:
        checked_hash(self.name)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a data set."""

    layout: int = _LAYOUT
    version: _Count
    spec: str = ""
    """Hash of the names that were asked for; empty in manifests of older Penstocks."""
    format: str
    options: dict[str, Any]
    num_samples: _Count
    num_objects: _Count
    size_bytes: _Count
    parts: Annotated[list[PartRef], msgspec.Meta(min_length=1)]
    replaces: str = ""
    """Hash of the manifest beside the data that this one, in a user's cache, replaces for that
    user."""

    @property
    def fingerprint(self) -> str:
        """A hash of what this version holds, known without opening any of it."""
        return xxhash.xxh3_128_hexdigest("".join(r.fingerprint for r in self.parts).encode())

    def is_of(self, spec: str, format: str | None, options: Mapping[str, Any] | None) -> bool:
        """Return whether this is a version of the data set with these names, format and options.

        A format or options of None are those that the version has. Older Penstocks wrote no spec;
        what they wrote is only found where whole folders are kept.
        """
        return (
            (self.spec or EVERYTHING_SPEC) == spec
            and format in (None, self.format)
            and (options is None or _canonical(options) == _canonical(self.options))
        )


# The type is prepared here, by one thread: threads that do so at once can end the process.
_MANIFESTS = msgspec.json.Decoder(Manifest)


def spec_of(names: Sequence[str]) -> str:
    """Return the hash of all names that a data set was asked for with, in their order."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(_text(names)))


def _text(names: Sequence[str]) -> list[str]:
    return [n.encode("utf-8", "surrogateescape").decode("latin-1") for n in names]


EVERYTHING_SPEC = spec_of(EVERYTHING)
"""The spec of a whole folder, bucket or prefix."""


def catalog_name(spec: str, format: str, options: Mapping[str, Any]) -> str:
    """Return the name of the catalog of one data set."""
    what = [spec, format, _canonical(options).decode()]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(what))


def _canonical(options: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(dict(options), order="sorted")
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"options of a format are plain values (numbers, texts, lists): {error}"
        ) from None


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
        pass  # Containers often run as a user without a home folder.
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
        record = self.record(version)
        return None if record is None else record.manifest()

    def record(self, version: int | None = None) -> VersionFile | None:
        """Return the file of a version, or of the latest, or None when there is none at all."""
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
        return VersionFile(name=f"{self.uri} version {version}", version=version, data=data)

    def read_soon(self, version: int, wait_s: float, clock: Clock | None = None) -> Manifest:
        """Return a version that another node has seen, waiting until it is visible here too."""
        clock = clock or SystemClock()
        end_s = clock.now_s() + wait_s
        # A listing makes the client of a network file system refresh what it has cached.
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

    def part_key(self, name: str) -> str:
        """Return the key of a part."""
        return f"{self.prefix}parts/{name}.idx"

    def add_part(self, part: Part, uri: str = "") -> PartRef:
        """Store a part of objects that lie at `uri`; nobody sees it until a version names it."""
        folder = cache_folder() / "parts"
        own = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}.idx"
        with store_error(str(own)):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                part.save(own)
                size_bytes = own.stat().st_size
                # The map outlives the name of the file, which is changed or removed below.
                with own.open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                name = xxhash.xxh3_128_hexdigest(memoryview(data))
                self.store.write(self.part_key(name), memoryview(data))
                if not isinstance(self.store, FolderStore):
                    # Kept as the local copy: whoever writes a part usually reads it next.
                    own.replace(folder / f"{name}.idx")
            finally:
                own.unlink(missing_ok=True)
        return PartRef(
            name=name,
            fingerprint=part.fingerprint,
            num_samples=part.num_samples,
            size_bytes=size_bytes,
            uri=uri,
        )

    def part(self, ref: PartRef) -> Part:
        """Return a part, mapped from where it lies or from a copy in the user's cache.

        Its bytes are what its name says, or this raises `CorruptError`.
        """
        key = self.part_key(ref.name)
        if isinstance(self.store, FolderStore):
            return open_verified(self.store.path_of(key), ref.name, stamp_folder())
        if self.store.source == "memory":
            return part_verified(self.store.read(key), ref.name, self.store.uri + key)
        copy = self._copy(ref)
        try:
            return open_verified(local_copy(copy), ref.name, stamp_folder())
        except CorruptError as error:
            _log.warning("%s; it is only a copy and is downloaded again", error)
            with store_error(str(copy.path)):
                copy.path.unlink(missing_ok=True)
        return open_verified(local_copy(copy), ref.name, stamp_folder())

    def part_unverified(self, ref: PartRef) -> Part:
        """Return a part as it lies there, for `verify`, which says what is wrong with it."""
        if isinstance(self.store, FolderStore):
            return open_part(self.store.path_of(self.part_key(ref.name)))
        return self.part(ref)

    def _copy(self, ref: PartRef) -> CachedPart:
        return CachedPart(
            store=self.store,
            key=self.part_key(ref.name),
            name=ref.name,
            size_bytes=ref.size_bytes,
            folder=cache_folder() / "parts",
        )


def stamp_folder() -> Path:
    """Return the folder of stamps, which say which large files were verified."""
    return cache_folder() / "verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a data set was found: a catalog, and the version there."""

    catalog: Catalog
    manifest: Manifest


class _CatalogLayout(msgspec.Struct):
    layout: int = 0


_LAYOUTS = msgspec.json.Decoder(_CatalogLayout)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFile:
    """The file of a version, before it is checked."""

    name: str
    """For messages."""
    version: int
    data: memoryview

    @property
    def digest(self) -> str:
        """The hash of the file."""
        return xxhash.xxh3_128_hexdigest(self.data)

    def manifest(self) -> Manifest:
        """Return what the file says, or raise `FormatError`."""
        way_out = f"use the Penstock that wrote it, or {REINDEX}"
        try:
            layout = _LAYOUTS.decode(self.data).layout
            if layout == _LAYOUT:
                manifest = _MANIFESTS.decode(self.data)
                if manifest.version != self.version:
                    raise FormatError(f"{self.name} says that it is version {manifest.version}")
                return manifest
        except (msgspec.MsgspecError, ValueError, RecursionError, FormatError) as error:
            raise FormatError(f"{self.name} is damaged ({error}); {way_out}") from None
        raise FormatError(
            f"{self.name} has layout {layout}, this Penstock reads {_LAYOUT}; {way_out}"
        )
