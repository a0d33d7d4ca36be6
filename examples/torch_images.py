"""An ordinary image job: JPEG files in folders by class, torch's DataLoader, two workers.

    python examples/torch_images.py PICTURES [--epochs 2] [--workers 2]
    penstock trace --out run -- python examples/torch_images.py PICTURES

Nothing in it knows of Penstock: it is what `penstock trace` is shown on. Without pictures in the
folder it makes some first. Needs Pillow: pip install pillow
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 64


class Pictures(Dataset):
    """Files in folders; the folder is the class."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        names = sorted({path.parent.name for path in self.paths})
        self.labels = [names.index(path.parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[number]) as picture:
            small = np.asarray(picture.convert("RGB").resize((SIDE, SIDE)))
        return torch.from_numpy(small.copy()).permute(2, 0, 1), self.labels[number]


def make_pictures(folder: Path, count: int) -> None:
    """Write pictures with structure, about as large as photos of this size."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
        picture = np.asarray(coarse.resize((1024, 768), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(picture + rng.normal(0, 9, picture.shape), 0, 255).astype(np.uint8)
        place = folder / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number:05}.jpg", quality=90)


def train(args: argparse.Namespace) -> None:
    """Train a small network."""
    torch.set_num_threads(1)  # The workers need the other cores.
    loader = DataLoader(
        Pictures(args.folder), batch_size=32, shuffle=True, num_workers=args.workers
    )
    model = nn.Sequential(nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, SIDE, SIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


def main() -> None:
    """Make pictures where there are none, and train on them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=600, help="how many are made")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if not any(args.folder.glob("*/*.jpg")):
        make_pictures(args.folder, args.pictures)
    train(args)


if __name__ == "__main__":
    main()
