"""The runs of `predict_runs`: what is calibrated with, what fills the table of residuals, and what
is scored. The three sets have no configuration in common."""

from dataclasses import dataclass, field

from testkit.shaper import LogNormal, Shape

SIGMA = 0.3
"""Spread of the store's latency."""
TORCH = {
    "loader": "torch",
    "store": "http",
    "num_samples": 480,
    "sample_bytes": 100_000,
    "batch_size": 8,
    "workers": 2,
    "prefetch_factor": 2,
    "compute_s": 0.0012,
    "decode_s": 0.0003,
    "epochs": 1,
    "nodes": 1,
    "ranks": 1,
    "latency_s": 0.015,
    "bytes_s": 20e6,
}
TAIL = TORCH | {"store": "tail", "num_samples": 960, "sample_bytes": 0, "compute_s": 0.002}
PENSTOCK = {
    "loader": "penstock",
    "store": "s3",
    "num_samples": 512,
    "sample_bytes": 110_000,
    "batch_size": 16,
    "workers": "here",
    "prefetch_factor": 1,
    "compute_s": 0.003,
    "decode_s": 0,
    "epochs": 3,
    "nodes": 1,
    "ranks": 1,
    "cache": 0.3,
    "disk": 0.0,
    "look_ahead": 10_000_000,
    "latency_s": 0.015,
    "bytes_s": 25e6,
    "link_bytes_s": 0,
}
LARGE = {"num_samples": 1536}
"""Several nodes read a larger set, so that their epochs have as many steps."""
BASES = {"torch": TORCH, "tail": TAIL, "penstock": PENSTOCK}


@dataclass(frozen=True)
class Case:
    """One run: a base and what differs from it."""

    base: str
    part: str
    """`calibrate`, `residuals` or `scored`."""
    changes: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        changed = "".join(f" {k}={v:g}" for k, v in self.changes.items())
        return f"{self.base}{changed}"

    @property
    def task(self) -> dict:
        return BASES[self.base] | self.changes

    @property
    def shape(self) -> Shape:
        task = self.task
        return Shape(latency=LogNormal(task["latency_s"], SIGMA), bandwidth_bytes_s=task["bytes_s"])


def cases(base: str, part: str, *changes: dict) -> list[Case]:
    return [Case(base, part, change) for change in changes]


CALIBRATE = [
    *cases("torch", "calibrate", {}, {"workers": 8}),
    *cases("tail", "calibrate", {}, {"workers": 6}),
    *cases("penstock", "calibrate", {}, {"cache": 1.0, "compute_s": 0.006}),
]
RESIDUALS = [
    *cases(
        "torch",
        "residuals",
        {"workers": 1},
        {"workers": 3, "prefetch_factor": 1},
        {"workers": 5, "prefetch_factor": 3},
        {"workers": 7},
        {"workers": 3, "batch_size": 24},
        {"workers": 5, "batch_size": 4, "compute_s": 0.002},
        {"workers": 3, "compute_s": 0.009},
        {"workers": 5, "latency_s": 0.03},
        {"workers": 3, "latency_s": 0.008},
        {"workers": 7, "bytes_s": 12e6},
        {"workers": 7, "bytes_s": 40e6},
        {"workers": 1, "ranks": 2},
        {"workers": 1, "ranks": 3, "prefetch_factor": 4},
        {"workers": 3, "epochs": 2},
    ),
    *cases(
        "tail",
        "residuals",
        {"workers": 1},
        {"workers": 3},
        {"workers": 5, "prefetch_factor": 1},
        {"workers": 8, "compute_s": 0.001},
        {"workers": 3, "batch_size": 20},
        {"workers": 3, "compute_s": 0.004},
        {"workers": 2, "ranks": 2},
        {"workers": 1, "ranks": 6},
    ),
    *cases(
        "penstock",
        "residuals",
        {"cache": 0.0},
        {"cache": 0.2},
        {"cache": 0.5},
        {"cache": 0.9},
        {"cache": 0.5, "batch_size": 24},
        {"cache": 0.2, "compute_s": 0.008},
        {"cache": 0.2, "bytes_s": 15e6},
        {"cache": 0.5, "bytes_s": 15e6},
        {"cache": 0.2, "latency_s": 0.04},
        {"cache": 0.9, "bytes_s": 35e6},
        {"cache": 0.2, "ranks": 2},
        {"cache": 0.5, "ranks": 3},
        {"cache": 0.0, "disk": 0.5},
    ),
    *cases(
        "penstock",
        "residuals",
        *[
            LARGE | change
            for change in [
                {"cache": 0.3, "nodes": 2},
                {"cache": 0.6, "nodes": 2},
                {"cache": 0.2, "nodes": 2, "compute_s": 0.0015},
                {"cache": 0.2, "nodes": 2, "bytes_s": 15e6},
                {"cache": 0.1, "nodes": 3},
                {"cache": 0.2, "nodes": 4},
                {"cache": 0.05, "disk": 0.2, "nodes": 2},
            ]
        ],
    ),
]
SCORED = [
    *cases(
        "torch",
        "scored",
        {"workers": 2, "prefetch_factor": 1},
        {"workers": 2, "prefetch_factor": 4},
        {"workers": 4},
        {"workers": 6, "prefetch_factor": 1},
        {"workers": 6, "prefetch_factor": 4},
        {"workers": 4, "batch_size": 16},
        {"workers": 2, "batch_size": 32},
        {"workers": 8, "batch_size": 4},
        {"workers": 4, "compute_s": 0.006},
        {"workers": 8, "compute_s": 0.003},
        {"workers": 4, "latency_s": 0.005},
        {"workers": 8, "latency_s": 0.05},
        {"workers": 8, "bytes_s": 10e6},
        {"workers": 8, "bytes_s": 80e6},
        {"workers": 2, "ranks": 2},
        {"workers": 1, "ranks": 4},
        {"workers": 4, "epochs": 2},
    ),
    *cases(
        "tail",
        "scored",
        {"workers": 2, "prefetch_factor": 1},
        {"workers": 4},
        {"workers": 4, "prefetch_factor": 4},
        {"workers": 8},
        {"workers": 4, "batch_size": 16},
        {"workers": 2, "compute_s": 0.006},
        {"workers": 6, "compute_s": 0.001},
        {"workers": 2, "ranks": 4},
        {"workers": 1, "ranks": 8},
    ),
    *cases(
        "penstock",
        "scored",
        {"cache": 0.6},
        {"cache": 0.0, "compute_s": 0.007},
        {"cache": 1.0},
        {"cache": 0.6, "compute_s": 0.0015},
        {"cache": 0.3, "batch_size": 32},
        {"cache": 0.6, "batch_size": 8},
        {"cache": 0.3, "bytes_s": 12e6},
        {"cache": 0.6, "bytes_s": 12e6},
        {"cache": 0.0, "bytes_s": 50e6},
        {"cache": 0.3, "latency_s": 0.005},
        {"cache": 0.3, "latency_s": 0.06},
        {"cache": 0.6, "ranks": 2},
        {"cache": 0.0, "ranks": 2},
        {"cache": 0.3, "ranks": 4},
        {"cache": 1.0, "ranks": 4},
        {"cache": 0.0, "disk": 0.3},
        {"cache": 0.2, "disk": 0.4},
    ),
    *cases(
        "penstock",
        "scored",
        *[
            LARGE | change
            for change in [
                {"cache": 0.0, "nodes": 2},
                {"cache": 0.4, "nodes": 2},
                {"cache": 0.25, "nodes": 2, "bytes_s": 12e6},
                {"cache": 0.3, "nodes": 2, "compute_s": 0.002},
                {"cache": 0.3, "nodes": 2, "ranks": 2},
                {"cache": 0.1, "disk": 0.3, "nodes": 2},
                {"cache": 0.15, "nodes": 4},
                {"cache": 0.3, "nodes": 4},
            ]
        ],
    ),
]
LINKS = cases(
    "penstock",
    "links",
    *[
        LARGE | change
        for change in [
            {"cache": 0.6, "nodes": 2, "link_bytes_s": 10e6},
            {"cache": 0.6, "nodes": 2, "link_bytes_s": 25e6},
            {"cache": 0.6, "nodes": 2, "link_bytes_s": 25e6, "compute_s": 0.0015},
            {"cache": 0.3, "nodes": 4, "link_bytes_s": 15e6},
            {"cache": 0.3, "nodes": 4, "link_bytes_s": 30e6, "compute_s": 0.0015},
            {"cache": 0.15, "nodes": 4, "link_bytes_s": 15e6},
        ]
    ],
)
"""Nodes behind links of their own: these runs need root."""
ALL = [*CALIBRATE, *RESIDUALS, *SCORED]
