"""`penstock tiers`: shows and removes the tiers of this user on this node."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from penstock.cli.options import add_json
from penstock.cli.screen import Screen, cut, print_json
from penstock.errors import OptionError
from penstock.storage.tier_folders import NoTierError
from penstock.storage.tier_found import FoundTier, as_json, found_tiers, remove_found
from penstock.storage.tier_sizes import SHARED_MEMORY, Disk, Memory, Wish
from penstock.units import show_bytes, show_seconds

_EXAMPLE = """\
Examples
  penstock tiers
  penstock tiers --folder /scratch
  penstock tiers --folder /scratch --remove
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Show the tiers of this user on this node: data sets, or parts of them, that\n"
        f"runs keep in memory ({SHARED_MEMORY}) and in folders of your choice. Disk tiers\n"
        "stay after a run for the next one; memory tiers stay only after kill -9."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "--folder",
        action="append",
        default=[],
        metavar="FOLDER",
        help=f"look here too, beside {SHARED_MEMORY}; may be given again",
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove those that no running program uses"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Find the tiers, remove unused ones if asked, and show all."""
    found = [(wish, tier) for wish in _places(args.folder) for tier in _found(wish)]
    removed = [tier.path for wish, tier in found if args.remove and remove_found(wish, tier)]
    tiers = [tier for _, tier in found]
    if args.json:
        print_json({"tiers": [as_json(t) | {"removed": t.path in removed} for t in tiers]})
    else:
        _show(tiers, removed, args.folder)
    return 0


def _places(folders: Sequence[str]) -> list[Wish]:
    places: list[Wish] = [Memory(1)]
    for folder in folders:
        places += [Memory(1, folder=folder), Disk(folder, 1)]
    return list({(wish.kind, wish.place): wish for wish in places}.values())


def _found(wish: Wish) -> list[FoundTier]:
    try:
        return found_tiers(wish)
    except NoTierError as error:
        raise OptionError(str(error)) from error


def _show(tiers: Sequence[FoundTier], removed: Sequence[str], folders: Sequence[str]) -> None:
    screen = Screen()
    if not tiers:
        where = ", ".join([SHARED_MEMORY, *folders])
        hint = "" if folders else "; look at disks with --folder"
        screen.line(f"no tiers of this user in {where}{hint}")
        return
    for tier in tiers:
        state = _state(tier, is_removed=tier.path in removed)
        what = tier.about.get("uri") or tier.name
        screen.line((cut(what, screen.width), "bold"))
        pairs = {
            tier.kind: f"{show_bytes(tier.size_bytes)} of at most "
            f"{show_bytes(max(tier.promised_bytes, tier.size_bytes))}",
            "state": state,
            "path": tier.path,
        }
        screen.pairs(pairs | ({"node": tier.node} if tier.node else {}))
    freed_bytes = sum(tier.size_bytes for tier in tiers if tier.path in removed)
    if removed:
        screen.line(f"removed {len(removed)} of {len(tiers)}, {show_bytes(freed_bytes)} freed")


def _state(tier: FoundTier, *, is_removed: bool) -> str:
    if tier.is_used:
        return "in use"
    age = show_seconds(max(0.0, time.time() - tier.used_at_s))
    return f"{'removed' if is_removed else 'not in use'}, last used {age} ago"
