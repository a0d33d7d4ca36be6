"""Data whose samples prove themselves: each holds a hash of the rest of it, keyed by its number.

python -m benchmarks.cluster_data URI ENDPOINT NUM_SAMPLES SAMPLE_BYTES SHARD_SIZE
"""

import sys
from collections.abc import Sequence

import numpy as np
import xxhash

import penstock
from penstock.testing.servers import S3Access

_HASH_BYTES = 8


def payload_of(number: int, size_bytes: int) -> bytes:
    """Return a sample's bytes: sizes differ by up to a quarter."""
    rng = np.random.default_rng(number)
    body = rng.bytes(int(size_bytes * rng.uniform(0.75, 1.25)))
    return xxhash.xxh3_64_digest(body, seed=number) + body


def is_right(number: int, payload: bytes | memoryview) -> bool:
    body = memoryview(payload)[_HASH_BYTES:]
    return xxhash.xxh3_64_digest(body, seed=number) == bytes(payload[:_HASH_BYTES])


def write(uri: str, access: S3Access, num_samples: int, size_bytes: int, shard_size: str) -> None:
    with penstock.Writer(uri, store=access.options, shard_size=shard_size) as writer:
        for number in range(num_samples):
            writer.write({"bin": payload_of(number, size_bytes)})


def main(arguments: Sequence[str]) -> None:
    uri, endpoint, num_samples, size_bytes, shard_size = arguments
    write(uri, S3Access(endpoint=endpoint), int(num_samples), int(size_bytes), shard_size)


if __name__ == "__main__":
    main(sys.argv[1:])
