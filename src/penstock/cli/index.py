"""`penstock index`: finds every sample once and records where it lies."""

from __future__ import annotations

import argparse
import time
from typing import Any

from penstock.cli.opened import build_index, changes_since, find, indexed, show_place
from penstock.cli.options import add_dataset, add_json, add_ray, crew_of
from penstock.cli.screen import Screen, print_json
from penstock.dataset.build import Changes
from penstock.dataset.catalog import Catalog, Manifest
from penstock.dataset.open import FoundDataset
from penstock.units import show_bytes, show_count, show_seconds

_EXAMPLE = """\
Examples
  penstock index s3://bucket/train/
  penstock index tokens/ --format npy --option sequence_length=2048
  penstock index s3://bucket/train/ --check || echo "new shards have arrived"
  penstock index s3://bucket/train/ --ray head:6379
"""

_NAMED_MAX = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Find every sample of a data set and keep where it lies: beside the data, in\n"
        ".penstock/, or in your cache folder. New objects become a new version; nothing\n"
        "is read twice."
    )
    parser.epilog = _EXAMPLE
    add_dataset(parser)
    parser.add_argument("--rebuild", action="store_true", help="scan everything anew")
    parser.add_argument(
        "--check", action="store_true", help="only say whether the index is up to date (exit 1: no)"
    )
    add_ray(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Build, update or check an index."""
    found = find(args)
    before = indexed(found)
    if args.check:
        return _check(args, found, before)
    began_s = time.monotonic()
    with crew_of(args) as crew:
        catalog, manifest = build_index(found, rebuild=args.rebuild, beside=True, crew=crew)
    is_new = before is None or _name(before) != _name((catalog, manifest))
    result = _result(found, catalog, manifest) | {
        "new": is_new,
        "seconds": round(time.monotonic() - began_s, 3),
    }
    if args.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _name(index: tuple[Catalog, Manifest]) -> tuple[str, int]:
    return index[0].uri, index[1].version


def _result(found: FoundDataset, catalog: Catalog, manifest: Manifest) -> dict[str, Any]:
    return {
        "uri": found.located.store.uri,
        "format": manifest.format,
        "version": manifest.version,
        "num_samples": manifest.num_samples,
        "num_objects": manifest.num_objects,
        "size_bytes": manifest.size_bytes,
        "index": catalog.uri,
        "index_size_bytes": sum(ref.size_bytes for ref in manifest.parts),
    }


def _show(result: dict[str, Any]) -> None:
    screen = Screen()
    if result["new"]:
        screen.line(("indexed", "bold green"), f" in {show_seconds(result['seconds'])}")
    else:
        screen.line(("up to date", "bold green"), ": nothing new since this version")
    screen.pairs(
        {
            "data": f"{show_place(result['uri'])} ({result['format']})",
            "version": str(result["version"]),
            "samples": show_count(result["num_samples"]),
            "objects": f"{show_count(result['num_objects'])}, {show_bytes(result['size_bytes'])}",
            "index": f"{show_place(result['index'])} ({show_bytes(result['index_size_bytes'])})",
        }
    )


def _check(
    args: argparse.Namespace, found: FoundDataset, before: tuple[Catalog, Manifest] | None
) -> int:
    if before is None:
        state: dict[str, Any] = {
            "uri": found.located.store.uri,
            "up_to_date": False,
            "version": None,
        }
        text = "not indexed yet"
    else:
        changes = changes_since(found, *before)
        state = _state(found, before[1], changes)
        text = _words(state)
    if args.json:
        print_json(state)
    else:
        style = "bold green" if state["up_to_date"] else "bold red"
        Screen().line((text, style), f"  {show_place(found.located.store.uri)}")
    return 0 if state["up_to_date"] else 1


def _state(found: FoundDataset, manifest: Manifest, changes: Changes) -> dict[str, Any]:
    return {
        "uri": found.located.store.uri,
        "up_to_date": not (changes.changed or changes.gone or changes.new),
        "version": manifest.version,
        "new": [o.key for o in changes.new],
        "changed": [was.key for was, _ in changes.changed],
        "gone": [o.key for o in changes.gone],
    }


def _words(state: dict[str, Any]) -> str:
    parts = []
    for what in ("new", "changed", "gone"):
        keys = state[what]
        if keys:
            more = ", …" if len(keys) > _NAMED_MAX else ""
            parts.append(f"{len(keys)} {what} ({', '.join(keys[:_NAMED_MAX])}{more})")
    if not parts:
        return f"up to date: version {state['version']}"
    return f"version {state['version']} is out of date: {', '.join(parts)}"
