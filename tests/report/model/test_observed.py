from pathlib import Path

import pytest

from penstock.report.model.observed import measured
from penstock.trace import Kind, Recorder, read_trace

MS = 1_000_000


def test_of_all_ranks_the_longest_wait_of_a_step_counts(tmp_path: Path) -> None:
    # Steps of 100 ms: of even ones rank 0 waits 40 ms for its batch, of odd ones rank 1 20 ms.
    for rank in (0, 1):
        recorder = Recorder(tmp_path / "run", role="train", rank=rank)
        for step in range(21):
            waits = (0 if step % 2 else 40) if rank == 0 else (20 if step % 2 else 0)
            begin, got = (10_000 + step * 100) * MS, (10_000 + step * 100 + waits) * MS
            recorder.span(Kind.NEXT, begin, got, wait_ns=waits * MS, step=step, epoch=0, count=8)
            recorder.span(Kind.LAUNCH, got, begin + 100 * MS, count=1)
        recorder.span(Kind.PEER_REQUEST, 10_000 * MS, 10_001 * MS, size_bytes=1000)
        recorder.close()
    run = measured(read_trace(tmp_path / "run"))
    assert run.stall_share == pytest.approx(0.3, rel=0.1)
    assert run.step_s == pytest.approx(0.1, rel=0.05)
    assert run.peer_bytes == 2000
