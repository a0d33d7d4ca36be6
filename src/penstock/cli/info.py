"""`penstock info`: shows what a data set holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.cli.charts import histogram, log_bins
from penstock.cli.opened import OpenedDataset, open_named, show_place
from penstock.cli.options import add_dataset, add_json
from penstock.cli.previews import one_line, preview
from penstock.cli.screen import Screen, cut, print_json
from penstock.dataset.dataset import Dataset
from penstock.dataset.part import Table
from penstock.errors import PenstockError
from penstock.units import show_bytes, show_count

_EXAMPLE = """\
Examples
  penstock info ~/pictures
  penstock info s3://bucket/train/ --anonymous --samples 5
  penstock info 'shards/train-{000..127}.tar' --json | jq .num_samples
"""

_SIZES_MAX = 4_000_000
"""The most samples whose sizes are read; of larger sets they are evenly spread."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Show what a data set holds: counts, sizes, fields and a few samples.\n"
        "A set that was never indexed is indexed first."
    )
    parser.epilog = _EXAMPLE
    add_dataset(parser, version=True)
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="samples to show (default: 3)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show the data set."""
    opened = open_named(args)
    sizes = sample_sizes(opened.dataset)
    shown = _previews(opened.dataset, args.samples)
    if args.json:
        print_json(_result(opened, sizes, shown))
    else:
        _show(opened, sizes, shown)
    return 0


def sample_sizes(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Return the stored size of each sample, or of evenly spread ones where there are very many."""
    budget = _SIZES_MAX / max(1, len(dataset))
    out = []
    for part in dataset.parts:
        count = max(1, int(part.num_samples * min(1.0, budget)))
        ids = np.linspace(0, part.num_samples - 1, count).astype(np.int64)
        out.append(np.sum([_lengths(table, ids) for table in part.tables], axis=0))
    return np.concatenate(out).astype(np.int64)


def _lengths(table: Table, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    extents = table.extents(ids)
    if table.addressing != "blocks":
        return extents.length
    counts = np.diff(table.block_starts())
    return extents.length // np.maximum(1, counts[extents.block])


def _previews(dataset: Dataset, count: int) -> list[tuple[int, str, dict[str, str]]]:
    """Return id, key and short values of evenly spread samples, or the error of a sample."""
    spread = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int).tolist()
    out = []
    for i in spread:
        try:
            values = {name: preview(value, 56) for name, value in dataset[i].items()}
        except PenstockError as error:
            values = {"unreadable": one_line(str(error))}
        out.append((i, one_line(dataset.key(i) or ""), values))
    return out


def _result(
    opened: OpenedDataset,
    sizes: npt.NDArray[np.int64],
    shown: Sequence[tuple[int, str, dict[str, str]]],
) -> dict[str, Any]:
    dataset = opened.dataset
    return {
        "uri": dataset.uri,
        "format": dataset.format,
        "options": dataset.options,
        "num_samples": len(dataset),
        "num_objects": opened.num_objects,
        "objects_size_bytes": opened.size_bytes,
        "samples_size_bytes": dataset.size_bytes,
        "sample_size_bytes": dict(
            zip(("min", "p50", "p99", "max"), _percentiles(sizes), strict=True)
        ),
        "fields": [
            {
                "name": f.name,
                "encoding": f.encoding,
                "dtype": f.dtype,
                "shape": None if f.shape is None else list(f.shape),
                "optional": f.optional,
            }
            for f in dataset.fields.values()
        ],
        "version": dataset.version,
        "versions": opened.versions,
        "fingerprint": dataset.fingerprint,
        "index": opened.index_uri,
        "samples": [{"id": i, "key": key, "fields": values} for i, key, values in shown],
    }


def _percentiles(sizes: npt.NDArray[np.int64]) -> list[int]:
    return [int(v) for v in np.percentile(sizes, [0, 50, 99, 100])]


def _show(
    opened: OpenedDataset,
    sizes: npt.NDArray[np.int64],
    shown: Sequence[tuple[int, str, dict[str, str]]],
) -> None:
    screen, dataset = Screen(), opened.dataset
    screen.line((show_place(dataset.uri), "bold"))
    versions = f"{dataset.version} of {len(opened.versions)}" if opened.versions else "–"
    screen.pairs(
        {
            "samples": f"{show_count(len(dataset))}, {show_bytes(dataset.size_bytes)}",
            "objects": f"{show_count(opened.num_objects)} {dataset.format}, "
            f"{show_bytes(opened.size_bytes)}",
            **_options_line(dataset, screen.width),
            "version": f"{versions}, fingerprint {dataset.fingerprint}",
            "index": show_place(opened.index_uri),
        }
    )
    _show_fields(screen, dataset)
    low, middle, p99, high = map(show_bytes, _percentiles(sizes))
    screen.heading(f"Sample size: median {middle}, 99 % below {p99}, {low} to {high}")
    for line in histogram(log_bins(sizes), screen.width):
        screen.line((line, "cyan"))
    if shown:
        _show_samples(screen, shown)


def _options_line(dataset: Dataset, width: int) -> dict[str, str]:
    options = {name: value for name, value in dataset.options.items() if value not in (None, [])}
    if not options:
        return {}
    text = ", ".join(f"{name}={_short(value)}" for name, value in options.items())
    return {"options": cut(text, width - 13)}


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{', '.join(map(str, value[:3]))} … {value[-1]} ({len(value)})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _show_fields(screen: Screen, dataset: Dataset) -> None:
    screen.heading("Fields")
    rows = [
        (
            f.name,
            f.encoding,
            f.dtype or "varies",
            "varies" if f.shape is None else "×".join(map(str, f.shape)) or "one value",
            "some samples lack it" if f.optional else "",
        )
        for f in dataset.fields.values()
    ]
    screen.table(("name", "encoding", "dtype", "shape", ""), rows)


def _show_samples(screen: Screen, shown: Sequence[tuple[int, str, dict[str, str]]]) -> None:
    screen.heading("Samples")
    for i, key, values in shown:
        screen.line("  ", (show_count(i), "bold"), f"  {cut(key, screen.width - 16)}")
        wide = max(map(len, values), default=0)
        for name, text in values.items():
            line = cut(f"{text}", screen.width - wide - 8)
            screen.line("      ", (f"{name:<{wide}}", "dim"), f"  {line}")
