"""`penstock simulate`: compares policies on a machine that is only described."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.charts import bar
from penstock.cli.options import add_json
from penstock.cli.progress import ProgressBar
from penstock.cli.screen import Screen, print_json
from penstock.errors import OptionError
from penstock.simulate.bulk import sweep
from penstock.simulate.page import (
    COLUMNS,
    LEGEND,
    panels_of,
    results_html,
    row_of,
    title_of,
)
from penstock.simulate.policies import POLICIES, check_policy
from penstock.simulate.result import PolicyResult
from penstock.simulate.scenario import Scenario, load_scenario
from penstock.units import show_bytes, show_count

_EXAMPLE = """\
Policies
{policies}

Examples
  penstock simulate cluster.toml
  penstock simulate cluster.toml --policies ours,nopfs,lru --nodes 4,16,64
  penstock simulate cluster.toml --cache 0.1,0.5,1 --html out.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Compare ways of getting samples to a training job, on a machine that is only\n"
        "described: time, bytes from the store, stalls, samples visited. A scenario is a\n"
        "TOML file: [dataset], [job], [machine] (as penstock probe writes it), [sweep]."
    )
    parser.epilog = _EXAMPLE.format(policies=_names())
    parser.add_argument("scenario", metavar="SCENARIO", help="a TOML file")
    parser.add_argument("--policies", metavar="A,B", default="", help="default: all of them")
    parser.add_argument("--nodes", metavar="4,16", default="", help="numbers of nodes")
    parser.add_argument(
        "--cache", metavar="0.1,1", default="", help="capacity of all nodes over the data set"
    )
    parser.add_argument("--html", metavar="FILE", help="write charts and the table as a page")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, print the results, and write the page if asked."""
    scenario = load_scenario(args.scenario)
    results = _results(scenario, args)
    title = scenario.name or Path(args.scenario).stem
    if args.html:
        Path(args.html).write_text(results_html(results, title), encoding="utf-8")
    if args.json:
        print_json({"scenario": title, "results": [_plain(r) for r in results]})
        return 0
    screen = Screen()
    _show_scenario(screen, scenario, title)
    _show_results(screen, results)
    if args.html:
        screen.line()
        screen.line(f"wrote {args.html}")
    return 0


def _results(scenario: Scenario, args: argparse.Namespace) -> list[PolicyResult]:
    policies = [word.strip() for word in args.policies.split(",") if word.strip()]
    for name in policies:
        check_policy(name)
    nodes = [int(n) for n in _numbers(args.nodes, "--nodes", 1)]
    cache = _numbers(args.cache, "--cache", 0)
    plan = scenario.sweep
    total = (
        len(policies or plan.policies or POLICIES)
        * len(nodes or plan.nodes or (0,))
        * len(cache or plan.cache or (0,))
    )
    out: list[PolicyResult] = []
    with ProgressBar("simulating", "runs") as progress:
        for result in sweep(scenario, policies=policies, nodes=nodes, cache=cache):
            out.append(result)
            progress.update(len(out), total)
    return out


def _numbers(text: str, option: str, least: float) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = [-1.0]
    if any(n < least or (least == 1 and n % 1) for n in numbers):
        raise OptionError(
            f"{option} {text!r} makes no sense; write numbers from {least:g} on with commas "
            f"between them, such as {'4,16,64' if least else '0.1,0.5,1'}"
        )
    return numbers


def _plain(result: PolicyResult) -> dict[str, Any]:
    ratios = ("time_ratio", "byte_ratio", "stall_share", "visited_share")
    return {**asdict(result), **{name: getattr(result, name) for name in ratios}}


def _names() -> str:
    lines, line = [], " "
    for name in POLICIES:
        if len(line) + len(name) > 76:
            lines.append(line)
            line = " "
        line += f" {name}"
    return "\n".join([*lines, line])


# -- on the screen -------------------------------------------------------------------------------


def _show_scenario(screen: Screen, scenario: Scenario, title: str) -> None:
    sizes, job = scenario.sizes(), scenario.job
    screen.line((title, "bold"))
    screen.line(
        f"  {show_count(len(sizes))} samples, {show_bytes(int(sizes.sum()))}; {job.epochs} epochs, "
        f"{job.ranks} {'rank' if job.ranks == 1 else 'ranks'} a node, batch {job.batch}"
    )


def _show_results(screen: Screen, results: Sequence[PolicyResult]) -> None:
    points: dict[tuple[int, float], list[PolicyResult]] = {}
    for r in results:
        points.setdefault((r.nodes, round(r.cache_share, 3)), []).append(r)
    for (nodes, share), part in points.items():
        some = f"{show_count(nodes)} {'node' if nodes == 1 else 'nodes'}"
        screen.heading(f"{some}, cache {share:.0%} of the data set")
        _show_table(screen, part)
    screen.line()
    for line in textwrap.wrap(LEGEND, screen.width - 4):
        screen.line(("  " + line, "dim"))
    if len(points) == 1:
        screen.heading("Time over computing alone (log scale)")
        _show_bars(screen, results)
    else:
        _show_course(screen, results)


def _show_table(screen: Screen, results: Sequence[PolicyResult]) -> None:
    keep = [i for i, name in enumerate(COLUMNS) if name not in ("nodes", "cache")]
    able = [row_of(r) for r in results if not r.why_not]
    rows = [[row[i] for i in keep] for row in able]
    screen.table([COLUMNS[i] for i in keep], rows, right=range(1, len(keep)))
    for r in results:
        if r.why_not:
            text = f"{title_of(r.policy)}: {r.why_not}"
            for line in textwrap.wrap(text, screen.width - 4, subsequent_indent="  "):
                screen.line((f"  {line}", "dim"))


def _show_bars(screen: Screen, results: Sequence[PolicyResult]) -> None:
    shown = [r for r in results if not r.why_not]
    most = max((r.time_ratio for r in shown), default=1.0)
    room = screen.width - 34
    for r in shown:
        drawn = bar(_share(r.time_ratio, most), room)
        style = "green" if r.policy == "ours" else "cyan"
        screen.line(f"  {title_of(r.policy):<20} ", (drawn, style), f" {r.time_ratio:.2f}")


def _show_course(screen: Screen, results: Sequence[PolicyResult]) -> None:
    """Show the time of each policy at every point of a sweep, and its course."""
    for name, part in panels_of([r for r in results if not r.why_not]):
        by_nodes = len({r.nodes for r in part}) > 1
        screen.heading(
            f"Time over computing alone, by {'nodes' if by_nodes else 'cache'}"
            + (f"; {name}" if name else "")
        )
        times: dict[str, dict[float, float]] = {}
        for r in part:
            x = float(r.nodes) if by_nodes else round(r.cache_share, 3)
            times.setdefault(r.policy, {})[x] = r.time_ratio
        xs = sorted({x for mine in times.values() for x in mine})
        most = max(t for mine in times.values() for t in mine.values())
        rows = [
            [
                title_of(policy),
                *(f"{mine[x]:.2f}" if x in mine else "" for x in xs),
                "".join(_height(mine[x], most) if x in mine else " " for x in xs),
            ]
            for policy, mine in times.items()
        ]
        header = ["policy", *(f"{x:g}" if by_nodes else f"{x:.0%}" for x in xs), ""]
        screen.table(header, rows, right=range(1, len(xs) + 1))


def _height(ratio: float, most: float) -> str:
    """Return a bar of one column, as high as the ratio on a scale that all policies share."""
    return "▁▂▃▄▅▆▇█"[round(_share(ratio, most) * 7)]


def _share(ratio: float, most: float) -> float:
    """Return where a ratio lies between 1 and the largest, on a scale of logarithms."""
    return math.log(max(ratio, 1.0)) / max(math.log(most), 1e-9)
