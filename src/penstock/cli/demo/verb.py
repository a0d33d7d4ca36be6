"""`penstock demo`: a folder to play in, and the way out of it, whatever happens inside."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.cli.demo.story import Scale, tell
from penstock.errors import MissingPackageError, OptionError

_EXAMPLE = """\
Examples
  penstock demo
  penstock demo --keep penstock-demo && penstock info penstock-demo/shards
"""

_FULL = Scale(
    images=4000, size=96, epochs=4, global_batch_size=64, save_every=16, shard_bytes=4_000_000
)
_QUICK = Scale(
    images=320, size=32, epochs=2, global_batch_size=32, save_every=4, shard_bytes=200_000
)
_NEEDS = {"torch": "torch", "PIL": "pillow"}
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "See all of it in about a minute, on this machine alone: draw images, pack them\n"
        "into shards, train a small network, kill it half-way, resume on two ranks, and\n"
        "compare what was delivered with what the seed promised."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave images, shards and checkpoint there"
    )
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Tell the story in a folder of its own."""
    for module, package in _NEEDS.items():
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError("penstock demo", package, "torch,jpeg,cli")
    with _ends_tidily(), _folder(args.keep) as folder, _scratch(folder / "scratch"):
        tell(folder, _QUICK if args.quick else _FULL, is_kept=args.keep is not None)
    return 0


@contextmanager
def _scratch(scratch: Path) -> Iterator[None]:
    """Keep what we and torch leave in caches and temporary folders in one place, then remove it."""
    scratch.mkdir()
    os.environ |= {"PENSTOCK_CACHE": str(scratch), "TMPDIR": str(scratch)}
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OptionError(f"--keep {keep} is there already and not an empty folder; name another")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


@contextmanager
def _ends_tidily() -> Iterator[None]:
    """Treat a closed terminal and a plain `kill` as Ctrl-C, so that processes and files go too."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
