"""`penstock export`: the trace of a run for Perfetto, Arrow and Parquet."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.errors import OptionError
from penstock.trace.export import write_arrow, write_parquet, write_perfetto
from penstock.trace.reading import read_trace
from penstock.units import show_bytes, show_count

_EXAMPLE = """\
Examples
  penstock export run --perfetto run.json.gz     (open it at ui.perfetto.dev)
  penstock export run --perfetto part.json.gz --steps 100:120
  penstock export run --parquet tables
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Write what a run has recorded in the formats of other tools. The run may still\n"
        "be going on, or have been killed: what is there is written."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder that was recorded in")
    group = parser.add_argument_group("Formats (at least one)")
    group.add_argument(
        "--perfetto", metavar="FILE", type=Path, help="Chrome's JSON; .gz compresses it"
    )
    group.add_argument(
        "--parquet", metavar="FOLDER", type=Path, help="spans, counters and facts as tables"
    )
    group.add_argument(
        "--arrow", metavar="FILE", type=Path, help="spans as an Arrow (Feather) file"
    )
    parser.add_argument(
        "--steps",
        metavar="FIRST:STOP",
        help="only what happened in these steps of each rank, counted from 0 over all epochs",
    )


def run(args: argparse.Namespace) -> int:
    """Write all that was asked for."""
    writers = (
        (write_perfetto, args.perfetto, "events"),
        (write_parquet, args.parquet, "spans"),
        (write_arrow, args.arrow, "spans"),
    )
    if not any(path for _, path, _ in writers):
        raise OptionError(
            "nothing to write: give --perfetto FILE, --parquet FOLDER or --arrow FILE"
        )
    steps = _steps_of(args.steps)
    trace = read_trace(args.run)
    for write, path, what in writers:
        if path is not None:
            try:
                count = write(trace, path, steps)
            except OSError as error:
                raise OptionError(
                    f"{path} cannot be written: {error.strerror or error}; name another place"
                ) from None
            print(f"{path}: {show_count(count)} {what}, {show_bytes(_size_of(path))}")
    return 0


def _steps_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal()):
        raise OptionError(
            f"--steps {text!r}: give the first and the one behind the last, as 100:120"
        )
    return int(first), int(stop)


def _size_of(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
