"""A loader in stages: the bytes of a batch, then the batch; only what was asked for, if need be."""

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.storage.locate import open_store

from .conftest import MakeRows, write_tar

BATCH, BLOB_BYTES = 8, 20_000


@pytest.fixture
def remote(s3: Any, tmp_path: Path) -> penstock.Dataset:
    samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in range(64)]
    write_tar(tmp_path / "far" / "x.tar", samples)
    store = open_store(s3.uri, s3.options)
    store.write("far/x.tar", (tmp_path / "far" / "x.tar").read_bytes())
    return penstock.open(f"{s3.uri.rstrip('/')}/far/", store=s3.options)


@pytest.mark.parametrize("only_asked", [False, True])
def test_batches_in_stages_are_those_of_the_loop(make_rows: MakeRows, only_asked: bool) -> None:
    dataset = make_rows(64)  # So small that several batches are one job.
    loader = penstock.Loader(dataset, batch_size=5, seed=3, output="numpy", epochs=2)
    expected = [batch.ids.tolist() for batch in loader]
    again = penstock.Loader(dataset, batch_size=5, seed=3, output="numpy", epochs=2)
    stages = again.stages(only_asked=only_asked)
    found, asked = [], [stages.fetch()]
    with pytest.raises(StopIteration):
        while True:
            asked.append(stages.fetch())
            found.append(stages.decode(asked.pop(0)).ids.tolist())
    found.append(stages.decode(asked.pop()).ids.tolist())
    stages.close()
    assert found == expected


def test_nothing_is_read_that_was_not_asked_for(remote: penstock.Dataset) -> None:
    with penstock.Loader(remote, batch_size=BATCH, shuffle=None, output="numpy") as loader:
        stages, tickets = loader.stages(only_asked=True), []
        for num_asked in (1, 2, 3):
            tickets.append(stages.fetch())
            read_bytes = loader.stats().store_bytes
            assert read_bytes // (BATCH * BLOB_BYTES) == num_asked
        for number, ticket in enumerate(tickets):
            assert stages.decode(ticket)["bin"][0][0] == number * BATCH
            for start_ns, stop_ns in (ticket.fetch_ns, ticket.decode_ns):
                assert 0 < start_ns < stop_ns
            assert ticket.fetch_ns[1] <= ticket.decode_ns[0]
