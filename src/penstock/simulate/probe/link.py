"""The link to other nodes. One machine cannot measure it, so the claim of its interface is used."""

from __future__ import annotations

from pathlib import Path

from penstock.machine import LinkModel

_ASSUMED_BYTES_S = 1.25e9
_LATENCY_S = 1e-4
"""A round trip inside a data centre."""
_ROUTES, _INTERFACES = Path("/proc/net/route"), Path("/sys/class/net")


def link_claimed(routes: Path = _ROUTES, interfaces: Path = _INTERFACES) -> tuple[LinkModel, str]:
    """Return the link of the default route's interface, and a note about its source."""
    name = _default_interface(routes)
    try:
        megabits_s = int((interfaces / name / "speed").read_text())
    except (OSError, ValueError):
        megabits_s = -1
    if not name or megabits_s <= 0:
        link = LinkModel(bytes_s=_ASSUMED_BYTES_S, latency_s=_LATENCY_S)
        return link, "assumed, 10 Gbit/s and 0.1 ms; say it with --link"
    link = LinkModel(bytes_s=megabits_s * 125_000.0, latency_s=_LATENCY_S)
    return link, f"{megabits_s / 1000:g} Gbit/s by the word of {name}, not measured"


def _default_interface(routes: Path) -> str:
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), "")
