"""Loaders that read the remote set: what each is tried with, and how it is driven.

A module here has `open_loader(task)`, which runs in the peer's environment and returns `Opened`,
and `write(source, folder)` when the peer reads a format of its own. A task says where the store is
(`uri`, `endpoint`, `url`), how much may be cached (`limit_bytes`) and where (`cache`). A peer that
cannot do what a task asks for raises `Unsupported`.

Variants: w2 and w8 are worker processes; disk and memory are the tier of ours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from benchmarks.peers import EVERYONE, Peer


class Unsupported(Exception):  # noqa: N818
    """What was asked for does not exist there; the message is a row of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A loader that is about to be iterated."""

    start: Callable[[int], Iterable]
    """Returns the batches of an epoch, each a sequence of byte strings and an array of labels."""
    close: Callable[[], dict] = dict
    """Ends it, and returns what it counted itself."""


KEYS = {
    "AWS_ACCESS_KEY_ID": "anybody",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The store lets everybody in, but clients of S3 want keys to sign with."""


def remote(name: str, format_name: str, variants: dict[str, tuple[str, ...]], **more: str) -> Peer:
    """Return a peer as it is tried here: `more` says what its variants and settings mean."""
    return replace(
        EVERYONE[name],
        formats={"remote": format_name},
        variants=variants,
        shuffle=more.pop("shuffle", EVERYONE[name].shuffle),
        notes=more,
    )


def both(*variants: str) -> dict[str, tuple[str, ...]]:
    return {"store_bytes": variants, "stalls": variants}


LOOK_AHEAD_BYTES = 128_000_000
"""Of ours. Below the set, else batches ahead would be a cache of their own."""

REMOTE = {
    "ours": remote(
        "ours",
        "tar",
        both("disk", "memory"),
        all=f"look_ahead {LOOK_AHEAD_BYTES / 1e6:.0f} MB; tiers begin empty",
    ),
    "torch": remote(
        "torch",
        "files",
        {"store_bytes": (), "stalls": ("w8", "w8-t8")},
        all="an object for each sample by http.client, connections stay open; it has no cache",
        t8="__getitems__ on 8 threads a worker",
    ),
    "mosaic": remote(
        "mosaic",
        "mds",
        both("w2"),
        shuffle="py1e in blocks of 1,024 samples, or a quarter of the cache where that is less",
        all="shards of 5.5 MB; the S3 client of the parent is dropped before workers fork",
        default="its own block size, which is the whole set",
    ),
    "litdata": remote(
        "litdata",
        "litdata",
        both("w2"),
        shuffle="chunks permuted, samples permuted inside a chunk of 8 MB",
        all="downloads 4 chunks at once where all fit; a private option is changed to allow http",
    ),
    "webdataset": remote(
        "webdataset",
        "tar",
        {"store_bytes": (), "stalls": ("w2",)},
        all="shards of 14 MB; looks at its limit every 30 s only",
    ),
}
