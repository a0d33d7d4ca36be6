"""Trainers train with `attach` as they do with DDP: same losses, same weights, same files.

Models are in float64, so that only what sums in another order differ by is let pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="pip install accelerate")
pytest.importorskip("transformers", reason="pip install transformers")
pytest.importorskip("lightning", reason="pip install lightning")

from safetensors.torch import load_file
from tests.step.trainers import accelerate_loops, hf_loops, lightning_loops
from tests.step.trainers.work import STEPS
from tests.step.trainers.worlds import Run, example, worlds

SMALL = 1e-10


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with worlds() as made:
        yield made


def assert_alike(found: Any, expected: Any, tolerance: float = SMALL) -> None:
    """Compare numbers and tensors in any nesting of lists and dictionaries."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[key] for key in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_alike(mine, theirs, tolerance)
    elif isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    else:
        assert found == expected


def assert_same_files(folder: Path, *pairs: tuple[str, str]) -> None:
    """Compare what was saved with `attach` and with DDP, by name in the folders of both."""
    for mine, theirs in pairs:
        load = load_file if mine.endswith(".safetensors") else torch.load
        assert_alike(load(folder / mine), load(folder / theirs))


def assert_trained_alike(said: list[Any]) -> None:
    """Compare what each rank says of DDP and of `attach`; ranks have the same weights."""
    for ddp, attached in said:
        assert_alike(attached, ddp)
    for _, attached in said[1:]:
        assert torch.equal(attached[-1], said[0][1][-1])


# -- Hugging Face's Trainer ------------------------------------------------------------------------


def test_the_hugging_face_trainer_trains_saves_and_resumes(run: Run, tmp_path: Path) -> None:
    said = run(hf_loops.trained_both_ways, 2, tmp_path)
    assert_trained_alike(said)
    norms = [row["grad_norm"] for row in said[0][1][0] if "grad_norm" in row]
    assert len(norms) == STEPS
    assert max(norms) > 0.5
    half = f"checkpoint-{STEPS // 2}"
    files = [f"{half}/{name}" for name in ("model.safetensors", "optimizer.pt", "scheduler.pt")]
    files.append("last/model.safetensors")
    assert_same_files(tmp_path, *((f"attach/{name}", f"ddp/{name}") for name in files))
    assert_same_files(tmp_path, ("attach.pt", "ddp.pt"))
    for found in run(hf_loops.resumed, 3, tmp_path):
        assert_alike(found, said[0][0][-1])


def test_a_language_model_in_slices_is_saved_whole(run: Run, tmp_path: Path) -> None:
    for ddp, attached in run(hf_loops.language_models, 2, tmp_path):
        assert_alike(attached, ddp, 1e-4)  # in float32
        assert attached[2], "what was loaded is not what was trained"
        # It does not clip, and the Trainer logs norms all the same.
        assert sum(row.get("grad_norm", 0) > 0 for row in attached[0]) == STEPS
    names = json.loads((tmp_path / "attach" / "last" / "config.json").read_text())
    assert names["tie_word_embeddings"]


# -- Accelerate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_accelerate_trains_saves_and_resumes(run: Run, tmp_path: Path, clip: str) -> None:
    said = run(accelerate_loops.trained_both_ways, 2, tmp_path, clip)
    assert_trained_alike(said)
    files = ["/model.safetensors", "/optimizer.bin", "/scheduler.bin", "-last/model.safetensors"]
    assert_same_files(tmp_path, *((f"attach{name}", f"ddp{name}") for name in [*files, ".pt"]))
    if clip == "norm":
        for found in run(accelerate_loops.resumed, 3, tmp_path):
            assert_alike(found, said[0][0][-1])


def test_accelerate_attaches_several_models(run: Run) -> None:
    for ddp, attached in run(accelerate_loops.adversaries, 2):
        assert_alike(attached, ddp)


def test_what_would_be_trained_apart_is_refused(run: Run) -> None:
    run(mistakes, 1)


def mistakes(rank: int, size: int) -> None:
    accelerate_loops.mistakes(rank, size)
    hf_loops.one_process_for_two_gpus(rank, size)


# -- Lightning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "precision"), [("norm", "16-mixed"), ("value", "bf16-mixed")]
)
def test_lightning_trains_saves_and_resumes(
    run: Run, tmp_path: Path, algorithm: str, precision: str
) -> None:
    said = run(lightning_loops.trained_both_ways, 2, tmp_path, algorithm, precision)
    assert_trained_alike(said)
    assert_same_files(tmp_path, ("attach.pt", "ddp.pt"))
    for name in (f"step={STEPS // 2}.ckpt", "last.ckpt"):
        ddp, attached = (
            torch.load(tmp_path / kind / name, weights_only=False) for kind in ("ddp", "attach")
        )
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert_alike(attached[part], ddp[part])
    if algorithm == "norm":
        for found in run(lightning_loops.resumed, 3, tmp_path):
            assert_alike(found, said[0][0][-1])


def test_lightning_attaches_several_optimizers(run: Run, tmp_path: Path) -> None:
    for ddp, attached in run(lightning_loops.adversaries, 2, tmp_path):
        assert_alike(attached, ddp)


def test_lightning_goes_on_after_an_error(run: Run, tmp_path: Path) -> None:
    before, batches = 3, 2 * STEPS
    assert run(lightning_loops.fitted_after_an_error, 2, tmp_path) == [before + batches] * 2


# -- the examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what", "first", "last"),
    [
        ("attach_hf_trainer", "steps", 20, 30),
        ("attach_accelerate", "epochs", 1, 2),
        ("attach_lightning", "epochs", 1, 2),
    ],
)
def test_an_example_trains_as_with_ddp_also_on_other_ranks(
    run: Run, tmp_path: Path, name: str, what: str, first: int, last: int
) -> None:
    options = {"folder": tmp_path / "saved", "ddp": False}
    many = [{"devices": size} if name == "attach_lightning" else {} for size in (2, 3)]
    run(example, 2, name, {**options, what: first, **many[0]})
    found = run(example, 3, name, {**options, what: last, **many[1]})[0]
    expected = run(example, 2, name, {"folder": None, "ddp": True, what: last, **many[0]})[0]
    assert last_loss(found) == pytest.approx(last_loss(expected), abs=1e-3)


def last_loss(printed: str) -> float:
    return float(re.findall(r"loss.* (\d\.\d+)$", printed, re.M)[-1])
