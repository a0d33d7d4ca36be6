"""One page with every chart and every part, on numbers that are computed here."""

from __future__ import annotations

import numpy as np

from penstock.report.charts import (
    ACCENT,
    MUTED,
    Axis,
    BarChart,
    Bars,
    Chart,
    Fold,
    HeatMap,
    LaneChart,
    LaneSpans,
    Line,
    LineChart,
    Listing,
    Mark,
    Page,
    PageSection,
    PageTable,
    Points,
    Prose,
    ScatterChart,
    Tiles,
    ecdf_line,
    histogram_line,
)

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
TIME = Axis(name="time since the start", unit="s")


def scaling() -> LineChart:
    nodes = np.array([4, 16, 64, 256, 1024])
    names = (HOSTILE, "LRU", "the least possible")
    return LineChart(
        title="Epoch time by nodes",
        reading="Time falls with nodes until the store's bandwidth is used up.",
        x=Axis(name="nodes", log=True),
        y=Axis(name="time of an epoch", unit="s", log=True),
        lines=[
            Line(
                name=name,
                x=nodes,
                y=(y := (900 + 200 * n) / nodes + 2 * n),
                low=y * 0.8 if n == 0 else None,
                high=y * 1.25 if n == 0 else None,
                is_dashed=n == 2,
                colour=(ACCENT, None, MUTED)[n],
            )
            for n, name in enumerate(names)
        ],
        marks=[Mark(label="8 ranks a node", y=20)],
    )


def sources(num: int = 400) -> LineChart:
    x = np.linspace(0, 5400, num)
    grow = 1 - np.exp(-x / 900)
    return LineChart(
        title="Sources over time",
        reading="The cache takes over from the store in the first half hour.",
        x=TIME,
        y=Axis(name="bytes read", unit="bytes/s"),
        lines=[
            Line(name="memory", x=x, y=2e9 * grow),
            Line(name="peers", x=x, y=5e8 * grow * (1 + 0.2 * np.sin(x / 60))),
            Line(name="store", x=x, y=2.2e9 * (1 - grow)),
        ],
        is_stacked=True,
        shaded=[(0, 1200)],
        marks=[Mark(label="epoch 1", x=1200)],
    )


def distributions() -> list[Chart]:
    sizes = np.random.default_rng(1).lognormal(11.5, 0.6, 20_000)
    waits = np.random.default_rng(2).gamma(2.0, 0.004, (2, 5000))
    return [
        LineChart(
            title="Request sizes",
            reading="Most requests have about 100 kB.",
            x=Axis(name="bytes of a request", unit="bytes", log=True),
            y=Axis(name="requests"),
            lines=[histogram_line("requests", sizes, log=True)],
            is_half=True,
        ),
        LineChart(
            title="Latency",
            reading="Half of the requests are answered within 7 ms.",
            x=Axis(name="latency", unit="s"),
            y=Axis(name="share of the requests", unit="share", high=1),
            lines=[ecdf_line("store", waits[0]), ecdf_line("peers", waits[1] / 3)],
            is_half=True,
        ),
    ]


def bars() -> list[Chart]:
    return [
        BarChart(
            title="Time over computing alone",
            reading="Shorter is better, 1 is the bound.",
            category=Axis(name="policy"),
            categories=["Penstock", "NoPFS", "a policy with a really long name", "naive"],
            value=Axis(name="time over computing alone", log=True, low=1),
            bars=[Bars(name="ratio", values=[1.02, 1.31, 2.5, 9.7])],
            is_horizontal=True,
            has_labels=True,
            highlighted=[0],
        ),
        BarChart(
            title="Where a step's time goes",
            reading="Waits shrink from epoch to epoch.",
            category=Axis(name="epoch"),
            categories=[str(n) for n in range(8)],
            value=Axis(name="share of the step", unit="share", high=1),
            bars=[
                Bars(name="compute", values=[0.5 + 0.05 * n for n in range(8)]),
                Bars(name="wait", values=[0.5 - 0.05 * n for n in range(8)]),
            ],
            is_stacked=True,
            marks=[Mark(label="goal", y=0.9)],
        ),
    ]


def heat() -> HeatMap:
    values = np.random.default_rng(3).gamma(20, 0.01, (16, 120))
    values[11, 40:80] *= 2.5
    values[3, 7] = np.nan
    return HeatMap(
        title="Step time by rank",
        reading="Rank 11 is slow from step 40 to step 80.",
        column=Axis(name="step"),
        columns=[str(n) for n in range(120)],
        row=Axis(name="rank"),
        rows=[str(n) for n in range(16)],
        value=Axis(name="step time", unit="s"),
        values=values,
    )


def lanes() -> LaneChart:
    starts = np.arange(12) * 0.004
    return LaneChart(
        title="Lanes of a step",
        reading="Communication runs beside computation.",
        x=Axis(name="time", unit="s", high=0.056),
        lanes=["compute", "net:data_parallel:gather", "fetch"],
        spans=[
            LaneSpans(
                name="computation",
                lanes=[0] * 12,
                starts=starts,
                ends=starts + 0.0038,
                labels=[f"matmul {n}" for n in range(12)],
            ),
            LaneSpans(
                name="communication",
                lanes=[1] * 6,
                starts=starts[::2] + 0.003,
                ends=starts[::2] + 0.009,
                labels=[HOSTILE] * 6,
                notes=["1.5 MB sent"] * 6,
            ),
            LaneSpans(
                name="for the next step",
                lanes=[2],
                starts=[0.02],
                ends=[0.05],
                labels=["fetch"],
                is_faint=True,
            ),
        ],
        marks=[Mark(label="end", x=0.051)],
    )


def offsets(num: int, num_ranks: int = 8) -> ScatterChart:
    """Reads in shuffled order: the case that compresses worst."""
    chance = np.random.default_rng(4)
    return ScatterChart(
        title="Offsets over time",
        reading="Ranks read the set in random order; a band means a hot shard.",
        x=TIME,
        y=Axis(name="offset in the data set", unit="bytes"),
        points=[
            Points(
                name=f"rank {rank}",
                x=np.sort(chance.uniform(0, 3600, num // num_ranks)),
                y=chance.uniform(0, 1.4e11, num // num_ranks),
            )
            for rank in range(num_ranks)
        ],
    )


def gallery(num_points: int = 20_000) -> Page:
    """All charts, in a page with all other parts."""
    return Page(
        title="A page of every chart",
        lead="Run `r7` · 8 ranks · 4 nodes",
        sections=[
            PageSection(
                title="Verdict",
                parts=[
                    Prose(text="The store takes **38 %** of `step`.", kind="verdict"),
                    Tiles(tiles=[("38%", "of the time waits"), ("4,700", "images a second")]),
                    PageTable(
                        head=["change", "gain", "how"],
                        rows=[[HOSTILE, "12%", "`workers=8`"], ["not possible here"]],
                        left=(0, -1),
                        strong=[0],
                    ),
                    Fold(summary="All parameters", parts=[Listing(text="seed = 7\nbatch = 64")]),
                ],
            ),
            PageSection(title="Scaling", parts=[scaling()]),
            PageSection(title="Sources", parts=[sources(), offsets(num_points)]),
            PageSection(title="Distributions", parts=distributions()),
            PageSection(title="Bars", parts=bars()),
            PageSection(title=HOSTILE, parts=[heat(), lanes()]),
        ],
    )


NUM_CHARTS = 9
