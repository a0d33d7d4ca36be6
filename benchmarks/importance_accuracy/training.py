"""One training run: a net, a source of samples, and a record of what happened.

All images lie in the memory of the device. Batches are gathered, cropped and flipped there. The
host runs ahead of the device: it takes the losses of step t in after it has queued step
t + `look_ahead`, always in the order of the steps. So a source sees losses as late as it would with
that many steps of read-ahead. Before a source draws again, it has seen the losses of every step.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.importance_accuracy.data import Images
from benchmarks.importance_accuracy.models import model_of
from benchmarks.samplers import tell_accuracy
from penstock.simulate.importance import TrainingSource

Ids = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train: the same for every system."""

    model: str
    width: int | None = None
    epochs: float
    """Passes' worth of gradient steps: every system takes epochs * samples / batch_size steps."""
    batch_size: int
    lr: float
    warmup: float = 0.2
    """Share of the steps in which the learning rate rises; then it falls by a cosine to zero."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    pad: int
    """Pixels by which an image is padded before it is cropped at random."""
    bfloat16: bool = False
    look_ahead: int = 4


@dataclass(slots=True, kw_only=True)
class Run:
    """What a run recorded; the wall time of any store follows from it."""

    system: str
    seed: int
    recipe: dict[str, Any]
    num_samples: int
    hits: list[int] = field(default_factory=list)
    compute_shares: list[float] = field(default_factory=list)
    """Compute of each step, as a share of a gradient step on a whole batch."""
    steps: list[int] = field(default_factory=list)
    """Steps taken at each measurement of the accuracy."""
    accuracies: list[float] = field(default_factory=list)
    """Share of the test images that are classified rightly."""
    distinct: list[float] = field(default_factory=list)
    """Distinct samples of each epoch, as a share of all samples."""
    ess: list[float] = field(default_factory=list)
    """Effective sample size of each epoch, (sum w)^2 / sum w^2, as a share of its draws."""
    weight_max: float = 0.0
    seconds: float = 0.0
    """Real time of the run, beside other runs on the same machine."""


class Stream:
    """Cuts a source's stretches into batches; a batch may lie across two stretches."""

    def __init__(self, source: TrainingSource, batch_size: int, device: torch.device) -> None:
        self._source, self._batch_size, self._device = source, batch_size, device
        self._ids: Ids = np.empty(0, np.int64)
        self._weights: Floats = np.empty(0, np.float32)
        self._position = 0

    @property
    def is_short(self) -> bool:
        return len(self._ids) - self._position < self._batch_size

    def draw(self) -> None:
        drawn = self._source.draw()
        rest = slice(self._position, None)
        self._ids = np.concatenate([self._ids[rest], drawn.ids])
        self._weights = np.concatenate([self._weights[rest], drawn.weights.astype(np.float32)])
        self._position = 0
        self._device_ids = torch.from_numpy(self._ids).to(self._device)
        self._device_weights = torch.from_numpy(self._weights).to(self._device)

    def batch(self) -> tuple[Ids, Floats, Tensor, Tensor]:
        cut = slice(self._position, self._position + self._batch_size)
        self._position = cut.stop
        return self._ids[cut], self._weights[cut], self._device_ids[cut], self._device_weights[cut]


class Late:
    """Hands the losses of each step to the source, in order, `look_ahead` steps late."""

    def __init__(self, source: TrainingSource, look_ahead: int, device: torch.device) -> None:
        self._source, self._look_ahead = source, look_ahead
        self._on_gpu = device.type == "cuda"
        self._waiting: deque[tuple[Ids, Tensor, Any]] = deque()

    def put(self, ids: Ids, losses: Tensor) -> None:
        copied = None
        if self._on_gpu:
            # Pinned memory, because a copy into pageable memory waits for the device.
            host = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
            host.copy_(losses, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            losses = host
        self._waiting.append((ids, losses, copied))
        while len(self._waiting) > self._look_ahead:
            self._take()

    def flush(self) -> None:
        while self._waiting:
            self._take()

    def _take(self) -> None:
        ids, losses, copied = self._waiting.popleft()
        if copied is not None:
            copied.synchronize()
        self._source.observe(ids, losses.numpy().copy())


class Pictures:
    """The images on the device, and random crops of them."""

    def __init__(self, images: Images, recipe: Recipe, device: torch.device, seed: int) -> None:
        self._pad = recipe.pad
        self._dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
        train = torch.from_numpy(np.array(images.train)).to(device)
        pixels = train.float().reshape(-1, train.shape[-1]) / 255
        self._mean, self._std = pixels.mean(0), pixels.std(0)
        self._size = train.shape[1:3]
        padded = functional.pad(train.permute(0, 3, 1, 2).float(), [self._pad] * 4, mode="reflect")
        self._padded = padded.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        self._labels = torch.from_numpy(np.array(images.train_labels)).to(device).long()
        self._test = torch.from_numpy(np.array(images.test)).to(device)
        self._test_labels = torch.from_numpy(np.array(images.test_labels)).to(device).long()
        self._rng = torch.Generator(device).manual_seed(seed)

    def example(self) -> Tensor:
        return self._normal(self._test[:2]).float().cpu()

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Crop and flip samples at random. The images are views in the layout channels_last."""
        device, num = ids.device, len(ids)
        height, width = self._size
        draws = torch.rand(3, num, 1, device=device, generator=self._rng)
        top, left = (draws[:2] * (2 * self._pad + 1)).long().unbind()
        across = torch.arange(width, device=device)
        columns = left + torch.where(draws[2] < 0.5, across, across.flip(0))
        rows = top + torch.arange(height, device=device)
        crops = self._padded[ids[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self._normal(crops), self._labels[ids]

    def test(self, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
        starts = range(0, len(self._test), size)
        return [
            (self._normal(self._test[s : s + size]), self._test_labels[s : s + size])
            for s in starts
        ]

    def _normal(self, images: Tensor) -> Tensor:
        normal = (images.float() / 255 - self._mean) / self._std
        return normal.to(self._dtype).permute(0, 3, 1, 2)


class Training:
    """A net in training."""

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, *, num_steps: int, seed: int
    ) -> None:
        self._pictures = Pictures(images, recipe, device, seed)
        model = model_of(recipe.model, self._pictures.example(), width=recipe.width, seed=seed)
        self._model = model.to(device, memory_format=torch.channels_last)
        self._recipe, self._num_steps, self._device = recipe, num_steps, device
        self._optimizer = torch.optim.SGD(
            self._model.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=True,
        )

    def losses(self, ids: Tensor) -> Tensor:
        """Per-sample losses of fresh crops, with what a backward pass needs."""
        pixels, labels = self._pictures.batch(ids)
        return functional.cross_entropy(self._forward(pixels), labels, reduction="none")

    def step(self, number: int, loss: Tensor) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr(number)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def lr(self, step: int) -> float:
        done = (step + 1) / self._num_steps
        warmup = self._recipe.warmup
        if done < warmup:
            return self._recipe.lr * done / warmup
        return self._recipe.lr * (1 + np.cos(np.pi * (done - warmup) / (1 - warmup))) / 2

    @torch.no_grad()
    def accuracy(self) -> float:
        self._model.eval()
        parts = self._pictures.test()
        right = sum((self._forward(x).argmax(1) == y).sum() for x, y in parts)
        self._model.train()
        return float(right) / sum(len(y) for _, y in parts)

    def _forward(self, pixels: Tensor) -> Tensor:
        kind, use = self._device.type, self._recipe.bfloat16
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=use):
            return self._model(pixels).float()


def run_of(
    source: TrainingSource, images: Images, recipe: Recipe, device: torch.device, *, seed: int
) -> Run:
    """Train a net on a source's samples, and return what was recorded."""
    started = perf_counter()
    num_samples, batch_size = len(images.train), recipe.batch_size
    ends = [round(e * num_samples / batch_size) for e in range(1, int(recipe.epochs) + 1)]
    num_steps = round(recipe.epochs * num_samples / batch_size)
    ends = sorted({*ends, num_steps})
    training = Training(images, recipe, device, num_steps=num_steps, seed=seed)
    stream, late = Stream(source, batch_size, device), Late(source, recipe.look_ahead, device)
    run = Run(system=source.name, seed=seed, recipe=asdict(recipe), num_samples=num_samples)
    epoch_ids: list[Ids] = []
    epoch_weights: list[Floats] = []
    for step in range(num_steps):
        if stream.is_short:
            late.flush()
            while stream.is_short:
                stream.draw()
        ids, weights, device_ids, device_weights = stream.batch()
        run.hits.append(int(source.access(ids).sum()))
        losses = training.losses(device_ids)
        training.step(step, (device_weights * losses).mean())
        late.put(ids, losses.detach())
        # A forward pass for every sample, a backward pass (twice as long) where a weight is not 0.
        run.compute_shares.append((1 + 2 * float(np.mean(weights != 0))) / 3)
        epoch_ids.append(ids)
        epoch_weights.append(weights)
        if step + 1 in ends:
            run.steps.append(step + 1)
            run.accuracies.append(training.accuracy())
            tell_accuracy(source, run.accuracies[-1])
            record(run, np.concatenate(epoch_ids), np.concatenate(epoch_weights))
            epoch_ids, epoch_weights = [], []
    run.seconds = perf_counter() - started
    return run


def record(run: Run, ids: Ids, weights: Floats) -> None:
    """Record which samples an epoch had and how uneven their weights were."""
    w = weights.astype(np.float64)
    run.distinct.append(len(np.unique(ids)) / run.num_samples)
    run.ess.append(float(w.sum() ** 2 / (len(w) * (w**2).sum())))
    run.weight_max = max(run.weight_max, float(w.max()))
