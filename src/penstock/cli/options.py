"""Arguments that several verbs share: the data set, its format, its store, tiers, a cluster."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from penstock.dataset.crew import Crew
from penstock.errors import OptionError
from penstock.storage.options import StoreOptions
from penstock.storage.tier_sizes import Wish, disk_of, memory_of

_RAY_HERE = "here"
"""What `--ray` without an address stands for."""


def add_dataset(parser: argparse.ArgumentParser, *, version: bool = False) -> None:
    """Add the name of the data set, and the arguments for its format and store."""
    parser.add_argument(
        "uri",
        metavar="URI",
        nargs="+",
        help="folder, s3://…, gs://…, az://…, https://…, a glob, braces, or several of these",
    )
    if version:
        parser.add_argument("--version", type=int, metavar="N", help="a version, not the latest")
    add_format(parser)
    add_store(parser)


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the format: how objects become samples."""
    group = parser.add_argument_group("Format")
    group.add_argument("--format", metavar="NAME", help="tar, mds, files, …; found by itself")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the format, such as sequence_length=2048; may be repeated",
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a remote store, where the environment does not name it."""
    group = parser.add_argument_group("Store")
    group.add_argument("--endpoint", metavar="URL", help="an S3-compatible server")
    group.add_argument("--region", metavar="NAME", help="region of the bucket")
    group.add_argument("--profile", metavar="NAME", help="profile in ~/.aws")
    group.add_argument(
        "--anonymous", action="store_true", help="public bucket: send no credentials"
    )


def add_tiers(group: argparse._ArgumentGroup, memory: str, disk: str) -> None:
    """Add --memory and --disk, which mean the same in every verb; `tiers_of` reads them."""
    group.add_argument("--memory", metavar="SIZE", help=memory)
    group.add_argument("--disk", metavar="FOLDER:SIZE", action="append", default=[], help=disk)


def tiers_of(args: argparse.Namespace) -> list[Wish]:
    """Return the tiers that were named, memory first."""
    memory = [] if args.memory is None else [memory_of(args.memory)]
    return [*memory, *map(disk_of, args.disk)]


def add_shuffle(group: argparse._ArgumentGroup) -> None:
    """Add --shuffle with the words that the loader takes; "none" is its None, "sequential"."""
    group.add_argument(
        "--shuffle",
        type=lambda word: "sequential" if word == "none" else word,
        choices=("global", "blocks", "blocks-first", "sequential"),
        default="global",
        metavar="ORDER",
        help="global (default), blocks, blocks-first or sequential; none is sequential",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the switch for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the switch that has a Ray cluster do the work."""
    group = parser.add_argument_group("Cluster")
    group.add_argument(
        "--ray",
        nargs="?",
        const=_RAY_HERE,
        metavar="ADDRESS",
        help="work on a Ray cluster: of this address, or of this machine; write it last",
    )


def crew_of(args: argparse.Namespace) -> AbstractContextManager[Crew | None]:
    """Return the crew that does the work; None is this process."""
    if args.ray is None:
        return nullcontext()
    from penstock.dataset.ray_crew import RayCrew

    return RayCrew(None if args.ray == _RAY_HERE else args.ray)


def uri_of(args: argparse.Namespace) -> str | list[str]:
    """Return the name of the data set: one, or a list."""
    return str(args.uri[0]) if len(args.uri) == 1 else list(args.uri)


def store_of(args: argparse.Namespace) -> StoreOptions:
    """Return how the store is reached."""
    return StoreOptions(
        endpoint=args.endpoint,
        region=args.region,
        profile=args.profile,
        anonymous=args.anonymous,
    )


def format_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the format's options; values are JSON where they can be.

    >>> format_options_of(argparse.Namespace(option=["n=4", "exts=[\\"png\\"]", "name=a b"]))
    {'n': 4, 'exts': ['png'], 'name': 'a b'}
    """
    out: dict[str, Any] = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(
                f"--option {text!r} has no value; write --option {name or 'KEY'}=VALUE"
            )
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
