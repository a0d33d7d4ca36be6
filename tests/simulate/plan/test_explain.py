"""Explanations: the numbers of the plan, in lines that fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.simulate.plan.sizes import summary_of_sizes

from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel
from penstock.simulate.plan.explain import WIDTH, explain, sections
from penstock.simulate.plan.planner import RunPlan, make_plan
from penstock.simulate.plan.summary import Summary
from penstock.simulate.plan.work import Work
from penstock.world import World


def tier(kind: str, capacity_bytes: int) -> TierModel:
    rate = Curve.flat(2e9)
    return TierModel(kind=kind, capacity_bytes=capacity_bytes, read=rate, write=rate)  # type: ignore[arg-type]


STORE = StoreModel(
    latency_s=0.02, latency_p99_s=0.1, throughput=Curve(counts=(1, 10), bytes_s=(50e6, 500e6))
)
MACHINE = Machine(
    store=STORE,
    link=LinkModel(bytes_s=1.25e9),
    tiers=(tier("memory", 8_000_000_000), tier("disk", 2_000_000_000_000)),
    cores=16,
    decode=Curve(counts=(1, 16), bytes_s=(12e6, 190e6)),
)
IMAGES = summary_of_sizes(np.random.default_rng(1).integers(60_000, 160_000, 1_000_000))
TOKENS = Summary(
    num_samples=10**9,
    num_reads=2 * 10**9,
    class_counts=(0,) * 18 + (31_000_000,),
    class_bytes=(0,) * 18 + (4 * 10**12,),
)
ROW_GROUPS = replace(TOKENS, num_blocks=31_000_000)
WORKS = [
    Work(),
    Work(num_epochs=90, compute_samples_s=2_500.0),
    Work(num_epochs=90, shuffle="blocks"),
    Work(num_epochs=90, shuffle="blocks-first"),
    Work(num_epochs=2, shuffle="sequential", stage_bytes=10**6),
    Work(world=World(num_ranks=8_192, num_nodes=1_024), batch_size=64, num_epochs=1_000),
    Work(world=World(num_ranks=32, num_nodes=4), num_epochs=9, peers="fixed"),
    Work(world=World(num_ranks=32, num_nodes=4), num_epochs=9, peers="locality"),
]


def plans() -> list[RunPlan]:
    bare = replace(MACHINE, tiers=(), decode=None)
    small = replace(MACHINE, tiers=(tier("memory", 8_000_000),))
    return [
        make_plan(summary, work, machine)
        for summary in (IMAGES, TOKENS, ROW_GROUPS)
        for work in WORKS
        for machine in (MACHINE, bare, small)
    ]


def test_every_line_fits() -> None:
    for plan in plans():
        text = explain(plan)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert all(line == line.rstrip() for line in text.splitlines())


def test_the_numbers_are_those_of_the_plan() -> None:
    plan = make_plan(IMAGES, WORKS[1], MACHINE)
    text = explain(plan)
    for words in (
        "1,000,000 samples, 110 GB in 1,000,000 units",
        "1 node, 1 rank, batches of 256 on each, 90 epochs, shuffle global",
        "hold 100% of the data set",
        "first epoch: 9 min 50 s, limited by the cores",
        "each later one: 9 min 50 s",
        "training waits 32% of the time",
        "from the store in all: 110 GB",
        "(ratio 1.00)",
        "cores twice as fast",
        "4 h 44 min (32%) sooner",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make_plan(IMAGES, Work(), replace(MACHINE, tiers=())), "no tiers: every epoch reads"),
        (make_plan(ROW_GROUPS, Work(), MACHINE), "a block is read whole"),
        (make_plan(IMAGES, WORKS[7], MACHINE), "all nodes' together"),
        (make_plan(IMAGES, replace(WORKS[7], peers=None), MACHINE), "each node's for itself"),
        (make_plan(IMAGES, Work(stage_bytes=10**12), replace(MACHINE, tiers=())), "faster"),
        (make_plan(IMAGES, Work(), replace(MACHINE, tiers=())), "is read by sample: runs"),
    ],
)
def test_what_is_special_is_said(plan: RunPlan, words: str) -> None:
    assert words in explain(plan)


def test_small_samples_are_told_to_come_in_blocks_first() -> None:
    cold = replace(MACHINE, tiers=(), decode=None)
    text = explain(make_plan(TOKENS, Work(num_epochs=3), cold))
    assert 'shuffle="blocks-first" would shorten the first epoch to' in text
    assert "limited by the store" in text


def test_sections_are_what_the_text_is_made_of() -> None:
    plan = make_plan(IMAGES, WORKS[6], MACHINE)
    text = explain(plan)
    for section in sections(plan):
        assert section.heading in text
        assert section.lines
        assert all(line in text for line in section.lines)
