"""How long does training wait for a store with 20 ms latency and 100 MB/s?

    python -m benchmarks.stalls [--quick] [--check] [--peers ours,torch] [--shares 50,100]
                                [--rounds 3] [--json FILE]

A training step reads a byte of each page of its batch and sleeps for the rest of its time, which is
5 % more than the store needs to bring a batch. `of no I/O` divides the time of epochs 2 and 3 by
that of as many steps without data, measured in the same round. Stall shares: `1` is epoch 1 after
its first second, `2-3` the epochs after it. First batches are counted from opening the loader
(imports done), and from the start of the process. The store runs on the same cores; its CPU time
and its worst delay stand beside.
"""

import sys
from argparse import Namespace

from testkit.shaper import Fixed, Shape

from benchmarks import remote_rounds
from benchmarks.remote import SAMPLE_BYTES, WORK
from benchmarks.remote_rounds import Columns, number, options_of, rows_of
from benchmarks.remote_run import EPOCHS, Row, ask, measure, scratch_in

STORE_BYTES_S = 100e6
SHAPE = Shape(latency=Fixed(0.020), bandwidth_bytes_s=STORE_BYTES_S)
STEP_S = WORK.batch_size * SAMPLE_BYTES / STORE_BYTES_S / 0.95
LATER_STEPS = (EPOCHS - 1) * WORK.num_batches
SHARES = (1.0, 0.5)
TIMEOUT_S = 120
FIRST_S = 1.0

Steps = list[tuple[float, float, float]]
"""For each step: when its batch was asked for, when it came, when the step was over."""

COLUMNS: Columns = {
    "first batch s": number("first_batch_s", ".2f"),
    "from process": number("process_first_batch_s", ".1f"),
    "stall 1": number("stall_first", ".1%"),
    "stall 2-3": number("stall_later", ".1%"),
    "of no I/O": number("of_rest", ".3f"),
    "of bound": number("bound_ratio", ".3f"),
    "by epoch MB": remote_rounds.megabytes("epoch_bytes"),
    "requests": number("requests", ",.0f"),
    "CPU s/GB": number("cpu_s_per_gb", ".2f"),
    "peak RSS MB": remote_rounds.megabytes("peak_rss_bytes"),
    "cache peak MB": remote_rounds.megabytes("cache_peak_bytes"),
    "mixing": number("mixing", ".2f"),
    "samples": remote_rounds.samples_cell,
    "store CPU s": number("store_cpu_s", ".1f"),
    "store late ms": number("store_late_max_s", ".0f", per=1e-3),
}


def stall_share(steps: Steps, begin_s: float, end_s: float) -> float:
    """Return the part of a span of time that was spent waiting for batches.

    >>> stall_share([(0.0, 3.0, 4.0), (4.0, 4.5, 5.0)], 1.0, 5.0)
    0.625
    """
    waits = [min(got, end_s) - max(asked, begin_s) for asked, got, _ in steps]
    return sum(wait for wait in waits if wait > 0) / (end_s - begin_s)


def stalls_of(result: dict, rest_s: float) -> dict:
    """Return the answers of this question from the steps of a run."""
    steps, in_first = result["steps"], result["epoch_steps"][0]
    begin, end = steps[0][0], steps[-1][2]
    first_end = steps[in_first - 1][2]
    gigabytes = sum(result["epoch_samples"]) * SAMPLE_BYTES / 1e9
    return {
        "stall_first": stall_share(steps, begin + FIRST_S, first_end),
        "stall_later": stall_share(steps, first_end, end),
        "of_rest": (end - first_end) / rest_s,
        "cpu_s_per_gb": result["cpu_s"] / gigabytes,
        "rest_s": rest_s,
    }


class Question:
    """Measures rows; a round begins with the steps alone."""

    def __init__(self, options: Namespace, first: Row) -> None:
        self.options, self.first = options, first
        self.rest_s = 0.0

    def __call__(self, row: Row) -> dict:
        if row == self.first:
            self.rest_s = self.rest()
        result = measure(
            self.options.root,
            row,
            SHAPE,
            timeout_s=self.options.timeout,
            step_s=STEP_S,
            check=self.options.check,
        )
        return result if "failed" in result else result | stalls_of(result, self.rest_s)

    def rest(self) -> float:
        task = {"mode": "rest", "peer": "ours", "num_steps": LATER_STEPS, "step_s": STEP_S}
        with scratch_in(self.options.root) as scratch:
            answer = ask(self.options.root, task | scratch, timeout_s=self.options.timeout)
        least_s = LATER_STEPS * STEP_S
        print(f"  no I/O: {answer['seconds']:.3f} s, asked {least_s:.3f}", file=sys.stderr)
        return answer["seconds"]


def main() -> None:
    options = options_of(__doc__, rounds=3, timeout_s=TIMEOUT_S)
    rows = rows_of("stalls", options, SHARES[:1] if options.quick else SHARES)
    results = remote_rounds.take_turns(options, rows, Question(options, rows[0]))
    remote_rounds.report(__doc__.splitlines()[0], options, results, COLUMNS)


if __name__ == "__main__":
    main()
