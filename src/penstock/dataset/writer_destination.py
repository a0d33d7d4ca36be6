"""Where shards are written, so that readers see a whole version or nothing of it.

Shards lie under their own names and are put whole. Before the first one a *job* is noted in
`.penstock/pack/`: as long as it is there, the shards that no version names belong to work that is
not finished. The version is committed last, by one conditional put, and then the note is removed.
Beside the note, `pack` keeps the index of each finished shard, which is how a killed one goes on
where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.dataset.build import compare
from penstock.dataset.catalog import FOLDER, Catalog, Manifest
from penstock.dataset.columns import parse_columns
from penstock.dataset.formats import format_named
from penstock.dataset.part import Part, part_of, recomputed
from penstock.dataset.versions import Addition, Heading, next_version
from penstock.dataset.writer_index import part_bytes
from penstock.dataset.writer_layouts import Layout, NpyLayout
from penstock.errors import DatasetError, ExistsError, FormatError, NotFoundError, OptionError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.keys import is_hidden
from penstock.storage.locate import open_store
from penstock.storage.options import StoreOptions

JOBS = f"{FOLDER}/pack/"
"""Where work that is not finished is noted."""
SHARDS_MAX = 1_000_000
"""Names have six digits, and must sort as they count."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A note of work that is not finished."""

    layout: int = 1
    base_version: int
    """The version that is appended to; 0 for a new data set."""
    first_shard: int
    """Number of the first shard that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A place to write shards to, and the version that they will be added to."""

    store: Store
    format: str
    job_name: str
    job: Job
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
        return f"shard-{total:06}.{self.format}"

    @property
    def num_samples_before(self) -> int:
        """Samples that are there already."""
        return self.base.num_samples if self.base else 0

    def check_layout(self, layout: Layout) -> None:
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

    def keep(self, number: int, part: Part) -> None:
        """Note that a shard is finished."""
        self.store.write(f"{JOBS}{self.job_name}/{number:06}.idx", part_bytes(part))

    def kept(self, number: int) -> Part | None:
        """Return the index of a shard that is finished and lies there unchanged."""
        name = f"{JOBS}{self.job_name}/{number:06}.idx"
        try:
            part = part_of(parse_columns(self.store.read(name), self.store.uri + name))
            changes = compare([part], [self.store.info(self.key(number))])
            if recomputed(part) != part.fingerprint:
                return None
        except (NotFoundError, FormatError):
            return None  # Not there, or damaged: the shard is written again.
        return None if changes.changed or changes.gone else part

    def commit(self, addition: Addition, layout: Layout) -> Manifest:
        """Make all shards visible as one version, and forget the job."""
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
                    f"{catalog.uri}: another writer committed version {manifest.version} first; "
                    f"{addition.outline.num_objects} shards from {self.key(0)} on belong to no "
                    "version unless it names them: delete those it does not, and append again"
                ) from None
            manifest = there  # The same pack was started twice: both have made the same.
        self.forget()
        return manifest

    def forget(self) -> None:
        """Remove the note of this job; the last thing that is removed is the note itself."""
        for info in list(self.store.list(f"{JOBS}{self.job_name}/")):
            self.store.delete(info.key)
        self.store.delete(_job_key(self.job_name))


def _catalog(store: Store) -> Catalog:
    return Catalog(store, f"{FOLDER}/all/")


def _job_key(name: str) -> str:
    return f"{JOBS}{name}.json"


def unfinished_jobs(store: Store) -> list[str]:
    """Return the names of jobs that write to a store and are not finished."""
    listed = (info.key.removeprefix(JOBS) for info in store.list(JOBS))
    return [name.removesuffix(".json") for name in listed if name.endswith(".json")]


def refuse_unfinished(store: Store) -> None:
    """Raise when what lies in a store is half of something, so that nobody indexes the half."""
    jobs = unfinished_jobs(store) if store.can_list else []
    if jobs:
        raise DatasetError(
            f"{store.uri} is being written ({jobs[0]} has not finished), so there is nothing whole "
            "to index yet; let it finish, or run it again if it was killed; if it was given up, "
            f"delete the shards that no version names together with {JOBS}"
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

    A job that is new is noted; one that goes on keeps what it had begun with.
    """
    store = open_store(uri, options)
    if not store.can_list:
        raise OptionError(f"{store.uri} cannot be written: plain http has no way to; use a store")
    jobs = unfinished_jobs(store)
    goes_on = job_name in jobs
    if goes_on:
        job = _read_job(store, _job_key(job_name))
        base = _catalog(store).read(job.base_version) if job.base_version else None
    else:
        base = _catalog(store).read()
        first = _checked_first(store, base, layout_format, jobs, append)
        job = Job(base_version=base.version if base else 0, first_shard=first)
        store.write(_job_key(job_name), msgspec.json.encode(job), only_if_absent=True)
    place = Destination(store=store, format=layout_format, job_name=job_name, job=job, base=base)
    if not goes_on:
        _refuse_others(place)
    return place, goes_on


def _read_job(store: Store, key: str) -> Job:
    try:
        return msgspec.json.decode(store.read(key), type=Job)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FormatError(
            f"{store.uri}{key} is damaged ({error}), so it is not known what was being written; "
            "choose another destination, or see `Writers` in docs/concepts/consistency.md"
        ) from None


def _refuse_others(place: Destination) -> None:
    """Raise when another writes there too, or has since this one looked for the first time.

    All note their jobs before they look here. So of two that begin in one moment at least one sees
    the other, and nobody goes on from a version that is no longer the latest: it would write over
    the shards of the one that is.
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
            f"run it again with the same source and options, or delete the shards that no version "
            f"names together with {JOBS}"
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
            f"know, the first is {new[0].key!r}; add them with `penstock index`, or delete them"
        )
    names = [o.key.removeprefix("shard-").removesuffix(f".{format}") for o in mine]
    return max((int(n) for n in names if n.isdigit()), default=-1) + 1
