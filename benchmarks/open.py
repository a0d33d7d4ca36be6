"""How long does it take, and how much memory, to open 10^8 samples and to get the first batch?

    python -m benchmarks.open [--peers ours,grain] [--rounds 3] [--json F]

Shuffled as each loader can; imports are not counted. There is no limit to print but zero.
"""

from benchmarks import many, report
from benchmarks.peers import EVERYONE
from benchmarks.works import WORKS

# One process each: workers would only repeat what the first has to do.
VARIANTS = {"torch": "w0-batch", "spdl": "t2", "hf": "map-w0", "ours": "auto"}
TIMEOUT_S = 240
COLUMNS = {
    "open s": lambda r: f"{r['open_s']:.3f}",
    "first batch s": lambda r: f"{r['first_batch_s']:.3f}",
    "private MB": lambda r: f"{r['private_bytes'] / 1e6:,.0f}",
    "more than before MB": lambda r: f"{r['private_bytes_more'] / 1e6:,.0f}",
    "peak RSS MB": lambda r: f"{r['peak_rss_bytes'] / 1e6:,.0f}",
}


def main() -> None:
    options = report.options_of(__doc__)
    tokens = WORKS["tokens"]
    more = {"num_samples": many.NUM_SAMPLES}
    tasks = {}
    for peer in options.peers:
        variant = VARIANTS.get(peer, "w0")
        folder = report.many_folder(options.root, EVERYONE[peer].formats["tokens"], peer)
        tasks[peer, variant, ""] = ("open_many", tokens, more | {"folder": str(folder)})
    report.run(__doc__, options, tasks, COLUMNS, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    main()
