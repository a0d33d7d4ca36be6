"""A set of 10^8 samples that takes no room: the token set's files over and over, by links.

Opening a set costs by its size, whatever lies in it, so every format's index is written at full
length and its shards are links to those of the small set. The array is a file with holes.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from benchmarks.works import ROW_LENGTH, WORKS

TIMES = 250
NUM_SAMPLES = TIMES * WORKS["tokens"].num_samples


def write(format_name: str, small: Path, folder: Path) -> None:
    """Write the index of one format, and links for all that it names."""
    {"source": sparse, "tar": tars, "mds": mds, "litdata": chunks, "arrow": arrow}[format_name](
        small, folder
    )


def sparse(_: Path, folder: Path) -> None:
    shape = (NUM_SAMPLES, ROW_LENGTH)
    np.lib.format.open_memmap(folder / "tokens.npy", "w+", dtype=np.int32, shape=shape)


def tars(small: Path, folder: Path) -> None:
    shards = sorted(small.glob("*.tar"))
    for number in range(TIMES * len(shards)):
        (folder / f"shard-{number:05}.tar").symlink_to(shards[number % len(shards)])


def mds(small: Path, folder: Path) -> None:
    index = json.loads((small / "index.json").read_text())
    shards = []
    for number in range(TIMES * len(index["shards"])):
        shard = index["shards"][number % len(index["shards"])]
        name = f"shard.{number:05}.mds"
        (folder / name).symlink_to(small / shard["raw_data"]["basename"])
        shards.append(shard | {"raw_data": shard["raw_data"] | {"basename": name}})
    (folder / "index.json").write_text(json.dumps(index | {"shards": shards}))


def chunks(small: Path, folder: Path) -> None:
    index = json.loads((small / "index.json").read_text())
    made = []
    for number in range(TIMES * len(index["chunks"])):
        chunk = index["chunks"][number % len(index["chunks"])]
        name = f"chunk-0-{number}.bin"
        (folder / name).symlink_to(small / chunk["filename"])
        made.append(chunk | {"filename": name})
    (folder / "index.json").write_text(json.dumps(index | {"chunks": made}))


def arrow(small: Path, folder: Path) -> None:
    here, there = folder / "set", small / "set"
    here.mkdir()
    shutil.copy(there / "dataset_info.json", here)
    state = json.loads((there / "state.json").read_text())
    names = []
    for number in range(TIMES * len(state["_data_files"])):
        file = state["_data_files"][number % len(state["_data_files"])]["filename"]
        names.append({"filename": f"data-{number:05}.arrow"})
        (here / names[-1]["filename"]).symlink_to(there / file)
    (here / "state.json").write_text(json.dumps(state | {"_data_files": names}))
