"""`penstock pack`: copies many small files, tables or arrays into shards."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from penstock.cli.opened import show_place
from penstock.cli.options import (
    add_json,
    add_ray,
    add_store,
    crew_of,
    format_options_of,
    store_of,
)
from penstock.cli.progress import ProgressBar
from penstock.cli.screen import Screen, print_json
from penstock.dataset.dataset import Dataset
from penstock.dataset.open import open as open_dataset
from penstock.dataset.pack import PackOptions, PackProgress, PackReport, pack
from penstock.errors import OptionError
from penstock.storage.options import StoreOptions
from penstock.units import show_bytes, show_count, show_seconds

_EXAMPLE = """\
Examples
  penstock pack ~/pictures s3://bucket/pictures/
  penstock pack labels.csv shards/ --shuffle 7 --shard-size 256MB
  penstock pack s3://public/train/ /data/train/ --source-anonymous
  penstock pack s3://bucket/raw/ s3://bucket/train/ --shuffle 7 --ray head:6379
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Copy a data set into shards: plain tar or .npy files, with an index beside them.\n"
        "Readers see nothing before all of it is there. A pack that was interrupted goes\n"
        "on where it stopped when the same command is run again."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("source", metavar="SRC", help="folder of files, .csv, or any data set")
    parser.add_argument("destination", metavar="DST", help="folder, s3://…, gs://…, az://…")
    group = parser.add_argument_group("Shards")
    group.add_argument("--format", choices=("tar", "npy"), default="tar", help="default: tar")
    group.add_argument("--shard-size", default="128MB", metavar="SIZE", help="default: 128MB")
    group.add_argument("--shuffle", type=int, metavar="SEED", help="pack in shuffled order")
    group.add_argument("--limit", type=int, metavar="N", help="pack the first N samples only")
    group.add_argument("--append", action="store_true", help="add to the data set that is there")
    group.add_argument("--keep-keys", action="store_true", help="keep the samples' own names")
    group.add_argument("--workers", type=int, metavar="N", help="shards written at once")
    _add_source(parser)
    add_store(parser)
    add_ray(parser)
    add_json(parser)


def _add_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Source, where it differs from the destination")
    group.add_argument("--source-format", metavar="NAME", help="found by itself")
    group.add_argument("--option", action="append", default=[], metavar="KEY=VALUE",
                       help="an option of the source's format; may be repeated")  # fmt: skip
    group.add_argument("--file-column", metavar="NAME", help="column of a .csv with file names")
    group.add_argument("--source-endpoint", metavar="URL", help="an S3-compatible server")
    group.add_argument("--source-region", metavar="NAME", help="region of its bucket")
    group.add_argument("--source-profile", metavar="NAME", help="profile in ~/.aws")
    group.add_argument("--source-anonymous", action="store_true", help="send no credentials")


def run(args: argparse.Namespace) -> int:
    """Pack, show the progress, and print the result."""
    if args.ray is not None and args.workers is not None:
        raise OptionError(
            f"--workers {args.workers} counts threads of this machine, with --ray the cluster says "
            "how many shards are written at once; leave one of them out"
        )
    options = PackOptions(
        format=args.format,
        shard_size=args.shard_size,
        shuffle=args.shuffle,
        limit=args.limit,
        append=args.append,
        keep_keys=args.keep_keys,
        file_column=args.file_column,
        workers=args.workers,
    )
    began_s = time.monotonic()
    try:
        report = _pack(args, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to go on where it stopped") from None
    seconds = time.monotonic() - began_s
    if args.json:
        print_json(dataclasses.asdict(report) | {"seconds": round(seconds, 3)})
    else:
        _show(report, seconds)
    return 0


def _pack(args: argparse.Namespace, options: PackOptions) -> PackReport:
    with crew_of(args) as crew, ProgressBar("packing", "shards") as progress:

        def report(state: PackProgress) -> None:
            progress.update(
                state.shards_done,
                state.shards,
                samples=state.num_samples,
                size_bytes=state.size_bytes,
            )

        return pack(
            _source(args),
            args.destination,
            options,
            store=store_of(args),
            source_store=_source_store(args),
            report=report,
            crew=crew,
        )


def _source(args: argparse.Namespace) -> str | Dataset:
    """Return the source's name, or the opened data set if the user gave a format."""
    chosen: dict[str, Any] = format_options_of(args)
    if args.source_format is None and not chosen:
        return str(args.source)
    return open_dataset(args.source, format=args.source_format, store=_source_store(args), **chosen)


def _source_store(args: argparse.Namespace) -> StoreOptions:
    given = {
        "endpoint": args.source_endpoint,
        "region": args.source_region,
        "profile": args.source_profile,
        "anonymous": args.source_anonymous,
    }
    if not any(given.values()):
        return store_of(args)
    return StoreOptions(**given)


def _show(report: PackReport, seconds: float) -> None:
    screen = Screen()
    screen.line(("packed", "bold green"), f" in {show_seconds(seconds)}")
    reused = f", {show_count(report.num_shards_reused)} were there already"
    screen.pairs(
        {
            "data": show_place(report.uri),
            "version": str(report.version),
            "samples": show_count(report.num_samples),
            "shards": show_count(report.num_shards) + (reused if report.num_shards_reused else ""),
            "size": f"{show_bytes(report.size_bytes)}, {show_bytes(report.size_bytes / seconds)}/s",
        }
    )
