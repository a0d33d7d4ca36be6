"""Draws a run on one page of 80 columns. Pure: a view in, lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from penstock.cli.charts import bar
from penstock.cli.screen import Span, cut
from penstock.engine.node.survey import NodeTraffic, NodeView, RunView
from penstock.engine.peers.status import NodeStatus, ReadCounts
from penstock.units import show_bytes, show_seconds

Line = list[Span]

_BAR_WIDTH = 10
_LINKS_MAX = 6
_NODES_MAX = 64
_SENTENCES_MAX = 5
_HOST_WIDTH = 14


def page_of(view: RunView, width: int = 80) -> list[Line]:
    """Return the page of a run."""
    names = _names(view)
    lines = [_title(view, width), []]
    lines += _nodes(view, width)
    lines += _links(view.links, names)
    lines += _troubles(view, names, width)
    return lines


def _title(view: RunView, width: int) -> Line:
    answering = sum(node.status is not None for node in view.nodes)
    text = f"{answering} of {len(view.nodes)} nodes answer"
    head = f"run {view.run.run_id.hex()[:8]}"
    room = width - len(head) - len(text) - 4
    what = cut(view.dataset, room)
    gap = " " * (room - len(what) + 2)
    style = "green" if answering == len(view.nodes) else "red"
    return [(head, "bold"), "  ", what, gap, (text, style)]


def _nodes(view: RunView, width: int) -> list[Line]:
    head = f"  {'node':<18}{'by':<6}{'held':>8}  {'of':<8}  {'':<{_BAR_WIDTH}} {'':>4}"
    lines: list[Line] = [[(f"{head}  {'tier':>5} {'peers':>5} {'store':>5}", "dim")]]
    lines += [_node(node, width) for node in view.nodes[:_NODES_MAX]]
    if len(view.nodes) > _NODES_MAX:
        lines.append([(f"  … and {len(view.nodes) - _NODES_MAX} more", "dim")])
    lines.append(_total(view))
    return lines


def _node(node: NodeView, width: int) -> Line:
    name = _called(node)
    if node.status is None:
        return [f"  {name:<18}", (cut(node.error, width - 20), "red")]
    held_bytes, room_bytes = _filled(node.status)
    by = "drains" if node.status.is_draining else node.status.carrier
    return [
        f"  {name:<18}",
        (f"{by:<6}", "red" if node.status.is_draining else "dim"),
        *_fill(held_bytes, room_bytes),
        f"  {_shares(node.run.reads)}",
    ]


def _total(view: RunView) -> Line:
    statuses = [node.status for node in view.nodes if node.status is not None]
    filled = [_filled(status) for status in statuses]
    shares = _shares(sum((node.run.reads for node in view.nodes), ReadCounts()))
    text = _fill(sum(held for held, _ in filled), sum(room for _, room in filled))
    return [f"  {'all':<24}", *text, f"  {shares}"]


def _fill(held_bytes: int, room_bytes: int) -> Line:
    share = min(1.0, held_bytes / room_bytes) if room_bytes else 0.0
    drawn = bar(share, _BAR_WIDTH)
    return [
        f"{show_bytes(held_bytes):>8}  {show_bytes(room_bytes):<8}  ",
        (drawn, "cyan"),
        ("·" * (_BAR_WIDTH - len(drawn)), "dim"),
        f" {share:>4.0%}",
    ]


def _filled(status: NodeStatus) -> tuple[int, int]:
    return (
        sum(tier.held_bytes for tier in status.tiers),
        sum(tier.capacity_bytes for tier in status.tiers),
    )


def _shares(reads: ReadCounts) -> str:
    """Shares of the bytes by source; dashes where no rank has reported."""
    parts = (reads.tier_bytes, reads.peer_bytes, reads.store_bytes)
    total = sum(parts)
    return " ".join(f"{part / total:>5.0%}" if total else f"{'–':>5}" for part in parts)


def _links(links: Sequence[NodeTraffic], names: dict[str, str]) -> list[Line]:
    if not links:
        return []
    lines: list[Line] = [[]]
    if len(links) > _LINKS_MAX:
        lines += _by_node(links, names)
        lines.append([(f"The busiest of {len(links)} links", "bold")])
    else:
        lines.append([("Links", "bold")])
    busiest = sorted(links, key=lambda link: (-link.bytes_per_s, -link.size_bytes))[:_LINKS_MAX]
    most = max(link.bytes_per_s for link in busiest)
    for link in busiest:
        source, to = names.get(link.source, link.source), names.get(link.to, link.to)
        drawn = bar(link.bytes_per_s / most if most else 0.0, _BAR_WIDTH)
        lines.append(
            [
                f"  {cut(source, 16):<16} → {cut(to, 16):<16}{_rate(link.bytes_per_s)}  ",
                (f"{drawn:<{_BAR_WIDTH}}", "cyan"),
                f"  {show_bytes(link.size_bytes):>8} so far",
            ]
        )
    return lines


def _by_node(links: Sequence[NodeTraffic], names: dict[str, str]) -> list[Line]:
    """The traffic into and out of each node, where there are too many links to show all."""
    lines: list[Line] = [[(f"{'Links':<20}{'in':>11}{'out':>11}   in, out so far", "bold")]]
    for name, called in list(names.items())[:_NODES_MAX]:
        into = [link for link in links if link.to == name]
        out = [link for link in links if link.source == name]
        rates = [_rate(sum(link.bytes_per_s for link in side)) for side in (into, out)]
        sizes = [show_bytes(sum(link.size_bytes for link in side)) for side in (into, out)]
        lines.append([f"  {called:<18}{rates[0]}{rates[1]}   {sizes[0]}, {sizes[1]}"])
    return [*lines, []]


def _rate(bytes_per_s: float) -> str:
    return f"{show_bytes(bytes_per_s) + '/s':>11}"


def _troubles(view: RunView, names: dict[str, str], width: int) -> list[Line]:
    """Nodes that are suspected or lost, and messages about them."""
    rows: list[tuple[str, str]] = []
    suspected: dict[str, list[str]] = {}
    for node in view.nodes:
        for name in node.run.suspects:
            suspected.setdefault(name, []).append(_called(node))
    for name, by in suspected.items():
        rows.append(("suspect", f"{names.get(name, name)} does not answer {', '.join(by)}"))
    lost = dict.fromkeys(name for node in view.nodes for name in node.run.lost)
    rows += [("lost", f"{names.get(name, name)} was given up by the whole run") for name in lost]
    said = dict.fromkeys(text for node in view.nodes for text in node.run.log)
    rows += [("", text) for text in list(said)[-_SENTENCES_MAX:]]
    if not rows:
        return []
    lines: list[Line] = [[], [("What happened", "bold")]]
    for kind, text in rows:
        for number, part in enumerate(textwrap.wrap(text, width - 11) or [""]):
            lines.append([(f"  {'' if number else kind:<9}", "red"), part])
    return lines


def service_page(status: NodeStatus, addresses: Sequence[str]) -> list[Line]:
    """Return the page of a node service that serves no run of this user."""
    lines: list[Line] = [
        [("node service", "bold"), f"  {status.host}, up {show_seconds(status.uptime_s)}"],
        [f"  no run of yours is served here; {', '.join(addresses)}"],
    ]
    lines += [
        [f"  {tier.kind:<8}", *_fill(tier.held_bytes, tier.capacity_bytes)] for tier in status.tiers
    ]
    return lines


def _names(view: RunView) -> dict[str, str]:
    return {node.member.name: _called(node) for node in view.nodes}


def _called(node: NodeView) -> str:
    """The number and host of a node, as people know it."""
    host = node.member.host or node.member.name
    number = f"{node.member.node} " if node.member.node >= 0 else ""
    return number + cut(host, _HOST_WIDTH + 2 - len(number))
