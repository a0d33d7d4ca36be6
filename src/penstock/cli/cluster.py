"""`penstock cluster`: shows the nodes of a run, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.cli.cluster_page import Line, page_of, service_page
from penstock.cli.options import add_json
from penstock.cli.screen import Screen, can_move_cursor, print_json
from penstock.engine.node.options import address_of
from penstock.engine.node.survey import RunsFound, RunSurvey, RunView, found_here
from penstock.engine.peers.base import Address
from penstock.engine.peers.node_messages import ListedRun, RunsListed
from penstock.engine.peers.run_files import runs_folder
from penstock.errors import OptionError

_EVERY_S = 2.0
_ONCE_S = 0.5
"""Time between the two looks that a rate needs."""
_EXAMPLE = """\
Examples
  penstock cluster
  penstock cluster --once
  penstock cluster --run 3f9a1c2e --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Show the nodes of a run: what they hold, where their ranks read from, what goes\n"
        "over the links, who does not answer. Runs of this user are found by themselves,\n"
        "on any host where one of their ranks or a node service runs."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "address", metavar="[ADDRESS …]", nargs="*", help="only these nodes, such as 10.0.0.5:7410"
    )
    parser.add_argument("--run", metavar="ID", help="which run, where there are several")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Find the run and show it."""
    only = [address_of(text, "address") for text in args.address]
    found = found_here()
    if not found.live and found.service is not None and not args.run:
        _show_service(found.service, as_json=args.json)
        _tell_of_silent(found.silent)
        return 0
    chosen = _chosen(found, args.run)
    with RunSurvey(chosen, only) as survey:
        if args.json:
            print_json(_as_json(_looked(survey)))
        elif args.once or not sys.stdout.isatty():
            _print(page_of(_looked(survey), Screen().width))
            _tell_of_others(found.live, chosen)
            _tell_of_silent(found.silent)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                _live(survey)
    return 0


def _chosen(found: RunsFound, wanted: str | None) -> ListedRun:
    # A run that was named is shown even if it is silent: the user wants to know why.
    named = found.live + (found.silent if wanted else [])
    matching = [run for run in named if run.run_id.hex().startswith((wanted or "").lower())]
    if matching:
        return matching[0]
    if found.live:
        there = ", ".join(_short(found.live))
        raise OptionError(f"no run {wanted!r} of yours was found here; there are: {there}")
    silent = f" ({_silence(found.silent)})" if found.silent else ""
    raise OptionError(
        "no run of yours was found on this host: it needs peers=True and has to be running, with a "
        f"rank here or through the node service of this host{silent}"
    )


def _short(runs: Sequence[ListedRun]) -> list[str]:
    return [run.run_id.hex()[:8] for run in runs]


def _silence(silent: Sequence[ListedRun]) -> str:
    return (
        f"nobody answers for {', '.join(_short(silent))}: over, or out of reach from here; what "
        f"they left lies in {runs_folder()}"
    )


def _tell_of_silent(silent: Sequence[ListedRun]) -> None:
    if silent:
        print(_silence(silent), file=sys.stderr)


def _looked(survey: RunSurvey) -> RunView:
    survey.look()
    time.sleep(_ONCE_S)
    return survey.look()


def _print(lines: Sequence[Line]) -> None:
    screen = Screen()
    for line in lines:
        screen.line(*line)


def _tell_of_others(runs: Sequence[ListedRun], chosen: ListedRun) -> None:
    others = _short([run for run in runs if run.run_id != chosen.run_id])
    if others:
        print(f"other runs here: {', '.join(others)}; choose with --run", file=sys.stderr)


def _live(survey: RunSurvey) -> None:
    """Show the run until Ctrl-C; on a terminal that cannot move its cursor, page after page."""
    width = Screen().width
    if not can_move_cursor(sys.stdout):
        while True:
            _print([*page_of(survey.look(), width), []])
            time.sleep(_EVERY_S)
    from rich.console import Console
    from rich.live import Live

    page: list[Line] = []
    try:
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                page = page_of(survey.look(), width)
                live.update(_rich(page), refresh=True)
                time.sleep(_EVERY_S)
    finally:
        _print(page)  # The live view vanishes with its screen; the last page stays.


def _rich(lines: Sequence[Line]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True)
    for line in lines:
        text.append(Text.assemble(*line))
        text.append("\n")
    return text


def _show_service(seen: RunsListed, *, as_json: bool) -> None:
    addresses = [str(Address(host=host, port=port)) for host, port in seen.served_at]
    if as_json:
        print_json({"run": None, "service": msgspec.to_builtins(seen.status)})
    else:
        _print(service_page(seen.status, addresses))


def _as_json(view: RunView) -> dict[str, Any]:
    return {
        "run": view.run.run_id.hex(),
        "dataset": view.dataset,
        "nodes": [
            {
                "node": node.member.node,
                "name": node.member.name,
                "host": node.member.host,
                "addresses": [
                    str(Address(host=host, port=port)) for host, port in node.member.addresses
                ],
                "error": node.error or None,
                "status": msgspec.to_builtins(node.status),
            }
            for node in view.nodes
        ],
        "links": [
            {
                "from": link.source,
                "to": link.to,
                "bytes": link.size_bytes,
                "bytes_per_s": link.bytes_per_s,
            }
            for link in view.links
        ],
    }
