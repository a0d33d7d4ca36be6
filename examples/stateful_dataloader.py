"""torchdata's StatefulDataLoader: worker processes, and a state that goes on exactly.

    python examples/stateful_dataloader.py

Worker w of W makes every W-th batch; the DataLoader asks them in turn, so what comes out is the
stream of a single process. The state holds each worker's own place: keep `num_workers` as it was.
Where that has to change, use `penstock.Loader`, whose state knows neither workers nor ranks.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock
from penstock.torch import IterableDataset


def flipped(sample: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """An augmentation: which samples it changes depends on epoch and sample, on no worker."""
    return {"data": sample["data"][::-1] if random.random() < 0.5 else sample["data"]}


def new_loader(folder: Path) -> StatefulDataLoader:
    dataset = penstock.open(folder)
    view = IterableDataset(dataset, batch_size=32, seed=7, transform=flipped)
    return StatefulDataLoader(view, batch_size=None, num_workers=2)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "rows.npy", np.arange(4000).reshape(1000, 4))
        loader = new_loader(folder)
        whole = [batch["data"].tolist() for _ in range(2) for batch in loader]

        first = []
        loader = new_loader(folder)
        for batch in loader:
            first.append(batch["data"].tolist())
            if len(first) == 13:
                state = json.dumps(loader.state_dict())
                break

        loader = new_loader(folder)  # As in a new process.
        loader.load_state_dict(json.loads(state))
        rest = [batch["data"].tolist() for _ in range(2) for batch in loader]
        print("the same stream:", first + rest == whole, f"({len(whole)} batches)")


if __name__ == "__main__":
    main()
