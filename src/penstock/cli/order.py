"""`penstock order`: shows which sample comes when, and the quality of the shuffle."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.opened import open_named, show_place
from penstock.cli.options import add_dataset, add_json, add_shuffle
from penstock.cli.screen import Screen, print_json
from penstock.dataset.dataset import Dataset
from penstock.engine.stream import make_order
from penstock.errors import OptionError
from penstock.order import Order, Quality, order_hash, quality_of
from penstock.units import show_count

_EXAMPLE = """\
Examples
  penstock order s3://bucket/train/ --seed 7 --epoch 3 --at 1000000 --count 8
  penstock order s3://bucket/train/ --seed 7 --where 4711
  penstock order s3://bucket/train/ --quality --batch-size 1024
"""

_BATCH_SIZE = 256
_MODES = ("global", "blocks", "sequential")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Show which samples an epoch gives at some positions, or when a sample comes.\n"
        "Orders are computed, never stored: any place of any epoch is found at once."
    )
    parser.epilog = _EXAMPLE
    add_dataset(parser, version=True)
    group = parser.add_argument_group("Order")
    add_shuffle(group)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="as given to the loader (default: 0)"
    )
    group.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="counts from 0 (default: 0)"
    )
    group.add_argument("--at", type=int, default=0, metavar="POSITION", help="first position")
    group.add_argument("--count", type=int, default=16, metavar="N", help="how many (default: 16)")
    group.add_argument(
        "--where", type=int, action="append", metavar="ID", help="the position of a sample"
    )
    group.add_argument("--quality", action="store_true", help="compare the shuffling of all orders")
    group.add_argument(
        "--batch-size", type=int, metavar="N", help=f"for --quality (default: {_BATCH_SIZE})"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show ids, positions or quality."""
    dataset = open_named(args).dataset
    order = make_order(dataset, args.shuffle, args.seed, None)
    result: dict[str, Any] = {
        "uri": dataset.uri,
        "num_samples": len(dataset),
        "shuffle": order.mode,
        "seed": args.seed,
        "epoch": args.epoch,
        "order": order_hash(order),
    }
    if args.where:
        result["positions"] = _positions(order, args)
    else:
        result |= {"at": args.at, "ids": _ids(order, args)}
    if args.quality:
        batch_size = args.batch_size or min(_BATCH_SIZE, len(dataset))
        result["batch_size"] = batch_size
        qualities = _qualities(dataset, args, batch_size)
        result["quality"] = {mode: quality.show() for mode, quality in qualities.items()}
    if args.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _positions(order: Order, args: argparse.Namespace) -> dict[str, int]:
    found = order.positions(args.epoch, args.where).tolist()
    return {str(i): p for i, p in zip(args.where, found, strict=True)}


def _ids(order: Order, args: argparse.Namespace) -> list[int]:
    if not 0 <= args.at < order.num_samples or args.count < 1:
        raise OptionError(
            f"--at {args.at} --count {args.count}: an epoch has positions 0 to "
            f"{order.num_samples - 1}, and at least one must be shown"
        )
    stop = min(args.at + args.count, order.num_samples)
    return [int(i) for i in order.ids(args.epoch, args.at, stop)]


def _qualities(dataset: Dataset, args: argparse.Namespace, batch_size: int) -> dict[str, Quality]:
    return {
        mode: quality_of(
            make_order(dataset, mode, args.seed, None), epoch=args.epoch, batch_size=batch_size
        )
        for mode in _MODES
    }


def _show(result: dict[str, Any]) -> None:
    screen = Screen()
    screen.line(
        (show_place(result["uri"]), "bold"), f"  {show_count(result['num_samples'])} samples"
    )
    screen.line(
        f"  shuffle {result['shuffle']}, seed {result['seed']}, epoch {result['epoch']}, "
        f"order {result['order']}"
    )
    for i, position in result.get("positions", {}).items():
        screen.line(f"  sample {show_count(int(i))} comes at position ", (f"{position:,}", "bold"))
    if "ids" in result:
        last = result["at"] + len(result["ids"]) - 1
        screen.heading(f"Samples at positions {result['at']:,} to {last:,}")
        _show_ids(screen, result["ids"])
    if "quality" in result:
        _show_quality(screen, result)


def _show_ids(screen: Screen, ids: list[int]) -> None:
    wide = max(len(str(i)) for i in ids) + 2
    a_line = max(1, (screen.width - 2) // wide)
    for start in range(0, len(ids), a_line):
        screen.line("".join(f"{i:>{wide}}" for i in ids[start : start + a_line]))


def _show_quality(screen: Screen, result: dict[str, Any]) -> None:
    screen.heading(
        f"Shuffle quality in batches of {result['batch_size']:,}; 1 is a perfect shuffle"
    )
    rows = [
        (
            mode,
            f"{q['mixing']:.3f}",
            f"{q['class_mix']:.3f}",
            f"{q['adjacent_rate']:.2%}",
            f"{q['cell_z']:+,.1f}",
        )
        for mode, q in result["quality"].items()
    ]
    header = ("order", "mixing", "class mix", "adjacent", "drift z")
    screen.table(header, rows, right=range(1, 5))
    uniform = next(iter(result["quality"].values()))["adjacent_rate_uniform"]
    for text in (
        "mixing     distance between neighbours of a batch, against a perfect shuffle",
        "class mix  how many runs of the data set (classes) meet in a batch, likewise",
        f"adjacent   neighbours that are stored side by side; a perfect shuffle: {uniform:.2%}",
        "drift z    place in the epoch against place in the set; unrelated: within ±3",
    ):
        screen.line(("  " + text, "dim"))
