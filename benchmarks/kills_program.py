"""The program that `kills` kills: it trains, and saves what it used and where it stands each step.

    python -m benchmarks.kills_program FOLDER WORKERS

A step counts when its checkpoint is in place. The log of samples is cut back to the length that the
checkpoint knows, as a trainer cuts back its own.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

import penstock
from benchmarks import loops, under_test

BATCH = 16
RECORD = np.dtype([("epoch", "<i8"), ("id", "<i8")])


def main() -> None:
    folder = Path(sys.argv[1])
    where = int(sys.argv[2]) if sys.argv[2].isdigit() else sys.argv[2]
    log, state = folder / "log", folder / "state.json"
    loader = penstock.Loader(
        penstock.open(folder / "data"),
        batch_size=BATCH,
        epochs=None,
        seed=7,
        # A function that no module has: workers get it from this process.
        transform=lambda sample: {"bin": sample["bin"][::-1], "cls": int(sample["cls"])},
        output="numpy",
        **under_test.workers(where),
    )
    with loader, log.open("ab") as out:
        if state.exists():
            saved = json.loads(state.read_text())
            loader.load_state_dict(saved["loader"])
            out.truncate(saved["log_bytes"])
        else:
            out.truncate(0)
        for batch in loader:
            loops.touch(batch)
            right = [int.from_bytes(blob[-8:].tobytes(), "big") for blob in batch["bin"]]
            assert right == batch["cls"].tolist() == batch.ids.tolist(), "a sample is not its own"
            out.write(np.array([(batch.epoch, i) for i in right], RECORD).tobytes())
            out.flush()
            save(
                state, {"loader": loader.state_dict(), "log_bytes": os.fstat(out.fileno()).st_size}
            )
            if (folder / "finish").exists() and loader.epoch > batch.epoch:
                return


def save(path: Path, content: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


if __name__ == "__main__":
    main()
