"""Makes room for the demo, and cleans up however it ends."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.demo.story import Scale, tell

from penstock.errors import MissingPackageError, OptionError, PenstockError

_FULL = Scale(
    images=4000, size=96, epochs=4, global_batch_size=64, save_every=16, shard_bytes=4_000_000
)
_QUICK = Scale(
    images=320, size=32, epochs=2, global_batch_size=32, save_every=4, shard_bytes=200_000
)
_NEEDS = {"torch": "torch", "PIL": "pillow"}
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Tell the story in a folder of its own."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave images, shards and checkpoint there"
    )
    parser.add_argument("--quick", action="store_true", help="few small images: does it work?")
    args = parser.parse_args(argv)
    try:
        for module, package in _NEEDS.items():
            if importlib.util.find_spec(module) is None:
                raise MissingPackageError("the demo", package, "torch,jpeg,cli")
        with _ends_tidily(), _folder(args.keep) as folder, _scratch(folder / "scratch"):
            tell(folder, _QUICK if args.quick else _FULL, is_kept=args.keep is not None)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except (PenstockError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
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


if __name__ == "__main__":
    sys.exit(main())
