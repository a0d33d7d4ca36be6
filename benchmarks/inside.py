"""What runs inside the environment of one peer: a task comes in as JSON, a result goes out as JSON.

    python -m benchmarks.inside '{"mode": "measure", "peer": "grain", "work": "tokens", ...}'

The result is the last line of the output that starts with the mark: libraries print what they like.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import first, formats, look, window
from benchmarks.peers import EVERYONE
from benchmarks.works import WORKS, delivered_bytes, open_source

MARK = "benchmark result: "


def write(task: dict) -> dict:
    """Write the format of a peer, or a shared one, into a folder that is there and empty."""
    work, folder = WORKS[task["work"]], Path(task["folder"])
    if task["format"] == "source":
        formats.write(work, None, folder, "source")
    else:
        source = open_source(work, Path(task["source"]))
        if task["peer"] == "limit":
            formats.write(work, source, folder, task["format"])
        else:
            module_of(task).write(work, source, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {"size_bytes": sum(path.stat().st_size for path in files), "num_files": len(files)}


def measure(task: dict) -> dict:
    work, source, start = opened(task)
    result = window.measure(start, work, source, seconds=task["seconds"])
    first_batch_s = result.pop("first_batch_at") - task["started_at"]
    sample_bytes = delivered_bytes(work, source)
    return result | {"first_batch_s": first_batch_s, "sample_bytes": sample_bytes} | about(task)


def check(task: dict) -> dict:
    """Return what a whole epoch delivered: ids missing, ids repeated, samples with wrong bytes."""
    work, source, start = opened(task)
    seen = look.Seen(work, source)
    for batch in start(0):
        seen.add(batch)
    return seen.faults() | {"mixing": seen.mixing()} | about(task)


def opened(task: dict) -> tuple:
    work = WORKS[task["work"]]
    source = open_source(work, Path(task["source"]))
    start = module_of(task).open_loader(work, Path(task["folder"]), task["variant"])
    return work, source, start


def first_batch(task: dict) -> dict:
    """Run one of the tasks about first batches; the set may be larger than the work's own."""
    work = WORKS[task["work"]]
    work = replace(work, num_samples=task.get("num_samples", work.num_samples))
    return getattr(first, task["mode"])(module_of(task), work, task) | about(task)


def module_of(task: dict) -> object:
    return importlib.import_module(f"benchmarks.peers.{task['peer']}")


def about(task: dict) -> dict:
    try:
        return {"version": importlib.metadata.version(EVERYONE[task["peer"]].distribution)}
    except importlib.metadata.PackageNotFoundError:  # on the path, but not installed
        return {"version": ""}


MODES = {"write": write, "measure": measure, "check": check}
MODES |= dict.fromkeys(("open_many", "save", "resume"), first_batch)


def main() -> None:
    task = json.loads(sys.argv[1])
    began = time.perf_counter()
    result = MODES[task["mode"]](task)
    result["took_s"] = time.perf_counter() - began
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
