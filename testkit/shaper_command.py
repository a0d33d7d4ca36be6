"""`python -m testkit.shaper`: a shaped store in a terminal, until Ctrl-C."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import OptionError, PenstockError
from penstock.units import bytes_of, show_bytes
from testkit.shaper import Shaper
from testkit.shaper_shape import KINDS, Fault, Fixed, Latency, LogNormal, Shape

_UNITS_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def seconds_of(text: str) -> float:
    """Return a duration from text.

    >>> seconds_of("20ms"), seconds_of("1.5 s"), seconds_of("0.02")
    (0.02, 1.5, 0.02)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|)\s*", text)
    if match is None:
        raise OptionError(f"{text!r} is not a duration; write for example 20ms, 1.5s or 0.02")
    return float(match[1]) * _UNITS_S[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m testkit.shaper", description="A store on a bad network."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--endpoint", help="forward to this store, for example http://127.0.0.1:8333")
    what.add_argument("--folder", type=Path, help="serve this folder, for reading only")
    parser.add_argument("--latency", default="0", help="to the first byte, for example 20ms")
    parser.add_argument("--sigma", type=float, default=0.0, help="its tail: 0.3 calm, 1 wild")
    parser.add_argument("--bandwidth", help="bytes a second of all together, for example 100MB")
    parser.add_argument("--connection-bandwidth", help="bytes a second of each connection")
    parser.add_argument("--requests", type=float, help="requests a second; more get 503")
    parser.add_argument("--queue", action="store_true", help="more requests wait instead")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=float, default=0.0, metavar="SHARE", help=_HELP[kind])
    parser.add_argument("--stall-for", default="10s", help="how long a stall lasts")
    parser.add_argument("--bucket", default="data", help="name of the folder's bucket")
    parser.add_argument("--seed", type=int, default=0, help="another seed fails other requests")
    parser.add_argument("--port", type=int, default=0, help="listen here; 0 takes a free port")
    return parser


_HELP = {
    "unavailable": "share of requests that get 503",
    "truncate": "share of reads that end early",
    "corrupt": "share of reads with a wrong byte",
    "stall": "share of requests with a silence",
    "reset": "share of requests whose connection breaks",
}


def _shape(args: argparse.Namespace) -> Shape:
    latency_s = seconds_of(args.latency)
    latency: Latency = LogNormal(latency_s, args.sigma) if args.sigma else Fixed(latency_s)
    stall_s = seconds_of(args.stall_for)
    shares = {kind: getattr(args, kind) for kind in KINDS}
    return Shape(
        latency=latency,
        bandwidth_bytes_s=bytes_of(args.bandwidth) if args.bandwidth else None,
        connection_bytes_s=(
            bytes_of(args.connection_bandwidth) if args.connection_bandwidth else None
        ),
        requests_s=args.requests,
        excess="queue" if args.queue else "refuse",
        faults=tuple(
            Fault(kind=kind, share=share, stall_s=stall_s)
            for kind, share in shares.items()
            if share
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a shaper until Ctrl-C."""
    args = _parser().parse_args(arguments)
    settings = {"seed": args.seed, "port": args.port}
    try:
        shape = _shape(args)
        if args.folder is not None:
            shaper = Shaper.of_folder(args.folder, shape, bucket=args.bucket, **settings)
        else:
            shaper = Shaper(args.endpoint, shape, **settings)
        with shaper:
            _say(f"{shaper.endpoint}" + (f"  {shaper.uri}" if args.folder else ""))
            _wait_for_ctrl_c()
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    counts = shaper.counts()
    _say(
        f"{counts.requests} requests, {show_bytes(counts.body_bytes)}, "
        f"{counts.unavailable} times 503, faults: {counts.faults or 'none'}"
    )
    return 0


def _wait_for_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
