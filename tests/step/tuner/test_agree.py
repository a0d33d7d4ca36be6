"""Ranks that are told different things, or of which one cannot: all are told, nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.step.ranks import run_ranks
from tests.step.tuner import work as tune_work

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.cost import MachineCosts
from penstock.step.tuner import tune as tuning
from penstock.step.tuner.calibrate import calibrate
from penstock.step.tuner.tune import tune

HOW: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 0.1, "cache": None}


def _told(*args: Any, **how: Any) -> str:
    try:
        tune(*args, **{**HOW, **how})
    except ProgramError as error:
        return str(error)
    return "nothing"


def _differing(rank: int, size: int, folder: str) -> dict[str, Any]:
    made, given = tune_work.block_on(size), tune_work.block_given(rank, size)
    numbers, called = {"x": torch.ones(8)}, tune_work.called.on(made.mesh, n=8)
    is_last = rank == size - 1
    odd = {**given, "b": given["b"].double()} if is_last else given
    short = {**given, "b": given["b"][:100]} if is_last else given
    long = {**given, "b": torch.zeros(200)} if is_last else given
    few = {name: given[name] for name in given if name != "b"} if is_last else given
    calls = {"double" if rank == 0 else "duble": lambda x: 2 * x}
    out: dict[str, Any] = {}
    tuning.search = tune_work.few("fuse('add.1', 'add.2')\n")
    with ps.Groups(made.mesh) as groups:
        out["nonsense"] = _told(made, groups, given, allow=["int8"] if is_last else ())
        out["allow"] = _told(made, groups, given, allow=["bf16"] if rank == 0 else ())
        out["options"] = _told(made, groups, given, backend="eager" if rank == 0 else "tiled")
        out["type"] = _told(made, groups, odd)
        out["short"] = _told(tune_work.block, groups, short)
        out["long"] = _told(made, groups, long)
        out["few"] = _told(tune_work.block, groups, few)
        out["calls"] = _told(called, groups, numbers, calls=calls)
        how = {"costs": MachineCosts() if rank == 0 else None, "budget_s": 0.1 * (1 + rank)}
        tuned = tune(made, groups, given, cache=folder if rank == 0 else None, **how)
        out["digest"] = tuned.program.digest
        costs = calibrate(groups, cache=folder if rank == 0 else None)
        out["costs"] = costs.to_json()
    return out


def test_what_ranks_are_told_differently_is_told_to_all(tmp_path: Path) -> None:
    said, other = run_ranks(_differing, 2, str(tmp_path))
    assert said == other
    assert "rank 1 cannot run block: ProgramError: tune cannot allow 'int8'" in said["nonsense"]
    assert "with different allow, bf16 and none; give all ranks the same" in said["allow"]
    assert "with different options" in said["options"]
    assert "rank 1 cannot run block: ProgramError: b is torch.float64" in said["type"]
    assert "b on rank 1 is (100,), should be (128,)" in said["short"]
    assert "b on rank 1 is (200,), should be (128,)" in said["long"]
    assert "with different inputs, b, r, w, x and r, w, x" in said["few"]
    assert "rank 1 cannot run called: ProgramError: called needs 'double'" in said["calls"]


def _failing(rank: int, size: int) -> dict[str, str]:
    loading = tune_work.trained.on(ps.mesh(dp=size), b=2 * size, n=8)
    given = {"w": torch.ones(8), "m": torch.zeros(8), "lr": 0.1}
    batch = torch.ones(2, 8, dtype=torch.float64 if rank else torch.float32)
    calls = {"gradient": lambda x, w: (x * w).sum(0), "kept": lambda x: None}
    sources, out = {"train": [{"x": batch}]}, dict[str, str]()

    def failing(*args: Any, **how: Any) -> Any:
        raise KeyError("a search")

    with ps.Groups(loading.mesh) as groups:
        out["batch"] = _told(loading, groups, given, calls=calls, sources=sources)
        tuning.search = failing  # Only the first rank looks.
        made = tune_work.momentum.on(loading.mesh, n=8)
        out["search"] = _told(made, groups, {**given, "g": torch.ones(8)})
    return out


def test_what_fails_on_one_rank_before_the_others_begin_is_told_to_all() -> None:
    said, other = run_ranks(_failing, 2)
    assert said == other
    assert "rank 1 cannot run trained: ProgramError: x is torch.float64" in said["batch"]
    assert "rank 0 cannot run momentum: KeyError: 'a search'" in said["search"]


def _of_dtensors(rank: int, size: int) -> tuple[int, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    whole = {"x": torch.randn(256, 64), "w": torch.randn(64, 128)}
    whole |= {"b": torch.randn(128), "r": torch.randn(256, 128)}
    places = {"x": [Shard(1)], "w": [Shard(0)], "b": [Replicate()], "r": [Replicate()]}
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    given = {name: distribute_tensor(whole[name], mesh, places[name]) for name in whole}
    tuning.search = tune_work.few("fuse('add.1', 'add.2')\n")
    with ps.Groups(ps.mesh(tp=size)) as groups:
        tuned = tune(tune_work.block, groups, given, **HOW)
        with tuned.compile(groups) as step:
            (out,) = step(**given)
    wanted = whole["x"] @ whole["w"] + whole["b"] + whole["r"]
    return tuned.num_measured, (out - wanted).abs().max().item()


def test_dtensors_are_tuned_with() -> None:
    for num_measured, off in run_ranks(_of_dtensors, 2):
        assert num_measured == 1
        assert off < 1e-4
