"""The table of a comparison: medians with their spread, every rate beside its limit."""

from statistics import median

from benchmarks.peers import EVERYONE
from benchmarks.works import Work

COLUMNS = {
    "loader": "<26",
    "samples/s": ">11",
    "min..max": ">23",
    "of limit": ">8",
    "MB/s": ">7",
    "CPU s/GB": ">8",
    "mixing": ">6",
    "peak RSS MB": ">11",
    "private MB": ">10",
    "first batch s": ">13",
    "others": ">6",
    "runs": ">4",
}


def summarize(rows: dict[tuple[str, str], list[dict]], broken: dict) -> list[dict]:
    """Return a row for each loader and variant: medians over rounds, or the reason of a failure."""
    limits = limit_of_rounds(rows)
    return [
        {"peer": peer, "variant": variant, "failed": broken[peer, variant]}
        if (peer, variant) in broken
        else summary_of(peer, variant, results, limits)
        for (peer, variant), results in rows.items()
    ]


def limit_of_rounds(rows: dict[tuple[str, str], list[dict]]) -> dict[int, float]:
    """Return the limit of each round: of one thread and two the better, each by its median."""
    rates: dict[int, dict[str, list[float]]] = {}
    for (peer, variant), results in rows.items():
        for result in results:
            if peer == "limit" and "failed" not in result:
                rates.setdefault(result["round"], {}).setdefault(variant, []).append(rate(result))
    return {number: max(map(median, of.values())) for number, of in rates.items()}


def summary_of(peer: str, variant: str, results: list[dict], limits: dict[int, float]) -> dict:
    good = [result for result in results if "failed" not in result]
    row = {"peer": peer, "variant": variant, "runs": len(good)}
    if not good:
        return row | {"failed": results[-1]["failed"] if results else "not run"}
    rates = [rate(result) for result in good]
    fractions = [rate(r) / limits[r["round"]] for r in good if r["round"] in limits]
    sample_bytes = good[0]["sample_bytes"]
    cpu_s_per_gb = median(r["cpu_s"] / r["samples"] for r in good) * 1e9 / sample_bytes
    return row | {
        "version": good[0]["version"],
        "samples_per_s": median(rates),
        "samples_per_s_min": min(rates),
        "samples_per_s_max": max(rates),
        "of_limit": median(fractions) if fractions else None,
        "mb_per_s": median(rates) * sample_bytes / 1e6,
        "cpu_s_per_gb": cpu_s_per_gb,
        "mixing": median(r["mixing"] for r in good),
        "peak_rss_mb": median(r["peak_rss_bytes"] for r in good) / 1e6,
        "private_mb": median(r["private_bytes"] for r in good) / 1e6,
        "first_batch_s": median(r["first_batch_s"] for r in good),
        "others": median(r["others"] for r in good),
        "failures": [r["failed"] for r in results if "failed" in r],
        "results": results,
    }


def rate(result: dict) -> float:
    return result["samples"] / result["seconds"]


def text(question: str, work: Work, summary: list[dict], conditions: dict) -> str:
    """Return the table in Markdown, with what it was measured on and how each peer shuffles."""
    said = ", ".join(f"{name} {value}" for name, value in conditions.items())
    head = f"{question}\n{work.num_samples:,} samples, batch {work.batch_size}; {said}\n"
    rule = ["-" * (int(form[1:]) - 1) + "-:"[form[0] == ">"] for form in COLUMNS.values()]
    lines = [line(COLUMNS), line(rule), *map(row_text, summary)]
    return "\n".join([head, *lines, "", *footnotes(summary)])


def line(cells: object) -> str:
    padded = [f"{cell:{form}}" for cell, form in zip(cells, COLUMNS.values(), strict=True)]
    return f"| {' | '.join(padded)} |"


def row_text(row: dict) -> str:
    name = f"{row['peer']} {row['variant']} {row.get('version', '')}".strip()
    if "failed" in row:
        return f"| {name:26} | failed: {row['failed']} |"
    return line(
        [
            name,
            f"{row['samples_per_s']:,.0f}",
            f"{row['samples_per_s_min']:,.0f}..{row['samples_per_s_max']:,.0f}",
            "-" if row["of_limit"] is None else f"{row['of_limit']:.3f}",
            f"{row['mb_per_s']:,.0f}",
            f"{row['cpu_s_per_gb']:.2f}",
            f"{row['mixing']:.3f}",
            f"{row['peak_rss_mb']:,.0f}",
            f"{row['private_mb']:,.0f}",
            f"{row['first_batch_s']:.1f}",
            f"{row['others']:.2f}",
            row["runs"],
        ]
    )


def footnotes(summary: list[dict]) -> list[str]:
    """Say how each peer shuffles, and what the variants in this table mean."""
    notes = []
    for peer in dict.fromkeys(row["peer"] for row in summary):
        variants = [row["variant"] for row in summary if row["peer"] == peer]
        notes.append(f"- {peer}: {EVERYONE[peer].shuffle}")
        for suffix, meaning in EVERYONE[peer].notes.items():
            if any(variant.endswith(suffix) for variant in variants):
                notes.append(f"- {peer} {suffix}: {meaning}")
    return notes
