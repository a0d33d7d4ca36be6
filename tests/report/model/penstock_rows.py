"""A trace of a run with Penstock, as its rows would be on a store without surprises."""

from pathlib import Path

from penstock.trace import Kind, Recorder, Trace, read_trace


def penstock_trace(
    folder: Path,
    *,
    cache_bytes: int,
    num_samples: int = 512,
    compute_s: float = 0.02,
    latency_s: float = 0.01,
    bytes_s: float = 50e6,
) -> Trace:
    """Record three epochs of batches of 16 samples of 100 kB that are never late."""
    recorder = Recorder(folder, role="train", rank=0)
    recorder.facts(
        {
            "loader": "penstock",
            "batch_size": 16,
            "num_workers": 2,
            "num_samples": num_samples,
            "epochs": 3,
            "cores": 4,
            "sample_bytes": {"mean": 100_000, "sd": 10_000},
            "tiers": [{"source": "memory", "capacity_bytes": cache_bytes}],
        }
    )
    now = 10**9
    step_ns = int(compute_s * 1e9)
    for epoch in range(3):
        for step in range(num_samples // 16):
            recorder.span(Kind.NEXT, now, now + 100_000, step=step, epoch=epoch, count=16)
            recorder.span(Kind.LAUNCH, now + 100_000, now + step_ns, count=1, cpu_ns=1000)
            recorder.span(Kind.DECODE, now, now + 1_000_000, count=16, cpu_ns=1_000_000)
            for number in range(8):
                # One, two, … at once, each in the share of the pipe that is left to it.
                at_once = 1 + (step % 8)
                long_s = max(latency_s + 100_000 / bytes_s, at_once * 100_000 / bytes_s)
                if number < at_once:
                    recorder.span(
                        Kind.FETCH, now, now + int(long_s * 1e9), size_bytes=100_000, epoch=epoch
                    )
            now += step_ns
    recorder.close()
    return read_trace(folder)
