"""`penstock plan`: estimates what a run reads from which source, and its limit. Reads no sample."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.opened import open_named, show_place
from penstock.cli.options import add_dataset, add_json, add_shuffle, add_tiers, tiers_of
from penstock.cli.report import write_page
from penstock.cli.screen import Screen, print_json
from penstock.errors import OptionError
from penstock.machine import (
    Curve,
    LinkModel,
    Machine,
    StoreModel,
    TierModel,
    default_machine_path,
    load_machine,
)
from penstock.simulate.plan.explain import sections
from penstock.simulate.plan.page import plan_page
from penstock.simulate.plan.planner import EpochPlan, RunPlan, make_plan
from penstock.simulate.plan.summary import summary_of
from penstock.simulate.plan.what_if import what_if
from penstock.simulate.plan.work import Work
from penstock.storage.tier_sizes import TierAllowance, wished_bytes
from penstock.world import World

_EXAMPLE = """\
Examples
  penstock plan s3://bucket/train/ --epochs 90 --memory 8GB --disk /nvme:200GB
  penstock plan s3://bucket/train/ --nodes 4 --ranks 32 --html plan.html
  penstock plan s3://bucket/train/ --machine machine.toml --json | jq .later
"""

_TIER_BYTES_S = {"memory": 10e9, "disk": 2e9}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Foresee a run: how much it reads from where in the first epoch and later, how\n"
        "long that takes, what limits it, and what more of something would buy."
    )
    parser.epilog = _EXAMPLE
    add_dataset(parser, version=True)
    _add_work(parser.add_argument_group("Run"))
    group = parser.add_argument_group("Machine")
    group.add_argument(
        "--machine", metavar="FILE", help="what `penstock probe` wrote (default: the user's own)"
    )
    add_tiers(
        group,
        memory="memory tier of a node, such as 8GB; 0 for none",
        disk="disk tier of a node, such as /nvme:1TB; may be repeated (without both: as the "
        "machine says)",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write charts as a page as well")
    add_json(parser)


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    group.add_argument(
        "--ranks", type=int, metavar="N", help="on all nodes together (default: 1 a node)"
    )
    group.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="on each rank (default: 256)"
    )
    group.add_argument("--epochs", type=int, default=10, metavar="N", help="default: 10")
    add_shuffle(group)
    group.add_argument(
        "--compute",
        type=float,
        metavar="N",
        help="samples that one rank trains on a second, if nothing waits",
    )
    group.add_argument(
        "--peers",
        choices=("none", "fixed", "locality"),
        default="fixed",
        help="whether nodes read from each other, and who computes what (default: fixed)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the plan."""
    dataset = open_named(args).dataset
    machine, note = _machine(args, dataset.store.source)
    plan = make_plan(summary_of(dataset), _work(args), machine)
    if args.json:
        print_json({"uri": dataset.uri, "machine": note, **_result(plan)})
    else:
        _show(plan, dataset.uri, note)
    if args.html is not None:
        title = f"Plan for {show_place(dataset.uri)}"
        write_page(plan_page(plan, title=title, lead=f"machine: {note}"), args.html)
        if not args.json:
            Screen().line(f"wrote {args.html}")
    return 0


def _work(args: argparse.Namespace) -> Work:
    ranks = args.nodes if args.ranks is None else args.ranks
    if not 1 <= args.nodes <= ranks:
        raise OptionError(
            f"{ranks} ranks on {args.nodes} nodes: give at least 1 node, and a rank for each"
        )
    return Work(
        world=World(num_ranks=ranks, num_nodes=args.nodes),
        batch_size=args.batch_size,
        num_epochs=args.epochs,
        shuffle=args.shuffle,
        compute_samples_s=args.compute,
        peers=None if args.peers == "none" or args.nodes == 1 else args.peers,
    )


def _machine(args: argparse.Namespace, source: str) -> tuple[Machine, str]:
    """Return the machine to plan for, and the source of its numbers."""
    path = args.machine or _own_file()
    if path is not None:
        machine, note = load_machine(path), f"as measured in {show_place(str(path))}"
    else:
        machine = assumed_machine(source, os.cpu_count() or 1)
        note = (
            f"assumed, {'a local disk' if source == 'folder' else 'a remote store'}; "
            "`penstock probe` measures yours"
        )
    if args.memory is not None or args.disk:
        machine = replace(machine, tiers=_tiers(args, machine))
    return machine, note


def _own_file() -> Path | None:
    """Return the file that `penstock probe` wrote for this user, if there is one."""
    try:
        path = default_machine_path()
    except OptionError:
        return None
    return path if path.exists() else None


def assumed_machine(source: str, cores: int) -> Machine:
    """Return a machine of round, middling numbers, for users who have not measured one."""
    if source in ("folder", "memory"):
        latency_s, curve = 0.0001, Curve(counts=(1, 8), bytes_s=(1e9, 2e9))
    else:
        latency_s, curve = 0.02, Curve(counts=(1, 32), bytes_s=(50e6, 1e9))
    return Machine(
        store=StoreModel(latency_s=latency_s, latency_p99_s=5 * latency_s, throughput=curve),
        link=LinkModel(bytes_s=1.25e9, latency_s=0.0001),
        cores=cores,
    )


def _tiers(args: argparse.Namespace, machine: Machine) -> tuple[TierModel, ...]:
    """Return the tiers that were named, as fast as the machine's of that kind, or as is usual.

    Their folders are not looked at, because the plan may be for another machine.
    """
    if args.memory == "0":
        args = argparse.Namespace(memory=None, disk=args.disk)
    known = {kind: [tier for tier in machine.tiers if tier.kind == kind] for kind in _TIER_BYTES_S}
    tiers = []
    for wish in tiers_of(args):
        rate = Curve.flat(_TIER_BYTES_S[wish.kind])
        plain = TierModel(kind=wish.kind, capacity_bytes=0, read=rate, write=rate)
        like = known[wish.kind].pop(0) if known[wish.kind] else plain
        room = TierAllowance(free_bytes=like.capacity_bytes, bound="the machine's file", way_out="")
        size_bytes = wished_bytes(wish, room)
        if not size_bytes:
            raise OptionError(
                f"{wish.size} of a {wish.kind} tier that no machine file describes is unknown; "
                "give a size in bytes, or measure one with `penstock probe`"
            )
        tiers.append(replace(like, capacity_bytes=size_bytes))
    return tuple(tiers)


def _result(plan: RunPlan) -> dict[str, Any]:
    return {
        "num_samples": plan.summary.num_samples,
        "size_bytes": plan.summary.size_bytes,
        "num_units": plan.summary.num_units,
        "cache_bytes": plan.cache_bytes,
        "held_bytes": round(plan.held.total_bytes),
        "first": _epoch(plan.first),
        "later": _epoch(plan.later),
        "total_s": plan.total_s,
        "store_bytes": round(plan.store_bytes),
        "bound_bytes": plan.bound_bytes,
        "requests_in_flight": plan.requests_in_flight,
        "look_ahead_s": plan.look_ahead_s,
        "merge_gap_bytes": plan.merge_gap_bytes,
        "what_if": [
            {
                "what": change.what,
                "gain_s": change.gain_s,
                "store_bytes_saved": round(change.store_bytes_saved),
            }
            for change in what_if(plan)
        ],
    }


def _epoch(epoch: EpochPlan) -> dict[str, Any]:
    return {
        "seconds": epoch.seconds,
        "bottleneck": epoch.bottleneck.resource,
        "stall_share": epoch.stall_share,
        "bytes": {t.source: round(t.size_bytes) for t in epoch.traffic},
        "requests": {t.source: round(t.num_requests) for t in epoch.traffic},
        "busy_s": {load.resource: load.seconds for load in epoch.loads},
    }


def _show(plan: RunPlan, uri: str, note: str) -> None:
    screen = Screen()
    screen.line((show_place(uri), "bold"))
    screen.line((f"  machine: {note}", "dim"))
    for section in sections(plan):
        screen.heading(section.heading)
        for line in section.lines:
            screen.line(f"  {line}")
