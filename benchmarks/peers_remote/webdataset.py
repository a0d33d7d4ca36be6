"""WebDataset: tar shards by http, kept in its own folder of files, with its own limit."""

import webdataset as wds

from benchmarks.peers.torch import pack, unpack
from benchmarks.peers.webdataset import BUFFER_SAMPLES, blob
from benchmarks.peers_remote import Opened
from benchmarks.remote import NUM_SHARDS, WORK
from benchmarks.works import SEED


def open_loader(task: dict) -> Opened:
    urls = [f"{task['url']}shard-{number:05}.tar" for number in range(NUM_SHARDS)]
    batches = (
        wds.WebDataset(
            urls,
            shardshuffle=len(urls),
            detshuffle=True,
            seed=SEED,
            cache_dir=task["cache"],
            cache_size=task["limit_bytes"],
        )
        .shuffle(BUFFER_SAMPLES)
        .map(blob)
        .batched(WORK.batch_size, collation_fn=pack, partial=True)
    )
    workers = int(task["variant"][1:])
    loader = wds.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=True)
    return Opened(start=lambda _: map(unpack, loader))
