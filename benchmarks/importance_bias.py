"""Does each sampler estimate the gradient of the whole data set, or of another one?

    python -m benchmarks.importance_bias --data FOLDER [--samples 10000] [--epochs 200]

FOLDER has Fashion-MNIST or MNIST (`train-images-idx3-ubyte.gz`; Debian: dataset-fashion-mnist) or
strips of CIFAR-10 (`train_*.webp` and `train_labels.npy`). A net of one hidden layer is trained for
some plain epochs and then stands still, so its full gradient g is one vector. Each system draws for
many epochs, is told the losses, and gives a gradient: the mean of weights * gradients over what it
drew. Nobody is told an accuracy.

* `bias`: |E[estimate] - g| / |g|. Its square is estimated without bias, from pairs of epochs; 0
  where that is negative. `at most` is two standard errors (jackknife) above it.
* `along g`: how much longer than g the mean estimate is in the direction of g, with its standard
  error. An honest sampler is within two of them, most of the time.
* `batch var.`: variance of the estimate of one batch, relative to plain epochs. Below 1 is what
  importance sampling is for.
* `var. x time`: that variance times the mean time of a read, relative to plain epochs, if a read of
  a sample that is not cached takes ten times as long. Hits are of a cache of 20 %.
* `epoch var.`: variance of the mean over as many draws as there are samples, relative to |g|^2.
  Plain epochs have none: they visit everything once.

The second table tells samplers the losses of a net of one epoch of training, and measures
gradients of the present one: stale scores may cost variance, but must not cost honesty.
"""

import argparse
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.samplers import SOURCES, source_of
from penstock.simulate.importance import TrainingSource

BATCH = 64
HIDDEN = 64
CLASSES = 10
SAMPLERS = [name for name in SOURCES if name != "uniform-lru"]
"""Two systems draw alike, and differ in their caches."""
MISS_COST = 10
BURN_IN = 5
"""Epochs before anything is measured: scores and caches settle."""


def load(folder: Path, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return standardised pixels with a constant, and labels."""
    if (folder / "train_labels.npy").exists():
        pixels, labels = cifar_strips(folder, num_samples)
    else:
        pixels, labels = idx_files(folder)
    pixels = pixels[:num_samples].reshape(len(pixels[:num_samples]), -1).astype(np.float32) / 255
    pixels = (pixels - pixels.mean()) / pixels.std()
    ones = np.ones((len(pixels), 1), np.float32)
    return np.hstack([pixels, ones]), labels[:num_samples].astype(np.int64)


def cifar_strips(folder: Path, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    paths = sorted(folder.glob("train_*.webp"))[: -(-num_samples // 500)]
    strips = [np.asarray(Image.open(path)).reshape(-1, 32 * 32 * 3) for path in paths]
    return np.concatenate(strips), np.load(folder / "train_labels.npy")


def idx_files(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (
        gzip.decompress((folder / f"train-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    return (
        np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28 * 28),
        np.frombuffer(labels, np.uint8, offset=8),
    )


@dataclass
class Net:
    """Two layers: what goes in has a constant, so there are no biases."""

    first: np.ndarray
    second: np.ndarray

    @classmethod
    def fresh(cls, num_inputs: int) -> "Net":
        rng = np.random.default_rng(0)
        first = rng.normal(0, num_inputs**-0.5, (num_inputs, HIDDEN)).astype(np.float32)
        second = rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)).astype(np.float32)
        return cls(first, second)

    def forward(self, pixels: np.ndarray, labels: np.ndarray) -> "Passed":
        hidden = np.maximum(0, pixels @ self.first)
        scores = hidden @ self.second
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        losses = -np.log(np.maximum(chances[rows, labels], 1e-12))
        chances[rows, labels] -= 1
        below = (chances @ self.second.T) * (hidden > 0)
        return Passed(pixels, hidden, below, chances, losses)

    def train(self, pixels: np.ndarray, labels: np.ndarray, epochs: int) -> "Net":
        """Return the net after some plain epochs of SGD."""
        net = Net(self.first.copy(), self.second.copy())
        rng = np.random.default_rng(1)
        for _ in range(epochs):
            for ids in np.array_split(rng.permutation(len(labels)), len(labels) // BATCH):
                passed = net.forward(pixels[ids], labels[ids])
                step = passed.gradient(np.arange(len(ids)), np.ones(len(ids), np.float32))
                net.first -= 0.02 * step[: net.first.size].reshape(net.first.shape)
                net.second -= 0.02 * step[net.first.size :].reshape(net.second.shape)
        return net


@dataclass
class Passed:
    """A forward pass of all samples, and what their gradients are made of."""

    pixels: np.ndarray
    hidden: np.ndarray
    below: np.ndarray
    above: np.ndarray
    losses: np.ndarray

    def gradient(self, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the mean of weights * gradients over some draws."""
        scale = weights[:, None] / np.float32(len(ids))
        first = self.pixels[ids].T @ (self.below[ids] * scale)
        second = self.hidden[ids].T @ (self.above[ids] * scale)
        return np.concatenate([first.ravel(), second.ravel()])

    def full(self) -> np.ndarray:
        return self.gradient(np.arange(len(self.losses)), np.ones(len(self.losses), np.float32))

    def square_norms(self) -> np.ndarray:
        """Return the squared norm of each sample's gradient."""
        inner = np.square(self.pixels).sum(1) * np.square(self.below).sum(1)
        return inner + np.square(self.hidden).sum(1) * np.square(self.above).sum(1)


@dataclass
class Estimate:
    """What a sampler's draws say about the gradient; all relative to the true one."""

    bias: float
    bias_max: float
    along: float
    along_error: float
    batch_variance: float
    epoch_variance: float
    hit_share: float


def epochs_of(
    source: TrainingSource, losses: np.ndarray, num_epochs: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield ids, weights and hits of as many draws as there are samples, again and again."""
    ids, weights, hits = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, bool)
    num_samples = len(losses)
    while num_epochs:
        drawn = source.draw()
        for start in range(0, len(drawn.ids), BATCH):
            batch = drawn.ids[start : start + BATCH]
            hits = np.append(hits, source.access(batch))
            source.observe(batch, losses[batch])
        ids, weights = np.append(ids, drawn.ids), np.append(weights, drawn.weights)
        while len(ids) >= num_samples and num_epochs:
            yield ids[:num_samples], weights[:num_samples], hits[:num_samples]
            ids, weights, hits = ids[num_samples:], weights[num_samples:], hits[num_samples:]
            num_epochs -= 1


def estimate(source: TrainingSource, passed: Passed, told: np.ndarray, epochs: int) -> Estimate:
    full = passed.full()
    size = float(np.linalg.norm(full))
    errors, batches, found = [], [], []
    for number, (ids, weights, hits) in enumerate(epochs_of(source, told, BURN_IN + epochs)):
        if number >= BURN_IN:
            errors.append((passed.gradient(ids, weights) - full) / size)
            batches.append(batch_variance(passed, ids, weights) / size**2)
            found.append(hits.mean())
    products = (np.array(errors) @ np.array(errors).T).astype(np.float64)
    bias, bias_error = square_of_mean(products)
    along = np.array(errors) @ (full / size)
    return Estimate(
        bias=max(0.0, bias) ** 0.5,
        bias_max=(max(0.0, bias) + 2 * bias_error) ** 0.5,
        along=float(along.mean()),
        along_error=float(along.std(ddof=1)) / epochs**0.5,
        batch_variance=float(np.mean(batches)),
        epoch_variance=float(np.trace(products) / epochs - bias),
        hit_share=float(np.mean(found)),
    )


def square_of_mean(products: np.ndarray) -> tuple[float, float]:
    """Return an unbiased estimate of |E[x]|^2 from the products of all pairs, and its error."""
    count = len(products)
    pairs = products - np.diag(np.diag(products))
    total = pairs.sum()
    without = (total - 2 * pairs.sum(axis=1)) / ((count - 1) * (count - 2))
    error = (count - 1) / count * np.square(without - without.mean()).sum()
    return float(total / (count * (count - 1))), float(error**0.5)


def batch_variance(passed: Passed, ids: np.ndarray, weights: np.ndarray) -> float:
    """Return the variance of a batch's estimate, from every eighth batch of an epoch."""
    starts = range(0, len(ids) - BATCH + 1, BATCH * 8)
    parts = [passed.gradient(ids[s : s + BATCH], weights[s : s + BATCH]) for s in starts]
    return float(np.var(parts, axis=0, ddof=1).sum())


def read_time(hit_share: float) -> float:
    return hit_share + MISS_COST * (1 - hit_share)


def table(passed: Passed, told: np.ndarray, names: list[str], epochs: int) -> None:
    print(
        "| system          |   bias | at most |          along g |   hits | batch var. "
        "| var. x time | epoch var. |"
    )
    print(f"|{'-' * 17}|{'-' * 8}|{'-' * 9}|{'-' * 18}|{'-' * 8}|{'-' * 12}|{'-' * 13}|{'-' * 12}|")
    plain = None
    for name in names:
        num_samples = len(told)
        source = source_of(
            name,
            num_samples=num_samples,
            batch_size=BATCH,
            cache_samples=num_samples // 5,
            seed=3,
        )
        got = estimate(source, passed, told, epochs)
        plain = plain or got
        time_ratio = read_time(got.hit_share) / read_time(plain.hit_share)
        ratio = got.batch_variance / plain.batch_variance
        print(
            f"| {name:15} | {got.bias:6.1%} | {got.bias_max:7.1%} "
            f"| {got.along:+7.2%} ± {got.along_error:6.2%} "
            f"| {got.hit_share:6.1%} | {ratio:10.2f} | {ratio * time_ratio:11.2f} "
            f"| {got.epoch_variance:10.4f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=200, help="epochs measured")
    parser.add_argument("--trained", type=int, default=3, help="plain epochs before")
    parser.add_argument("--only", default=",".join(SAMPLERS), help="systems, after 'uniform'")
    options = parser.parse_args()
    names = ["uniform", *(name for name in options.only.split(",") if name != "uniform")]
    pixels, labels = load(options.data, options.samples)
    early = Net.fresh(pixels.shape[1]).train(pixels, labels, 1)
    late = early.train(pixels, labels, options.trained - 1)
    passed = late.forward(pixels, labels)
    norms = np.sqrt(passed.square_norms())
    losses = passed.losses
    print(
        f"{len(labels):,} samples, batch {BATCH}, {options.epochs} epochs measured; mean loss "
        f"{losses.mean():.3f}, |g| {np.linalg.norm(passed.full()):.3f}, mean norm of a sample's "
        f"gradient {norms.mean():.3f}, its correlation with the loss "
        f"{np.corrcoef(norms, losses)[0, 1]:.2f}\n"
    )
    print("scores from the present net")
    table(passed, losses, names, options.epochs)
    print("\nstale scores: from the net after its first epoch")
    table(passed, early.forward(pixels, labels).losses, names, options.epochs)


if __name__ == "__main__":
    main()
