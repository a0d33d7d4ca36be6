"""Jobs with loaders of others, for `penstock trace`: each writes a little data and reads it.

python peer_jobs.py CASE FOLDER
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

NUM_SAMPLES = 64
SAMPLE_BYTES = 20_000
BATCH = 8


def sample(index: int) -> bytes:
    return np.random.default_rng(index).bytes(SAMPLE_BYTES)


def as_given(samples):
    return samples


def webdataset(folder: str) -> int:
    import webdataset

    with tarfile.open(Path(folder, "shard-0.tar"), "w") as out:
        for index in range(NUM_SAMPLES):
            member = tarfile.TarInfo(f"{index:05d}.bin")
            member.size = SAMPLE_BYTES
            out.addfile(member, io.BytesIO(sample(index)))
    source = webdataset.WebDataset(str(Path(folder, "shard-0.tar")), shardshuffle=False)
    loader = DataLoader(
        source.to_tuple("bin"), batch_size=BATCH, num_workers=1, collate_fn=as_given
    )
    return sum(len(data) for batch in loader for (data,) in batch)


def huggingface(folder: str) -> int:
    import datasets

    rows = {"data": [sample(index) for index in range(NUM_SAMPLES)]}
    datasets.Dataset.from_dict(rows).to_parquet(str(Path(folder, "a.parquet")))
    stream = datasets.load_dataset(
        "parquet", data_files=str(Path(folder, "a.parquet")), split="train", streaming=True
    )
    loader = DataLoader(stream, batch_size=BATCH, num_workers=1, collate_fn=as_given)
    return sum(len(row["data"]) for batch in loader for row in batch)


def huggingface_mapped(folder: str) -> int:
    import datasets

    rows = {"data": [sample(index) for index in range(NUM_SAMPLES)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(Path(folder, "saved")))
    kept = datasets.load_from_disk(str(Path(folder, "saved")))
    loader = DataLoader(kept, batch_size=BATCH, num_workers=1, collate_fn=as_given)
    return sum(len(row["data"]) for batch in loader for row in batch)


def litdata(folder: str) -> int:
    import litdata

    litdata.optimize(
        fn=row_of, inputs=list(range(NUM_SAMPLES)), output_dir=str(Path(folder, "optimized")),
        chunk_bytes="500KB", num_workers=1,
    )  # fmt: skip
    source = litdata.StreamingDataset(str(Path(folder, "optimized")))
    loader = litdata.StreamingDataLoader(
        source, batch_size=BATCH, num_workers=1, collate_fn=as_given
    )
    return sum(len(row["data"]) for batch in loader for row in batch)


def row_of(index: int) -> dict:
    return {"index": index, "data": sample(index)}


def mosaic(folder: str) -> int:
    import streaming

    with streaming.MDSWriter(
        out=str(Path(folder, "mds")), columns={"data": "bytes"}, size_limit=1 << 19
    ) as out:
        for index in range(NUM_SAMPLES):
            out.write({"data": sample(index)})
    source = streaming.StreamingDataset(local=str(Path(folder, "mds")), batch_size=BATCH)
    loader = streaming.StreamingDataLoader(
        source, batch_size=BATCH, num_workers=1, collate_fn=as_given
    )
    return sum(len(row["data"]) for batch in loader for row in batch)


if __name__ == "__main__":
    case, place = sys.argv[1:]
    sys.stdout.write(json.dumps({"delivered": globals()[case](place)}) + "\n")
