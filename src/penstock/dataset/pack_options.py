"""What a pack is asked for, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.dataset.build_merge import MergeOutline
from penstock.dataset.writer import ShardFormat, check_shards
from penstock.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How samples are packed."""

    format: ShardFormat = "tar"
    """"tar" takes any sample, "npy" such as are all of one type and shape."""
    shard_size: int | str = "128MB"
    """About how large a shard is; sizes of compressed sources count as they are stored."""
    shuffle: int | None = None
    """Seed of the order in which samples are packed; None keeps them as they are."""
    limit: int | None = None
    """Pack only this many samples: the first ones in the chosen order."""
    append: bool = False
    """Add to the data set that is there, as a new version of it."""
    keep_keys: bool = False
    """Name samples as the source does, where it does, rather than number them (tar only)."""
    file_column: str | None = None
    """Column of a CSV that holds the names of files, where its name does not say so."""
    workers: int | None = None
    """Shards written at the same time; each takes its own size twice in memory."""

    def __post_init__(self) -> None:
        check_shards(self.format, self.shard_size)
        for name, value in (("limit", self.limit), ("workers", self.workers)):
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far a pack has come."""

    shards: int
    """Of all; 0 where it is not known, as for an iterable."""
    shards_done: int = 0
    num_samples: int = 0
    """Of the shards that are done."""
    size_bytes: int = 0
    """Of the shards that are done; 0 where it is not known."""

    def after(self, shard: MergeOutline) -> PackProgress:
        """Return this with one more shard done."""
        return replace(
            self,
            shards_done=self.shards_done + 1,
            num_samples=self.num_samples + shard.num_samples,
            size_bytes=self.size_bytes + shard.object_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What a pack has made."""

    uri: str
    """Where the data set lies; `penstock.open` takes it."""
    version: int
    """The version that was committed."""
    num_samples: int
    """Samples in that version, those that were there before included."""
    num_shards: int
    """Shards that were packed."""
    num_shards_reused: int
    """Those of them that an earlier run had finished."""
    size_bytes: int
    """Size of all objects of the version."""


Report = Callable[[PackProgress], None]
