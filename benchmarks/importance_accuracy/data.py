"""Images of the data sets, in memory: uint8, N x height x width x channels."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    train: Bytes
    train_labels: Bytes
    test: Bytes
    test_labels: Bytes

    def first(self, num_samples: int | None) -> "Images":
        """The same with fewer training images."""
        return Images(
            train=self.train[:num_samples],
            train_labels=self.train_labels[:num_samples],
            test=self.test,
            test_labels=self.test_labels,
        )

    def with_wrong_labels(self, share: float, seed: int = 0) -> "Images":
        """The same with another label on a share of the training images."""
        rng = np.random.default_rng(seed)
        labels = self.train_labels.copy()
        wrong = rng.permutation(len(labels))[: round(share * len(labels))]
        labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
        return Images(
            train=self.train, train_labels=labels, test=self.test, test_labels=self.test_labels
        )

    def save(self, folder: Path) -> None:
        for name in self.__slots__:
            np.save(folder / f"{name}.npy", getattr(self, name))


def load(folder: Path) -> Images:
    """Images that were saved; pages are shared by the processes that load them."""
    return Images(
        **{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in Images.__slots__}
    )


def cifar10(folder: Path) -> Images:
    """Strips of lossless WebP, 500 images each, with the labels of all images in one array."""

    def part(name: str) -> tuple[Bytes, Bytes]:
        strips = sorted(folder.glob(f"{name}_*.webp"))
        images = np.concatenate([pixels(strip).reshape(-1, 32, 32, 3) for strip in strips])
        firsts = [int(strip.stem.split("_")[1]) for strip in strips]
        labels = np.load(folder / f"{name}_labels.npy")
        return images, np.concatenate([labels[first : first + 500] for first in firsts])

    (train, train_labels), (test, test_labels) = part("train"), part("test")
    return Images(train=train, train_labels=train_labels, test=test, test_labels=test_labels)


def pixels(file: Path) -> Bytes:
    try:
        from PIL import Image
    except ImportError:
        from torchvision.io import decode_image, read_file

        return decode_image(read_file(str(file))).permute(1, 2, 0).contiguous().numpy()
    return np.asarray(Image.open(file).convert("RGB"))


def fashion(folder: Path) -> Images:
    """The four idx files of Fashion-MNIST, as Debian's package has them."""

    def idx(name: str) -> Bytes:
        data = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
        num_axes = data[3]
        shape = np.frombuffer(data, ">i4", num_axes, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape)

    return Images(
        train=idx("train-images-idx3")[..., None],
        train_labels=idx("train-labels-idx1"),
        test=idx("t10k-images-idx3")[..., None],
        test_labels=idx("t10k-labels-idx1"),
    )


def noise(num_samples: int = 320) -> Images:
    """Ten classes of noisy images: enough to see that a training loop learns something."""
    rng = np.random.default_rng(0)
    means = rng.integers(40, 216, (10, 8, 8, 1))

    def part(num: int) -> tuple[Bytes, Bytes]:
        labels = rng.integers(0, 10, num).astype(np.uint8)
        images = means[labels] + rng.normal(0, 40, (num, 8, 8, 1))
        return np.clip(images, 0, 255).astype(np.uint8), labels

    (train, train_labels), (test, test_labels) = part(num_samples), part(200)
    return Images(train=train, train_labels=train_labels, test=test, test_labels=test_labels)


READ = {"cifar10": cifar10, "fashion": fashion}
