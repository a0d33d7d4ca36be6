"""LitData: chunks from S3, downloaded to a folder with a limit."""

import os
from pathlib import Path

from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader

from benchmarks.peers.litdata import Sample
from benchmarks.peers.torch import pack, unpack
from benchmarks.peers_remote import KEYS, Opened, Unsupported
from benchmarks.remote import SIZE_BYTES, WORK
from benchmarks.works import SEED, Ragged

# Where obstore is installed it is given these options and no others, so http is refused.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"


def write(source: Ragged, folder: Path) -> None:
    made = Sample(WORK, Path(source.bytes.filename).parent)
    ids = list(range(WORK.num_samples))
    optimize(made, ids, output_dir=str(folder), chunk_bytes="8MB", num_workers=1, verbose=False)


def open_loader(task: dict) -> Opened:
    if task["limit_bytes"] >= SIZE_BYTES:
        # Chunks come in groups, and a group is waited for: 16 of them are a quarter of this set.
        # With a smaller cache it came to a halt with this setting, so that keeps its own.
        os.environ["LITDATA_ASYNC_DOWNLOAD_CONCURRENCY"] = "4"
    if not task["limit_bytes"]:
        raise Unsupported("no cache of 0: max_cache_size=0 is no limit")
    keys = {"aws_access_key_id", "aws_secret_access_key"}
    samples = StreamingDataset(
        task["uri"].rstrip("/"),
        task["cache"],
        storage_options={key: KEYS[key.upper()] for key in keys}
        | {"endpoint_url": task["endpoint"], "region_name": KEYS["AWS_DEFAULT_REGION"]},
        max_cache_size=task["limit_bytes"],
        shuffle=True,
        drop_last=False,
        seed=SEED,
        item_shuffle_window="full",
        batch_decode=0,
    )
    loader = StreamingDataLoader(
        samples,
        batch_size=WORK.batch_size,
        num_workers=int(task["variant"][1:]),
        persistent_workers=True,
        collate_fn=pack,
    )
    return Opened(start=lambda _: map(unpack, loader))
