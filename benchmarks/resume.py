"""How soon does the first batch come when a run goes on, at 0 % and at 90 % of an epoch?

    python -m benchmarks.resume [--peers ours,torch] [--rounds 3] [--json F]

Rows of the token set. Counted from the start of the process, and of it without imports. `right`
says whether the batch after a restart is the one that came next before it.
"""

import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.process import ask, ensure_written, task_for
from benchmarks.works import WORKS

FRACTION = 0.9
TIMEOUT_S = 240
VARIANTS = {
    "ours": ("auto",),
    "torch": ("w0", "w2"),
    "mosaic": ("w0", "w2"),
    "litdata": ("w0", "w2"),
    "grain": ("w0", "w2"),
    "hf": ("map-w0",),
}
"""WebDataset and SPDL have no state to go on from."""
COLUMNS = {
    "first batch s": lambda r: f"{r['first_batch_s']:.2f}",
    "without imports s": lambda r: f"{r['of_it_opening_s']:.3f}",
    "right": lambda r: "yes" if r["right"] else "NO",
    "state bytes": lambda r: f"{r['state_bytes']:,}" if "state_bytes" in r else "-",
}


def main() -> None:
    options = report.options_of(__doc__)
    work = WORKS["tokens"]
    tasks, known = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for peer in options.peers:
            for variant in VARIANTS.get(peer, ()):
                ensure_written(options.root, peer, work)
                state = str(Path(folder) / f"{peer}-{variant}")
                saving = task_for(options.root, peer, work, variant, "save")
                saving |= {"fraction": FRACTION, "state": state}
                known[peer, variant, "90 %"] = ask(options.root, saving, timeout_s=TIMEOUT_S)
                tasks[peer, variant, "0 %"] = ("resume", work, {"state": ""})
                tasks[peer, variant, "90 %"] = ("resume", work, {"state": state})
        report.run(__doc__, options, tasks, COLUMNS, known=known, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    main()
