"""`--ray`: the same work, carried out by a cluster."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext

from penstock.dataset.crew import Crew

_HERE = "here"
"""What `--ray` without an address stands for."""


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the switch that has a Ray cluster do the work."""
    group = parser.add_argument_group("Cluster")
    group.add_argument(
        "--ray",
        nargs="?",
        const=_HERE,
        metavar="ADDRESS",
        help="work on a Ray cluster: of this address, or of this machine; write it last",
    )


def crew_of(args: argparse.Namespace) -> AbstractContextManager[Crew | None]:
    """Return who does the work; None is this process."""
    if args.ray is None:
        return nullcontext()
    from penstock.dataset.ray_crew import RayCrew

    return RayCrew(None if args.ray == _HERE else args.ray)
