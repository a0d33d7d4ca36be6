"""Access patterns with known labels, and how ranks share what they read."""

from pathlib import Path

import numpy as np
import pytest

from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.values import Analysis
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

MS = 1_000_000
SIZE, COUNT, BLOCK = 4_000, 256, 16


def offsets(label: str, rng: np.random.Generator) -> np.ndarray:
    places = np.arange(COUNT)
    if label == "strided":
        return places * SIZE * 4
    if label == "random":
        return rng.permutation(COUNT) * SIZE
    if label == "block-shuffled":
        blocks = rng.permutation(COUNT // BLOCK)
        if rng.random() < 0.5:  # Blocks in another order, or samples shuffled within blocks.
            return (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel() * SIZE
        inside = [rng.permutation(BLOCK) for _ in blocks]
        return (np.arange(COUNT // BLOCK)[:, None] * BLOCK + inside).ravel() * SIZE
    return places * SIZE


def analysis_of(folder: Path, reads: dict[int, list[tuple[str, int]]]) -> Analysis:
    """Analyse a run in which each rank reads some places, one after the other."""
    for rank, places in reads.items():
        to = Recorder(folder, role="train", rank=rank)
        for i, (name, offset) in enumerate(places):
            at = i * MS + 1
            span = {"object_id": to.name(name), "offset": int(offset), "size_bytes": SIZE}
            to.span(Kind.READ, at, at + MS // 4, **span)
            to.span(Kind.READ, at + MS // 4, at + MS // 3, **span | {"size_bytes": 0})
            if i % 8 == 7:
                to.span(Kind.NEXT, at, at + MS // 2, step=i // 8, epoch=0, count=8)
        to.close()
    return analyze(read_trace(folder))


LABELS = ("sequential", "strided", "block-shuffled", "random")


def test_labels_are_right_on_generated_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    drawn = [LABELS[i % len(LABELS)] for i in range(80)]
    reads = {
        rank: [(f"file-{rank}-{n}", o) for n in range(2) for o in offsets(label, rng)]
        for rank, label in enumerate(drawn)
    }
    analysis = analysis_of(tmp_path, reads)
    found = [pattern.label for pattern in analysis.patterns]
    right = np.mean([a == b for a, b in zip(found, drawn, strict=True)])
    assert right >= 0.95, list(zip(found, drawn, strict=True))
    # Reads at the end of a file return nothing: they are no requests.
    assert all(p.num_requests == p.num_zero_reads == 2 * COUNT for p in analysis.patterns)
    assert analysis.patterns[1].stride_bytes == 4 * SIZE
    assert analysis.sharing.shared_objects == 0


def test_reads_of_the_same_bytes_by_all_ranks_are_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    reads = {rank: [("shared", o) for o in offsets("random", rng)] for rank in range(4)}
    sharing = analysis_of(tmp_path, reads).sharing
    assert sharing.shared_objects == 1
    assert sharing.duplicate_bytes == pytest.approx(3 / 4)


def test_small_files_are_read_whole(tmp_path: Path) -> None:
    reads = {0: [(f"file-{i}", 0) for i in range(COUNT)] * 2}
    analysis = analysis_of(tmp_path, reads)
    assert analysis.patterns[0].label == "whole files"
    assert analysis.patterns[0].reuse == pytest.approx(0.5)
    assert analysis.patterns[0].concurrency_max == 1


def test_files_that_are_read_in_pieces_are_read_whole(tmp_path: Path) -> None:
    """As np.load does it: a head, then a bit back, and the rest; a second epoch begins anew."""
    to = Recorder(tmp_path, role="train", rank=0)
    for i in range(2 * COUNT):
        at = i * MS + 1
        name = to.name(f"file-{i % COUNT}")
        for offset, size in ((0, 4096), (128, 20_000), (20_128, 9_000)):
            to.span(
                Kind.READ, at + offset, at + offset + size, object_id=name, offset=offset,
                size_bytes=size,
            )  # fmt: skip
        if i % 8 == 7:
            to.span(Kind.NEXT, at, at + MS // 2, step=i // 8, epoch=0, count=8)
    to.close()
    [pattern] = analyze(read_trace(tmp_path)).patterns
    assert (pattern.label, pattern.sequential, pattern.random) == ("whole files", 1.0, 0.0)
