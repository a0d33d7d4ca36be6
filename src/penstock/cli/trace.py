"""`penstock trace`: run a training job as it is, and record what it reads and waits for."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from penstock.errors import OptionError
from penstock.trace.foreign.launch import VIEWS, TracedJob, run_job
from penstock.trace.reading import Trace, read_trace
from penstock.trace.schema import Kind
from penstock.units import show_bytes, show_count

_EXAMPLE = """\
Examples
  penstock trace -- python train.py --epochs 2
  penstock trace --out runs/a -- torchrun --nproc-per-node 4 train.py
  penstock trace --differential 50 -- python train.py
"""

_SIGNALLED = 128
"""An exit status above it is this plus the number of a signal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Run a training job with torch's DataLoader, Hugging Face datasets, WebDataset,\n"
        "MosaicML Streaming, LitData or Penstock, unchanged, and record which files it\n"
        "reads, where and when, and how long each step waits. The job's own exit status\n"
        "is returned."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("command", metavar="-- COMMAND", nargs="*", help="the job, behind --")
    parser.add_argument("--out", metavar="RUN", help="folder of the trace; default: made here")
    parser.add_argument(
        "--with",
        dest="view",
        choices=VIEWS,
        default="auto",
        help="how reads are seen; default: a preloaded library if it can be built, else Python",
    )
    parser.add_argument(
        "--differential",
        metavar="K",
        type=int,
        default=0,
        help="give the loop the same batch again for K steps after every K real ones",
    )


def run(args: argparse.Namespace) -> int:
    """Run the job, then say where its trace lies and what it shows."""
    if args.differential < 0:
        raise OptionError(f"--differential takes a number of steps, not {args.differential}")
    folder = Path(args.out or time.strftime("penstock-%Y%m%d-%H%M%S")).absolute()
    job = TracedJob(
        command=tuple(args.command),
        folder=folder,
        view=args.view,
        differential=args.differential,
    )
    status = run_job(job)
    # To stderr: the job's own output may be read by another program.
    try:
        trace = read_trace(folder)
        print(_summary(trace, status), file=sys.stderr)
        print(_verdict(trace), end="", file=sys.stderr)
    except Exception as error:  # Whoever started the job wants its exit status, whatever we think.
        print(f"penstock: the trace in {folder} could not be judged: {error}", file=sys.stderr)
    return status


def _summary(trace: Trace, status: int) -> str:
    # Penstock's own rows have its requests; reads below them are the same bytes again.
    requests = trace.of(Kind.FETCH, Kind.TIER_READ, Kind.PEER_REQUEST)
    batches, reads = trace.of(Kind.NEXT), requests if len(requests) else trace.of(Kind.READ)
    lines = [
        f"penstock: traced to {trace.folder}",
        f"penstock: {show_count(len(batches))} {'batch' if len(batches) == 1 else 'batches'}, "
        f"waited {batches['wait_ns'].sum() / 1e9:.1f} s; {show_count(len(reads))} reads, "
        f"{show_bytes(int(reads['size_bytes'].sum()))}",
    ]
    if status > _SIGNALLED:
        lines.append(f"penstock: the job was ended by signal {status - _SIGNALLED}")
    elif status:
        lines.append(f"penstock: the job ended with exit status {status}")
    if not len(batches) and status:
        lines.append("penstock: it ended before its loop asked for a batch")
    elif not len(batches):
        lines.append(
            "penstock: no loop over a DataLoader was seen; is Penstock installed in the "
            "environment of the command's Python?"
        )
    dropped = sum(sum(process.dropped.values()) for process in trace.processes)
    if dropped:
        lines.append(f"penstock: {show_count(dropped)} rows were dropped: the trace was too large")
    return "\n".join(lines)


def _verdict(trace: Trace) -> str:
    """Return the verdict; "" where there is nothing to judge."""
    try:
        from penstock.report.analysis.analyze import analyze
        from penstock.report.pages.text import verdict_text
    except ImportError:
        return ""
    if not len(trace.of(Kind.NEXT)):
        return ""
    return f"{verdict_text(analyze(trace))}\n"
