"""`penstock probe`: measures this machine and writes machine.toml."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.charts import bar
from penstock.cli.opened import show_place
from penstock.cli.options import (
    add_format,
    add_json,
    add_store,
    add_tiers,
    format_options_of,
    store_of,
    tiers_of,
    uri_of,
)
from penstock.cli.screen import Screen, can_move_cursor, print_json
from penstock.errors import OptionError
from penstock.machine import Curve, LinkModel, Machine, default_machine_path
from penstock.simulate.probe import QUICK, USUAL, ProbeResult, Target, probe_machine, write_machine
from penstock.storage.tier_sizes import TierAllowance, Wish, wished_bytes
from penstock.units import bytes_of, show_bytes, show_count, show_seconds

_EXAMPLE = """\
Examples
  penstock probe s3://bucket/train/ --disk /scratch:200GB
  penstock probe --quick                       (memory only, a few seconds)
  penstock probe ~/shards --output node.toml
"""

_LINK_LATENCY_S = 1e-4
_HOW = ("copy", "memory", "disk", "store", "decode", "link")
"""Names of the notes about methods of measurement; there may be several disks."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Measure what this machine can do, and write it to a file that plans start from:\n"
        "memory, disks, the store of a data set, decoding. Takes about 20 seconds, writes\n"
        "at most 1 GiB to each tier (and never more than a tenth of what is free) and\n"
        "leaves nothing behind; reads at most 2 GiB from the store."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "uri",
        metavar="[URI]",
        nargs="*",
        help="data in the store to be measured; nothing is written",
    )
    add_tiers(
        parser.add_argument_group("Tiers"),
        memory="what a memory tier may take: 64GB, 50%%, or FOLDER:64GB for a tmpfs other than "
        "/dev/shm (default: all that is free)",
        disk="a disk tier, such as /scratch:200GB or /scratch:80%%; may be repeated",
    )
    parser.add_argument("--link", metavar="SIZE", help="bytes a second between nodes, such as 3GB")
    parser.add_argument("--quick", action="store_true", help="5 seconds, less exact")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write it, not the user's own file"
    )
    parser.add_argument(
        "--notes", action="store_true", help="note this machine's name and kernel too"
    )
    add_json(parser)
    add_format(parser)
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write and show."""
    path = (args.output or default_machine_path()).expanduser().absolute()
    link = None if args.link is None else _link(args.link)
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name the file to write with --output")
    wishes = tiers_of(args)
    began_s = time.monotonic()
    target = _target(args)
    probed = probe_machine(
        target=target,
        memory=next((Path(wish.place) for wish in wishes if wish.kind == "memory"), None),
        disks=[Path(wish.place) for wish in wishes if wish.kind == "disk"],
        link=link,
        effort=QUICK if args.quick else USUAL,
        report=_report,
    )
    probed = replace(probed, machine=_noted(_sized(probed, wishes), args))
    write_machine(probed.machine, path)
    seconds = time.monotonic() - began_s
    if args.json:
        print_json(_result(probed, path, seconds))
    else:
        _show(probed, target, path, seconds)
    return 0


def _sized(probed: ProbeResult, wishes: Sequence[Wish]) -> Machine:
    """Return the machine with tiers of the sizes that were asked for, where there is room."""
    by_place = {(wish.kind, wish.place): wish for wish in wishes}
    tiers = []
    for tier, folder in zip(probed.machine.tiers, probed.folders, strict=True):
        size_bytes = tier.capacity_bytes
        wish = by_place.get((tier.kind, str(folder)))
        if wish is not None:
            room = TierAllowance(free_bytes=size_bytes, bound=str(folder), way_out="")
            size_bytes = min(size_bytes, wished_bytes(wish, room))
        tiers.append(replace(tier, capacity_bytes=size_bytes))
    return replace(probed.machine, tiers=tuple(tiers))


def _target(args: argparse.Namespace) -> Target | None:
    if not args.uri:
        return None
    return Target.of(
        uri_of(args), format=args.format, store=store_of(args), options=format_options_of(args)
    )


def _link(text: str) -> LinkModel:
    bytes_s = bytes_of(text.removesuffix("/s"))
    if bytes_s == 0:
        raise OptionError(f"--link {text!r} carries nothing; write for example --link 3GB")
    return LinkModel(bytes_s=float(bytes_s), latency_s=_LINK_LATENCY_S)


def _report(words: str) -> None:
    """Print the next measurement, if stderr is a terminal."""
    if can_move_cursor(sys.stderr):
        Screen(sys.stderr).line((words, "dim"))


def _noted(machine: Machine, args: argparse.Namespace) -> Machine:
    from penstock import __version__

    notes = {"command": _command(args), "penstock": __version__, **machine.notes}
    if args.notes:
        notes["host"] = platform.node()
        notes["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return replace(machine, notes=notes)


def _command(args: argparse.Namespace) -> str:
    """Return the command of this probe, without parts of URIs that may be signatures."""
    words = ["penstock", "probe", *(uri.partition("?")[0] for uri in args.uri)]
    words += ["--memory", args.memory] if args.memory else []
    words += [word for disk in args.disk for word in ("--disk", disk)]
    return shlex.join([*words, *(["--quick"] if args.quick else [])])


def _result(probed: ProbeResult, path: Path, seconds: float) -> dict[str, Any]:
    return {
        "path": str(path),
        "machine": msgspec.to_builtins(probed.machine),
        "in_flight": probed.in_flight,
        "store_read_bytes": probed.read_bytes,
        "store_requests": probed.num_requests,
        "sample_bytes": probed.sample_bytes,
        "limits_samples_s": {limit.resource: limit.samples_s for limit in probed.limits},
        "seconds": round(seconds, 3),
    }


def _show(probed: ProbeResult, target: Target | None, path: Path, seconds: float) -> None:
    screen, machine = Screen(), probed.machine
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    screen.line(("this machine", "bold"), f"  {cores}, measured in {show_seconds(seconds)}")
    screen.heading("Copies in memory, by threads")
    _show_curve(screen, machine.copy)
    for tier, folder in zip(machine.tiers, probed.folders, strict=True):
        screen.heading(f"{tier.kind.capitalize()} tier, reads by threads")
        _show_curve(screen, tier.read)
        facts = (
            f"{show_bytes(tier.capacity_bytes)}, latency {show_seconds(tier.latency_s)}, "
            f"writes {show_bytes(tier.write.at(1))}/s, {show_place(f'file://{folder}')}"
        )
        screen.line("  ", (facts, "dim"))
    if target is not None:
        _show_store(screen, probed, target)
    if machine.decode is not None:
        screen.heading("Decoding, stored bytes by threads")
        _show_curve(screen, machine.decode)
    if probed.limits:
        _show_limits(screen, probed)
    _show_notes(screen, machine)
    screen.line()
    screen.line("written to ", (show_place(f"file://{path}"), "bold"))


def _show_curve(screen: Screen, curve: Curve) -> None:
    best = max(curve.bytes_s)
    for count, bytes_s in zip(curve.counts, curve.bytes_s, strict=True):
        drawn = bar(bytes_s / best, screen.width - 24)
        screen.line(f"  {count:>4}  {show_bytes(bytes_s) + '/s':>9}  ", (drawn, "cyan"))


def _show_store(screen: Screen, probed: ProbeResult, target: Target) -> None:
    store = probed.machine.store
    screen.heading("Store, by requests in flight")
    _show_curve(screen, store.throughput)
    assert store.request_bytes is not None
    screen.pairs(
        {
            "place": show_place(target.store.uri),
            "latency": f"{show_seconds(store.latency_s)}, 99 % below "
            f"{show_seconds(store.latency_p99_s)}",
            "requests": f"of {show_bytes(store.request_bytes)}; largest useful number in flight: "
            f"{probed.in_flight}",
            "read": f"{show_bytes(probed.read_bytes)} in {show_count(probed.num_requests)} "
            "requests",
        }
    )


def _show_limits(screen: Screen, probed: ProbeResult) -> None:
    assert probed.sample_bytes is not None
    screen.heading(f"Limits for this data set, {show_bytes(probed.sample_bytes)} a sample")
    rows = [
        (limit.resource, f"{show_count(round(limit.samples_s))} samples/s")
        for limit in probed.limits
    ]
    screen.table(("if all else took no time", ""), rows, right={1})


def _show_notes(screen: Screen, machine: Machine) -> None:
    screen.heading("How it was measured")
    for name, text in machine.notes.items():
        if name.startswith(_HOW):
            for line in _wrapped(name, text, screen.width):
                screen.line((line, "dim"))


def _wrapped(name: str, text: str, width: int) -> Iterator[str]:
    lines = textwrap.wrap(text, width - 10)
    for number, line in enumerate(lines):
        yield f"  {name if number == 0 else '':<6}  {line}"
