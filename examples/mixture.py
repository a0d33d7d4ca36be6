"""Three data sets in exact proportions: every global batch has its share of each.

    python examples/mixture.py

The smallest gets more than its size would give it, so it is gone through several times, each time
in a fresh order, and no sample of it returns before all others of it were used.
"""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import penstock

SIZES = {"web": 6000, "code": 2000, "books": 100}
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
GLOBAL_BATCH_SIZE = 60


def open_all(folder: Path) -> list[penstock.Dataset]:
    """Write rows of tokens under three names and open them."""
    out = []
    for name, size in SIZES.items():
        (folder / name).mkdir()
        np.save(folder / name / "tokens.npy", np.full((size, 16), size, np.int32))
        out.append(penstock.open(folder / name))
    return out


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        mixture = penstock.Mixture(open_all(Path(name)), weights=list(WEIGHTS.values()))
        loader = penstock.Loader(
            mixture, global_batch_size=GLOBAL_BATCH_SIZE, seed=7, drop_last=True, output="numpy"
        )
        names, edges = list(SIZES), mixture.starts
        in_batches: dict[str, Counter[int]] = {name: Counter() for name in names}
        uses: Counter[int] = Counter()
        for batch in loader:
            sources = np.searchsorted(edges, batch.ids, side="right") - 1
            for number, source in enumerate(names):
                in_batches[source][int((sources == number).sum())] += 1
            uses.update(batch.ids.tolist())
    print(f"{len(loader)} global batches of {GLOBAL_BATCH_SIZE}")
    for number, source in enumerate(names):
        counts = in_batches[source]
        times = {uses[i] for i in range(edges[number], edges[number + 1])}
        wanted = WEIGHTS[source] * GLOBAL_BATCH_SIZE
        print(
            f"  {source:<6} {wanted:>4.0f} a batch wanted, {min(counts)} to {max(counts)} given;"
            f" a sample is used {min(times)} to {max(times)} times"
        )
        assert all(abs(count - wanted) <= 2 for count in counts)


if __name__ == "__main__":
    main()
