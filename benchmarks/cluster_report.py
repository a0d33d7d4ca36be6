"""The table of `cluster`: every measured number beside its limit."""

from collections.abc import Callable

ROWS: dict[str, Callable[[dict, dict, dict], str]] = {
    "store MB": lambda row, _, __: f"{row['store_bytes'] / 1e6:,.1f}",
    "least MB": lambda _, limits, __: f"{limits['store_bytes'] / 1e6:,.1f}",
    "of least": lambda row, limits, _: f"{row['store_bytes'] / limits['store_bytes']:.4f}",
    "at the store MB": lambda row, _, __: megabytes(row.get("sent_bytes")),
    "peer MB/epoch": lambda row, _, __: f"{row['peer_bytes'] / 1e6:,.1f}",
    "S(1-1/N)": lambda row, limits, _: ratio(row["peer_bytes"], limits["fixed_bytes"]),
    "S sqrt(..)": lambda row, limits, _: ratio(row["peer_bytes"], limits["locality_bytes"]),
    "epochs s": lambda row, _, __: " ".join(f"{s:.2f}" for s in row["epoch_s"]),
    "2+ of no I/O": lambda row, _, rows: against_dry(row, rows),
    "stalled": lambda row, _, __: f"{row['stall_share']:.1%}",
    "stream": lambda row, _, __: {True: "right", False: "WRONG"}.get(row.get("is_right"), "-"),
}


def megabytes(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 1e6:,.1f}"


def ratio(value: float, limit: float) -> str:
    return f"{value / limit:.3f}" if value else "-"


def against_dry(row: dict, rows: dict[str, dict]) -> str:
    """Return the time of the later epochs over that of the loop without reads."""
    dry = rows.get("no I/O")
    return f"{sum(row['epoch_s'][1:]) / sum(dry['epoch_s'][1:]):.3f}" if dry else "-"


def table(
    question: str,
    num_nodes: int,
    limits: dict[str, float],
    rows: dict[str, dict],
    columns: dict[str, Callable[[dict, dict, dict], str]],
) -> str:
    cells = [
        [name, *(show(row, limits, rows) for show in columns.values())]
        for name, row in rows.items()
    ]
    head = [f"{num_nodes} nodes", *columns]
    widths = [max(len(line[k]) for line in [head, *cells]) for k in range(len(head))]
    lines = [head, ["-" * width for width in widths], *cells]
    said = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    limited = (
        f"limits: store {limits['store_bytes'] / 1e6:,.1f} MB; peer MB an epoch "
        f"{limits['fixed_bytes'] / 1e6:,.1f} fixed, {limits['locality_bytes'] / 1e6:,.1f} locality"
    )
    return "\n".join([question, limited, "", *said])
