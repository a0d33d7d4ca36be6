"""Train on the rows of an array in a store, or in a file, with Penstock."""

import argparse
import json
import time

import penstock

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", help="s3://… or a path")
parser.add_argument("--endpoint", default="")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--cache-bytes", type=int, default=0)
parser.add_argument("--cache-folder", default="")
parser.add_argument("--num-workers", type=int, default=0, help="0: Penstock chooses")
parser.add_argument("--step-ms", type=float, default=0, help="the accelerator's time for a step")


def loader_of(args: argparse.Namespace) -> penstock.Loader:
    store = penstock.StoreOptions(endpoint=args.endpoint, anonymous=True) if args.endpoint else None
    return penstock.Loader(
        penstock.open(args.data, store=store),
        batch_size=args.batch_size,
        epochs=args.epochs,
        seed=7,
        shuffle="global",
        drop_last=True,
        tiers=[penstock.Disk(args.cache_folder, args.cache_bytes)] if args.cache_bytes else [],
        workers=args.num_workers or "processes",
        look_ahead="8MB",
    )


def main() -> None:
    args = parser.parse_args()
    begin_s, steps = 0.0, 0
    with loader_of(args) as loader:
        for _batch in loader:
            time.sleep(args.step_ms / 1000)  # The accelerator computes, the host waits for it.
            steps += 1
            begin_s = begin_s or time.perf_counter()
        seconds = time.perf_counter() - begin_s
    print(json.dumps({"samples_s": (steps - 1) * args.batch_size / seconds, "seconds": seconds}))


if __name__ == "__main__":
    main()
