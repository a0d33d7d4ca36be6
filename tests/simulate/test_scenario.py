"""Scenarios: what is wrong is named, what is given is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.simulate.scenarios import scenario, tables, tier

from penstock.errors import OptionError
from penstock.machine import Curve, LinkModel, Machine, StoreModel, machine_toml
from penstock.simulate import load_scenario, scenario_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_scenarios(path: Path) -> None:
    assert load_scenario(path).name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jobs": {}}, ["'jobs'", "dataset", "job"]),
        ({"job": {"epoch": 3}}, ["[job]", "`epoch`", "epochs"]),
        ({"job": {"epochs": "three"}}, ["[job]", "epochs", "`int`"]),
        ({"job": {"epochs": 0}}, ["job.epochs is 0", "least is 1"]),
        ({"job": {"compute_bytes_s": 5.0}}, ["compute_samples_s", "compute_bytes_s", "one of"]),
        ({"dataset": {"sample_bytes": "110 KX"}}, ["sample_bytes", "110 KX"]),
        ({"dataset": {"num_samples": 0}}, ["num_samples = 0", "or sizes"]),
        ({"loader": {"threads": 0}}, ["loader.threads is 0"]),
        ({"sweep": {"cache": [-1.0]}}, ["sweep.cache has -1"]),
        ({"model": {"readers": "all"}}, ["[model]", "readers"]),
        ({"machine": {"link": {}}}, ["[machine]", "bytes_s", "penstock probe"]),
    ],
)
def test_a_bad_key_is_named_with_the_way_out(
    changes: dict[str, dict[str, object]], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        scenario_of(tables(**changes))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["dataset", "job", "machine"])
def test_a_missing_table_is_named(name: str) -> None:
    given = tables()
    del given[name]
    with pytest.raises(OptionError, match=rf"\[{name}\] is missing"):
        scenario_of(given)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(OptionError, match="is not TOML"):
        load_scenario(tmp_path / "bad.toml")


def test_sizes_are_drawn_anew_and_the_same_and_never_below_one() -> None:
    made = scenario(dataset={"num_samples": 5000, "sample_bytes": 100, "spread_bytes": 90})
    assert np.array_equal(made.sizes(), made.sizes())
    assert made.sizes().min() >= 1
    assert made.sizes().std() > 50


def test_sizes_and_the_machine_may_lie_beside_the_scenario(tmp_path: Path) -> None:
    np.save(tmp_path / "sizes.npy", np.arange(1, 101))
    store = StoreModel(latency_s=0.1, latency_p99_s=0.2, throughput=Curve.flat(1e6))
    machine = Machine(store=store, link=LinkModel(bytes_s=1e9))
    (tmp_path / "machine.toml").write_text(machine_toml(machine))
    (tmp_path / "s.toml").write_text(
        'machine = "machine.toml"\n[dataset]\nsizes = "sizes.npy"\n'
        "[job]\nepochs = 1\nbatch = 1\ncompute_samples_s = 1\n"
    )
    made = load_scenario(tmp_path / "s.toml")
    assert made.sizes().sum() == 5050
    assert made.machine == machine


def test_cache_is_spread_over_nodes_and_keeps_the_proportions_of_tiers() -> None:
    machine = {**tables()["machine"], "tiers": [tier("memory", 10), tier("disk", 30)]}
    made = scenario(machine=machine).with_cache(0.5, 1_200_000)
    assert [t.capacity_bytes for t in made.machine.tiers] == [37_500, 112_500]
    assert scenario().with_cache(1.0, 1_200_000).machine.tiers[0].kind == "memory"
