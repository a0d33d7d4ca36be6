"""Importance sampling from Accelerate, Lightning and the Hugging Face Trainer as they are.

Each trains a small model for three epochs, saves as it goes, and goes on from several checkpoints.
Ids and weights must be those of the run that was not interrupted, so models, losses and scores must
be as well.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import OptionError, StateError
from penstock.torch import WeightedLossMixin, resume_callback, weighted_loss

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 240, 12, 3
STEPS = NUM_SAMPLES // BATCH_SIZE
SHUFFLE = penstock.Importance(window=0.25, score="loss")

Seen = list[tuple[int, int, list[int], list[float]]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> penstock.Dataset:
    """Two classes that a line parts, but for some labels that are wrong."""
    rng = np.random.default_rng(3)
    rows = np.zeros(NUM_SAMPLES, [("x", "<f4", (4,)), ("labels", "<i8")])
    rows["x"] = rng.normal(size=(NUM_SAMPLES, 4))
    rows["labels"] = rows["x"][:, 0] > 0
    rows["labels"][:12] ^= 1
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "rows.npy", rows)
    return penstock.open(folder)


def loader_of(dataset: penstock.Dataset, **options: Any) -> penstock.Loader:
    options = {"shuffle": SHUFFLE, "epochs": 1, "workers": "here", **options}
    return penstock.Loader(dataset, batch_size=BATCH_SIZE, seed=7, **options)


def seen_of(batch: penstock.Batch) -> tuple[int, int, list[int], list[float]]:
    return batch.epoch, batch.step, batch.ids.tolist(), batch.weights.tolist()


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than a layer of ten numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(dataset: penstock.Dataset) -> Seen:
    """The same training without any trainer: the stream that all of them must give."""
    model, seen = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(dataset, epochs=EPOCHS)
    for batch in loader:
        seen.append(seen_of(batch))
        loss = weighted_loss(loader, batch, losses_of(model, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(seen) == EPOCHS * STEPS
    assert any(weight != 1 for _, _, _, weights in seen for weight in weights)
    return seen


# -- the loss --------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_mean_and_the_losses_are_reported(
    dataset: penstock.Dataset,
) -> None:
    loader, model = loader_of(dataset), new_model()
    batch = next(iter(loader))
    batch.weights = torch.rand(BATCH_SIZE)
    losses = losses_of(model, batch)
    loss = weighted_loss(loader, batch, losses)
    assert loss.item() == pytest.approx((losses * batch.weights).sum().item() / BATCH_SIZE)
    assert loss.requires_grad
    assert loader.importance is not None
    assert loader.importance.num_observed == 1


def test_the_same_loop_runs_with_any_shuffle(dataset: penstock.Dataset) -> None:
    loader = loader_of(dataset, shuffle="global")
    *_, last = penstock.Loader(dataset, batch_size=100, shuffle="global")
    losses = torch.arange(100.0)
    loss = weighted_loss(loader, last, losses)
    assert loss.item() == pytest.approx(losses[:40].sum().item() / 100)


def test_a_batch_that_a_trainer_has_rebuilt_is_refused(dataset: penstock.Dataset) -> None:
    loader = loader_of(dataset)
    batch = next(iter(loader))
    rebuilt = type(batch)(dict(batch))
    with pytest.raises(StateError, match="does not say where it came from"):
        weighted_loss(loader, rebuilt, torch.ones(BATCH_SIZE))
    with pytest.raises(OptionError, match="got a list"):
        weighted_loss([batch], batch, torch.ones(BATCH_SIZE))  # type: ignore[arg-type]


# -- Accelerate ------------------------------------------------------------------------------------


def test_accelerate_keeps_observe_and_moves_weights(dataset: penstock.Dataset) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    loader = loader_of(dataset)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared is loader
    batch = next(iter(prepared))
    moved = accelerate.utils.send_to_device(batch, "meta", non_blocking=True)
    assert moved.weights.device.type == "meta"
    assert (moved.epoch, moved.step) == (batch.epoch, batch.step)


def test_accelerate_resumes_with_the_same_stream(
    dataset: penstock.Dataset, expected: Seen, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

    def train(start: int = 0) -> Seen:
        accelerator, seen = accelerate.Accelerator(cpu=True), []
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, loader_of(dataset, epochs=EPOCHS)
        )
        accelerator.register_for_checkpointing(loader)
        if start:
            accelerator.load_state(tmp_path / str(start))
        for number, raw in enumerate(loader, start + 1):
            batch = raw.to(accelerator.device)
            seen.append(seen_of(batch))
            accelerator.backward(weighted_loss(loader, batch, losses_of(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
            if not start and number in (8, 20, 32):
                accelerator.save_state(tmp_path / str(number))
        return seen

    assert train() == expected
    for step in (8, 20, 32):
        assert train(step) == expected[step:]


# -- Lightning -------------------------------------------------------------------------------------


def test_lightning_resumes_with_the_same_stream(
    dataset: penstock.Dataset, expected: Seen, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = new_model(), []

        def training_step(self, batch: penstock.Batch, number: int) -> torch.Tensor:
            self.seen.append(seen_of(batch))
            losses = losses_of(self.net, batch)
            return weighted_loss(self.trainer.train_dataloader, batch, losses)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(**options: Any) -> Seen:
        keep = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1
        )
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, callbacks=[keep], **quiet)
        model = Model()
        trainer.fit(model, loader_of(dataset), **options)
        return model.seen

    assert fit() == expected
    for step in (8, 20, 32):
        assert fit(ckpt_path=tmp_path / f"step={step}.ckpt") == expected[step:]


# -- Hugging Face ----------------------------------------------------------------------------------


class Net(nn.Module):
    """As models of transformers: fields in, a dictionary out, and any other keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **others: Any) -> dict[str, Any]:
        return {"logits": self.net(x)}


def hugging_face(dataset: penstock.Dataset, folder: Path, **options: Any) -> Any:
    """Return a trainer and the list that its batches are noted in."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    transformers.logging.set_verbosity_error()
    seen: Seen = []

    class LossTrainer(WeightedLossMixin, transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return loader_of(dataset)

        def sample_losses(self, outputs: Any, inputs: Any) -> torch.Tensor:
            logits, labels = outputs["logits"], inputs["labels"]
            return functional.cross_entropy(logits, labels, reduction="none")

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
            seen.append(seen_of(inputs))
            return super().training_step(model, inputs, *rest)

    where = options.pop("checkpoint", None)
    options = {"gradient_accumulation_steps": 1, "learning_rate": 0.1, **options}
    options = {"save_steps": 4, **options}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=5,
        ignore_data_skip=True,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    trainer = LossTrainer(Net(), args, callbacks=[resume_callback(where)])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, seen


def test_the_hugging_face_trainer_resumes_with_the_same_stream(
    dataset: penstock.Dataset, expected: Seen, tmp_path: Path
) -> None:
    trainer, seen = hugging_face(dataset, tmp_path)
    trainer.train()
    assert seen == expected
    for step in (8, 20, 32):
        trainer, seen = hugging_face(dataset, tmp_path, save_steps=1000)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert seen == expected[step:]


def test_scores_of_another_run_are_refused(dataset: penstock.Dataset, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, rate in ((here, 0.1), (there, 0.2)):
        options = {"max_steps": 12, "save_steps": 6, "learning_rate": rate}
        hugging_face(dataset, folder, **options)[0].train()
    checkpoint = str(there / "checkpoint-6")
    trainer, _ = hugging_face(dataset, here)
    with pytest.raises(StateError, match="belongs to another run"):
        trainer.train(resume_from_checkpoint=checkpoint)
    (here / "checkpoint-6" / "penstock_loader.pt").unlink()
    trainer, _ = hugging_face(dataset, here)
    with pytest.raises(StateError, match=r"there is no .*checkpoint-6.*resume_callback"):
        trainer.train(resume_from_checkpoint=checkpoint)
    # The way out that both messages name.
    trainer, seen = hugging_face(dataset, here, max_steps=8, checkpoint=checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert [batch[:2] for batch in seen] == [(0, 6), (0, 7)]


def test_accumulated_gradients_are_the_mean_of_their_batches(
    dataset: penstock.Dataset, tmp_path: Path
) -> None:
    """The Trainer would divide by the number of labels, though our loss is a mean already."""
    trainer, seen = hugging_face(
        dataset, tmp_path, gradient_accumulation_steps=4, max_steps=1, save_steps=1000
    )
    trainer.train()
    assert len(seen) == 4
    model = new_model()
    loader = loader_of(dataset, epochs=EPOCHS)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    losses = [weighted_loss(loader, batch, losses_of(model, batch)) for batch in batches]
    torch.stack(losses).mean().backward()
    with torch.no_grad():
        for parameter, trained in zip(model.parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(parameter - 0.1 * parameter.grad, trained)


def test_evaluation_observes_nothing(dataset: penstock.Dataset, tmp_path: Path) -> None:
    trainer, _ = hugging_face(dataset, tmp_path, save_steps=1000, max_steps=3)
    trainer.train()
    plain = penstock.Loader(dataset, batch_size=60, shuffle=None, workers="here")
    trainer.get_eval_dataloader = lambda *_: plain
    metrics = trainer.evaluate()
    losses = [losses_of(trainer.model.net, batch).mean() for batch in plain]
    assert metrics["eval_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert trainer.callback_handler.train_dataloader.importance.num_observed == 3
