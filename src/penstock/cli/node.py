"""`penstock node`: keeps and serves what jobs of this host read, for as long as it runs."""

from __future__ import annotations

import argparse
import logging

from penstock.cli.options import add_tiers
from penstock.cli.screen import Screen
from penstock.engine.node.options import HTTP, LISTEN, SHARES, NodeOptions, config_here, options_of
from penstock.engine.node.service import NodeService
from penstock.engine.node.signals import Signals
from penstock.units import show_bytes

_EXAMPLE = """\
Examples
  penstock node --memory 64GB --disk /nvme:2TB
  penstock node --disk /nvme:2TB --share group --limit-dataset 500GB
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Run the node service: one process a host that keeps what jobs have read in\n"
        "memory and on disk, for the jobs that come after, and serves it to the other\n"
        "nodes of a run. Jobs find it by themselves. All options may stand in the table\n"
        "[node] of penstock.toml as well. SIGTERM ends it after what is under way."
    )
    parser.epilog = _EXAMPLE
    keep = parser.add_argument_group("What it may take")
    add_tiers(
        keep,
        memory="64GB, or FOLDER:64GB for a tmpfs other than /dev/shm",
        disk="/nvme:2TB; may be repeated",
    )
    keep.add_argument("--limit-dataset", metavar="SIZE", help="the most for one data set")
    keep.add_argument("--limit-user", metavar="SIZE", help="the most for one user")
    keep.add_argument(
        "--share",
        choices=SHARES,
        help="who uses what a job has kept: its user (default), the group, all",
    )
    where = parser.add_argument_group("Where it is found")
    where.add_argument("--listen", metavar="ADDRESS", help=f"for peers; {LISTEN}")
    where.add_argument("--socket", metavar="PATH", help="for jobs; /run/penstock/node.sock")
    where.add_argument("--http", metavar="ADDRESS", help=f"/metrics and /healthz; {HTTP}, or none")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    logger = logging.getLogger("penstock")
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    config, path = config_here()
    given = {name.replace("_", "-"): value for name, value in vars(args).items()}
    options = options_of(given, config)
    with Signals() as signals, NodeService(options) as service:
        _show(service, options, path)
        return service.wait(signals)


def _show(service: NodeService, options: NodeOptions, config: str) -> None:
    screen = Screen()
    screen.line(("penstock node", "bold"), f"  {service.name[:8]}, ready")
    rows = {}
    for number, place in enumerate(service.sets.places):
        held_bytes = sum(each.held_bytes[number] for each in service.known)
        text = (
            f"{show_bytes(held_bytes)} of {show_bytes(place.capacity_bytes)} in {place.root.path}"
        )
        rows[f"{place.kind} {number}" if place.kind in rows else place.kind] = text
    bound, known_as = service.server.address, service.addresses
    at = "" if known_as == (bound,) else f", known as {', '.join(map(str, known_as))}"
    rows |= {
        "share": {"user": "each user its own", "group": "by group", "all": "all users"}[
            options.share
        ],
        "jobs": options.socket,
        "peers": f"{bound}{at}",
        "http": f"http://{service.web.address}/metrics" if service.web else "none",
    }
    screen.pairs(rows | ({"config": config} if config else {}))
