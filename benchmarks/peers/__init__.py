"""The peers: what each is called, where it lives, what it reads, and in which settings it is tried.

A peer is a module here with `open_loader(work, folder, variant)`, which returns `start(epoch)`, and
with `write(work, source, folder)` when it reads a format of its own. The module runs in the peer's
environment; this table is all that the comparing process needs to know of it.

Variants: w0 is no worker process, w2 one for each of two cores; t1 and t2 are threads, p1 and p2
bare processes. Those of ours are the values of `Loader(workers=...)`.
"""

import os
from dataclasses import dataclass, field

SHARED_FORMATS = ("source", "files", "tar")
"""Formats of nobody's own; `benchmarks.formats` writes them."""


CORES = os.cpu_count() or 1
COPYING = tuple(f"t{n}" for n in (1, 2, 4, 8) if n <= max(2, CORES))
"""Threads that copy; the best number of them is the limit."""
ALL = f"w{CORES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One loader as the comparison sees it."""

    distribution: str
    """The package whose version is printed."""
    packages: tuple[str, ...]
    """What pip installs beside the base."""
    formats: dict[str, str]
    """Work to the format it is read from."""
    variants: dict[str, tuple[str, ...]]
    shuffle: str
    notes: dict[str, str] = field(default_factory=dict)
    """Ending of a variant to what it means."""


def everywhere(value: object) -> dict:
    return dict.fromkeys(("tokens", "blobs", "jpeg"), value)


LIMIT = Peer(
    distribution="numpy",
    packages=(),
    formats=everywhere("source"),
    variants={"tokens": COPYING, "blobs": COPYING, "jpeg": ("p1", f"p{CORES}")},
    shuffle="global permutation, made beforehand",
)

OURS = Peer(
    distribution="penstock",
    packages=("-e", ".[jpeg]"),
    formats={"tokens": "source", "blobs": "tar", "jpeg": "tar"},
    variants=everywhere(("auto", "here")),
    shuffle="global permutation",
)

PEERS = {
    "torch": Peer(
        distribution="torch",
        packages=("torchdata",),
        formats={"tokens": "source", "blobs": "files", "jpeg": "files"},
        variants={
            "tokens": ("w0", ALL, "w0-batch", f"{ALL}-batch"),
            "blobs": ("w0", ALL, f"{ALL}-pack"),
            "jpeg": ("w0", ALL),
        },
        shuffle="global permutation",
        notes={
            "batch": "the sampler yields whole batches of indices, one gather makes a batch",
            "pack": "a batch crosses between processes as one tensor and is split into views",
        },
    ),
    "mosaic": Peer(
        distribution="mosaicml-streaming",
        packages=("mosaicml-streaming",),
        formats=everywhere("mds"),
        variants=everywhere(("w0", ALL)),
        shuffle="py1e, its default: shards permuted, samples spread over blocks of about 2^18",
    ),
    "litdata": Peer(
        distribution="litdata",
        packages=("litdata",),
        formats=everywhere("litdata"),
        variants=everywhere(("w0", ALL)),
        shuffle="chunks permuted, samples permuted inside a chunk of 64 MB",
    ),
    "webdataset": Peer(
        distribution="webdataset",
        packages=("webdataset",),
        formats=everywhere("tar"),
        variants=everywhere(("w0", ALL)),
        shuffle="shards permuted, then a buffer of 1,000 samples in each worker",
    ),
    "grain": Peer(
        distribution="grain",
        packages=("grain", "array-record"),
        formats={"tokens": "source", "blobs": "array_record", "jpeg": "array_record"},
        variants=everywhere(("w0", ALL)),
        shuffle="global permutation",
    ),
    "spdl": Peer(
        distribution="spdl",
        packages=("spdl",),
        formats={"tokens": "source", "blobs": "files", "jpeg": "files"},
        variants=everywhere((f"t{CORES}",)),
        shuffle="global permutation, the caller's: it takes any iterable",
    ),
    "hf": Peer(
        distribution="datasets",
        packages=("datasets", "torchdata"),
        formats=everywhere("arrow"),
        variants=everywhere(("map-w0", f"map-{ALL}")),
        shuffle="global permutation",
    ),
}

EVERYONE = {"limit": LIMIT, "ours": OURS, **PEERS}
