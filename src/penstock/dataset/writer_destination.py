"""Where shards are written, so that readers see a whole version or nothing of it.

Shards lie under their own names and are put whole. Before the first one a *job* is noted in
`.penstock/pack/`. The version is committed last, by one conditional put, and then the note is
removed. So if the job of a note has committed no version, the shards that no version names belong
to unfinished work. A note that is left after the commit, because the writer was killed or may not
delete, means nothing: the version shows that the job is finished. Beside the note, `pack` keeps the
index of each finished shard, which is how a killed one goes on where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.dataset.build_changes import compare
from penstock.dataset.build_scan import WorkFolder
from penstock.dataset.catalog import FOLDER, Catalog, Manifest
from penstock.dataset.formats import format_named
from penstock.dataset.part import Part
from penstock.dataset.versions import Addition, Heading, next_version
from penstock.dataset.writer_layouts import NpyLayout, ShardLayout
from penstock.errors import (
    CorruptError,
    DatasetError,
    ExistsError,
    FormatError,
    NotFoundError,
    OptionError,
    PenstockError,
    StoreError,
)
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.keys import is_hidden
from penstock.storage.locate import open_store
from penstock.storage.options import StoreOptions

_log = logging.getLogger("penstock.dataset")

JOBS = f"{FOLDER}/pack/"
"""Where unfinished work is noted."""
SHARDS_MAX = 1_000_000
"""Names have six digits, and must sort as they count."""


class WriteJob(msgspec.Struct, frozen=True, kw_only=True):
    """A note of work that has begun."""

    layout: int = 1
    base_version: int
    """The version that is appended to; 0 for a new data set."""
    first_shard: int
    """Number of the first shard that is written."""
    is_over: bool = False
    """Whether it has ended; for stores in which the note could not be removed."""


# The type is prepared here, by one thread: threads that do so at once can end the process.
_JOBS = msgspec.json.Decoder(WriteJob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A place to write shards to, and the version that they will be added to."""

    store: Store
    format: str
    job_name: str
    job: WriteJob
    base: Manifest | None
    """The version that is appended to, if any."""

    @property
    def catalog(self) -> Catalog:
        """Where the versions are kept: where `open` looks for those of a whole folder."""
        return _catalog(self.store)

    def key(self, number: int) -> str:
        """Return the name of a shard, counted from the first that this job writes."""
        total = self.job.first_shard + number
        if total >= SHARDS_MAX:
            raise OptionError(
                f"{self.store.uri} would have more than {SHARDS_MAX} shards; choose a larger "
                "shard_size (128MB to 1GB is usual)"
            )
        return _shard_key(total, self.format)

    @property
    def num_samples_before(self) -> int:
        """Samples that are there already."""
        return self.base.num_samples if self.base else 0

    def check_layout(self, layout: ShardLayout) -> None:
        """Raise unless rows of this layout can follow those that are there."""
        if self.base is None or not isinstance(layout, NpyLayout):
            return
        fields = self.catalog.part(self.base.parts[0]).fields
        have = [(f.name, f.dtype, f.shape) for f in fields]
        want = list(zip(layout.names, layout.dtypes, layout.shapes, strict=True))
        if have != want:
            raise OptionError(
                f"{self.store.uri} has rows of {have}, the new samples are {want}; rows of one "
                "data set are all alike: write these to another destination"
            )

    @property
    def work(self) -> WorkFolder:
        """Where the indexes of finished shards are kept, by `part_name`."""
        return WorkFolder(store=self.store, prefix=f"{JOBS}{self.job_name}/")

    def kept(self, number: int) -> Part | None:
        """Return the index of a shard that is finished and lies there unchanged."""
        try:
            part = self.work.part(part_name(number))
            changes = compare([part], [self.store.info(self.key(number))])
        except (NotFoundError, FormatError, CorruptError):
            return None  # Not there, or damaged: the shard is written again.
        return None if changes.changed or changes.gone else part

    def commit(self, addition: Addition, layout: ShardLayout) -> Manifest:
        """Make all shards visible as one version; `forget` the job afterwards."""
        catalog = self.catalog
        version = self.job.base_version + 1
        heading = Heading(version=version, format=self.format, options=layout.options)
        manifest = next_version(catalog, self.base, addition, heading, store=self.store)
        try:
            catalog.commit(manifest)
        except ExistsError:
            there = catalog.read(manifest.version)
            assert there is not None
            if there.fingerprint != manifest.fingerprint:
                raise DatasetError(
                    f"{catalog.uri}: another writer committed version {manifest.version} first, so "
                    f"{addition.outline.num_objects} shards from {self.key(0)} on belong to no "
                    f"version. {_ways_out(self.store, self.job_name)}"
                ) from None
            manifest = there  # The same pack was started twice: both have made the same.
        return manifest

    def committed(self) -> Manifest | None:
        """Return the version that this job has committed, if it has."""
        return _committed(self.store, self.job)

    def refuse_newer(self) -> None:
        """Raise when another writer has committed a version after the one that this job began
        with."""
        base_version = self.job.base_version
        newest = self.catalog.newest(base_version)
        if newest != base_version:
            raise DatasetError(
                f"{self.store.uri} has version {newest}, {self.job_name} began with version "
                f"{base_version} and cannot go on. {_ways_out(self.store, self.job_name)}"
            )

    def forget(self, committed: Manifest | None = None) -> None:
        """Remove the note of a job that has ended, or say in it that it has; never raises.

        The result stands whether or not the note can be removed, so a refusal is only reported.
        """
        key = _job_key(self.job_name)
        try:
            for info in list(self.store.list(f"{JOBS}{self.job_name}/")):
                self.store.delete(info.key)
            # The note goes last: while it is there, another run can finish the removal.
            self.store.delete(key)
            return
        except StoreError as error:
            refused = error
        over = msgspec.structs.replace(self.job, is_over=True)
        way_out = "It is in nobody's way: leave it, or let somebody remove it who may delete"
        try:
            self.store.write(key, msgspec.json.encode(over))
        except StoreError:
            if committed is None:
                way_out = "Delete it before anything else is written there"
        done = "nothing was written"
        if committed is not None:
            done = f"version {committed.version} is committed and whole"
        _log.warning(
            "%s: %s; only the note of the job, %s, could not be removed (%s). %s",
            self.store.uri, done, key, refused, way_out,
        )  # fmt: skip

    def left(self) -> str:
        """Return what is true of the shards of a job that fails now, in sentences."""
        uri, version = self.store.uri, self.job.base_version + 1
        try:
            committed = self.committed()
        except PenstockError as error:
            return (
                f"Whether version {version} of {uri} was committed is not known ({error}): look "
                f"with `penstock info {uri}` once the store answers, and keep its shards."
            )
        if committed is not None:
            return f"Version {version} of {uri} was committed before that, and is whole."
        return (
            f"No version of {uri} was committed, so readers see nothing of this writer. The shards "
            f"that it wrote, from {self.key(0)} on, are whole files. "
            f"{_ways_out(self.store, self.job_name)}."
        )


def _catalog(store: Store) -> Catalog:
    return Catalog(store, f"{FOLDER}/all/")


def _shard_key(number: int, format: str) -> str:
    return f"shard-{number:06}.{format}"


def part_name(number: int) -> str:
    """Return the name of the index of a finished shard in the work folder of its job."""
    return f"{number:06}"


def _job_key(name: str) -> str:
    return f"{JOBS}{name}.json"


def _notes(store: Store) -> dict[str, WriteJob]:
    """Return all notes of jobs, by name."""
    notes = {}
    for info in list(store.list(JOBS)):
        name = info.key.removeprefix(JOBS)
        if "/" in name or not name.endswith(".json"):
            continue
        try:
            notes[name.removesuffix(".json")] = _job(store, info.key)
        except NotFoundError:
            continue  # Its job has ended since the listing.
    return notes


def _job(store: Store, key: str) -> WriteJob:
    try:
        return _JOBS.decode(store.read(key))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{store.uri}{key} is no note of a job ({error}); if no pack or Writer is at work "
            "there, delete it"
        ) from error


def _committed(store: Store, job: WriteJob) -> Manifest | None:
    """Return the version after a job's base, if it names the job's first shard."""
    catalog = _catalog(store)
    if catalog.newest(job.base_version) == job.base_version:
        return None
    manifest = catalog.read(job.base_version + 1)
    assert manifest is not None
    first = _shard_key(job.first_shard, manifest.format)
    tables = catalog.part(manifest.parts[-1]).tables  # What a version adds is its last part.
    known = any(table.key(n) == first for table in tables for n in range(table.num_objects))
    return manifest if known else None


def unfinished_jobs(store: Store) -> list[str]:
    """Return the names of jobs that have begun to write to a store and have committed nothing."""
    return [
        name
        for name, job in _notes(store).items()
        if not job.is_over and _committed(store, job) is None
    ]


def _ways_out(store: Store, job_name: str) -> str:
    """Return what to do about a job that will not go on. Its shards may be the only copy."""
    return (
        f"To keep its shards, delete only {_job_key(job_name)} and run `penstock index "
        f"{store.uri}`; to write them again, choose another destination"
    )


def refuse_unfinished(store: Store) -> None:
    """Raise when a store holds the shards of unfinished work, which must not be indexed."""
    jobs = unfinished_jobs(store) if store.can_list else []
    if jobs:
        raise DatasetError(
            f"{store.uri} is being written ({jobs[0]} has not finished), so there is nothing whole "
            "to index yet; let it finish, or run it again if it was killed. "
            f"{_ways_out(store, jobs[0])}"
        )


def open_destination(
    uri: str | Path,
    layout_format: str,
    job_name: str,
    *,
    append: bool,
    options: StoreOptions | None,
) -> tuple[Destination, bool]:
    """Return a place to write to, and whether a job of that name goes on there.

    A job that is new is noted; one that goes on keeps what it had begun with. One that goes on may
    have committed its version already.
    """
    store = open_store(uri, options)
    if not store.can_list:
        raise OptionError(f"{store.uri} cannot be written: plain http has no way to; use a store")
    noted = _notes(store).get(job_name)
    goes_on = noted is not None and not noted.is_over
    if noted is not None and goes_on:
        job = noted
        base = _catalog(store).read(job.base_version) if job.base_version else None
    else:
        base = _catalog(store).read()
        first = _checked_first(store, base, layout_format, unfinished_jobs(store), append)
        job = WriteJob(base_version=base.version if base else 0, first_shard=first)
        is_new = noted is None  # Else it replaces the note of a job that is over.
        store.write(_job_key(job_name), msgspec.json.encode(job), only_if_absent=is_new)
    place = Destination(store=store, format=layout_format, job_name=job_name, job=job, base=base)
    if not goes_on:
        _refuse_others(place)
    return place, goes_on


def _refuse_others(place: Destination) -> None:
    """Raise when another writes there too, or has since this one looked for the first time.

    Every writer notes its job before it looks here. So of two that begin at the same moment at
    least one sees the other, and none goes on from a version that is no longer the latest: it would
    write over the shards of the one that is.
    """
    others = [name for name in unfinished_jobs(place.store) if name != place.job_name]
    base_version = place.job.base_version
    newest = place.catalog.newest(base_version)
    if others or newest != base_version:
        place.forget()
        what = f"is being written by {others[0]}" if others else f"has version {newest} since now"
        raise DatasetError(
            f"{place.store.uri} {what}, which began in the same moment; nothing was written: let "
            "the other finish, then run this again"
        )


def _checked_first(
    store: Store, base: Manifest | None, format: str, jobs: Sequence[str], append: bool
) -> int:
    """Return the number of the first new shard, or say what stands in the way."""
    if jobs:
        raise DatasetError(
            f"{store.uri} holds what {len(jobs)} unfinished pack or writer left ({jobs[0]}); "
            "run it again with the same source and options if it was a pack. "
            f"{_ways_out(store, jobs[0])}"
        )
    visible = [o for o in store.list() if not is_hidden(o.key)]
    if base is None:
        if visible:
            raise DatasetError(
                f"{store.uri} is not empty: {len(visible)} objects, the first is "
                f"{visible[0].key!r}; choose another destination, or index them with "
                "`penstock index` and pass append=True"
            )
        return 0
    if not append:
        raise DatasetError(
            f"{store.uri} already has version {base.version} with {base.num_samples} samples; pass "
            "append=True to add to it as a new version, or choose another destination"
        )
    return _first_after(store, base, format, visible)


def _first_after(store: Store, base: Manifest, format: str, visible: Sequence[ObjectInfo]) -> int:
    if base.format != format:
        raise OptionError(
            f"{store.uri} is {base.format}, format={format!r} cannot be appended to it; write "
            f"format={base.format!r} or to another destination"
        )
    parts = [_catalog(store).part(ref) for ref in base.parts]
    mine = [o for o in visible if format_named(format).claims(o.key)]
    new = compare(parts, mine).new
    if new:
        raise DatasetError(
            f"{store.uri} has {len(new)} {format} objects that version {base.version} does not "
            f"know, the first is {new[0].key!r}; add them with `penstock index`, or move them "
            "elsewhere"
        )
    names = [o.key.removeprefix("shard-").removesuffix(f".{format}") for o in mine]
    return max((int(n) for n in names if n.isdigit()), default=-1) + 1
