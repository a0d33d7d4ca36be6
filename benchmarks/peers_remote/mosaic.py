"""MosaicML Streaming: shards in MDS from S3, downloaded to a folder with a limit."""

import os
from pathlib import Path

from benchmarks.peers import mosaic as local
from benchmarks.peers.torch import pack, unpack
from benchmarks.peers_remote import KEYS, Opened, Unsupported
from benchmarks.remote import SAMPLE_BYTES, WORK
from benchmarks.works import SEED, Ragged

SHARD_BYTES = 5_500_000
"""It wants to hold at least four shards, so the smallest cache says how large they may be."""
BLOCK_MAX = 1024


def write(source: Ragged, folder: Path) -> None:
    columns = local.COLUMNS[WORK.name]
    with local.MDSWriter(
        out=str(folder), columns=columns, size_limit=SHARD_BYTES, exist_ok=True
    ) as out:
        for i in range(WORK.num_samples):
            out.write({"data": source[i].tobytes(), "label": i})


def open_loader(task: dict) -> Opened:
    if not task["limit_bytes"]:
        raise Unsupported("no cache of 0: cache_limit=0 is no limit, the least are four shards")
    os.environ.update(KEYS, S3_ENDPOINT_URL=task["endpoint"])
    local.clean_stale_shared_memory()
    samples = local.StreamingDataset(
        remote=task["uri"].rstrip("/"),
        local=task["cache"],
        cache_limit=task["limit_bytes"],
        shuffle=True,
        shuffle_seed=SEED,
        batch_size=WORK.batch_size,
        **blocks(task),
    )
    # Workers would inherit the connection over which the index came, and read each other's answers.
    samples.streams[0]._downloader.clean_up()
    workers, _, _ = task["variant"].partition("-")
    loader = local.DataLoader(
        samples,
        WORK.batch_size,
        collate_fn=packed,
        num_workers=int(workers[1:]),
        persistent_workers=True,
    )
    return Opened(start=lambda _: map(unpack, loader))


def packed(samples: list[dict]) -> tuple:
    return pack([(sample["data"], sample["label"]) for sample in samples])


def blocks(task: dict) -> dict:
    """Return settings with which what is shuffled together fits into the cache.

    Workers run ahead of each other, so a quarter of it. Its own block is the whole of this set:
    then a first batch waits for most shards, and a smaller cache loads them again and again.
    """
    if task["variant"].endswith("default"):
        return {}
    block = min(BLOCK_MAX, task["limit_bytes"] // SAMPLE_BYTES // 4)
    return {"shuffle_block_size": block, "predownload": block}
