"""Loaders of others under `penstock trace`, where they are installed."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.trace.foreign import peer_jobs
from tests.trace.foreign.peer_jobs import BATCH, NUM_SAMPLES, SAMPLE_BYTES
from tests.trace.foreign.test_jobs import traced

from penstock.trace import Kind

PEERS = {
    "webdataset": ("webdataset", "webdataset", Kind.READ, ".tar"),
    "huggingface": ("datasets", "huggingface-datasets", Kind.READ, ".parquet"),
    "huggingface_mapped": ("datasets", "huggingface-datasets", Kind.MAP, ".arrow"),
    "litdata": ("litdata", "litdata", Kind.MAP, ".bin"),
    "mosaic": ("streaming", "mosaicml-streaming", Kind.READ, ".mds"),
}
"""Package, the name in the facts, and how which files are read."""


@pytest.mark.parametrize("case", PEERS)
def test_batches_and_files_of_other_loaders_are_seen(case: str, tmp_path: Path) -> None:
    package, loader, kind, ending = PEERS[case]
    pytest.importorskip(package, exc_type=ImportError)
    (tmp_path / "data").mkdir()
    trace, printed = traced(
        tmp_path / "run", sys.executable, peer_jobs.__file__, case, str(tmp_path / "data")
    )
    whole = NUM_SAMPLES * SAMPLE_BYTES
    assert printed == [{"delivered": whole}]
    assert trace.facts()["loader"] == loader
    assert trace.of(Kind.NEXT)["count"].tolist() == [BATCH] * (NUM_SAMPLES // BATCH)
    assert trace.of(Kind.BATCH)["size_bytes"].sum() >= whole
    # Files are read by workers; a mapping may have been made before they were forked.
    readers = {p.pid for p in trace.processes if p.role == "worker" or kind == Kind.MAP}
    rows = trace.of(kind)
    seen = sum(
        int(row["size_bytes"])
        for row, name in zip(rows, trace.names_of(rows["object"]), strict=True)
        if name.endswith(ending) and trace.processes[row["process"]].pid in readers
    )
    assert seen >= whole
