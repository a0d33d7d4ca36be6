"""How many bytes does a store serve for three epochs, by the size of the cache?

    python -m benchmarks.store_bytes [--quick] [--check] [--peers ours,mosaic] [--shares 0,50,100]
                                     [--rounds 1] [--json FILE]

Bytes of bodies are counted by the store, indexes, headers and what is asked for twice included.
`of bound` divides them by S + 2·max(0, S - C), the least that any order and policy could do. The
store has a latency of 1 ms and 400 MB/s: only bytes matter here. `RSS above start` is the peak of
the process less what it had when its imports were done, mapped files included; `private above
start` is the part that belongs to no file on disk, seen at each batch.
"""

from functools import partial

from testkit.shaper import Fixed, Shape

from benchmarks import remote_rounds
from benchmarks.remote_rounds import Columns, number, options_of, rows_of
from benchmarks.remote_run import measure

SHAPE = Shape(latency=Fixed(0.001), bandwidth_bytes_s=400e6)
SHARES = (0.0, 0.10, 0.25, 0.50, 0.90, 1.0, 1.5)
QUICK_SHARES = (0.0, 0.5, 1.0)
TIMEOUT_S = 40

COLUMNS: Columns = {
    "of bound": number("bound_ratio", ".4f"),
    "MB served": remote_rounds.megabytes("body_bytes"),
    "bound MB": remote_rounds.megabytes("bound_bytes"),
    "to open": remote_rounds.megabytes("open_bytes"),
    "by epoch": remote_rounds.megabytes("epoch_bytes"),
    "requests": number("epoch_requests", ",.0f"),
    "cache peak MB": remote_rounds.megabytes("cache_peak_bytes"),
    "peak RSS MB": remote_rounds.megabytes("peak_rss_bytes"),
    "RSS above start": remote_rounds.above("peak_rss_bytes", "start_rss_bytes"),
    "private above start": remote_rounds.above("private_peak_bytes", "start_private_bytes"),
    "mixing": number("mixing", ".2f"),
    "samples": remote_rounds.samples_cell,
    "seconds": lambda _, result: f"{result['steps'][-1][2] - result['steps'][0][0]:.1f}",
}


def main() -> None:
    options = options_of(__doc__, rounds=1, timeout_s=TIMEOUT_S)
    rows = rows_of("store_bytes", options, QUICK_SHARES if options.quick else SHARES)
    runs = {"timeout_s": options.timeout, "step_s": 0.0, "check": options.check}
    measured = partial(measure, options.root, shape=SHAPE, **runs)
    results = remote_rounds.take_turns(options, rows, measured)
    remote_rounds.report(__doc__.splitlines()[0], options, results, COLUMNS)


if __name__ == "__main__":
    main()
