"""All the questions, one after the other; environments for the peers are made first where missing.

python -m benchmarks.run [--quick] [--rounds 3] [--peers ours,torch] [--root .peers]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import EVERYONE, PEERS
from benchmarks.peers.setup import ROOT, make_all, python_of

QUESTIONS = ("tokens", "blobs", "jpeg", "open", "resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT / ".peers", help="work folder")
    parser.add_argument("--peers", default=",".join(["ours", *PEERS]))
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    root = given.root.resolve()
    wanted = [peer for peer in given.peers.split(",") if peer in EVERYONE]
    missing = [peer for peer in ("base", *wanted) if not python_of(root, peer).exists()]
    if missing:
        make_all(root, [peer for peer in missing if peer != "base"])
    passed_on = ["--root", str(root), "--peers", given.peers, "--rounds", given.rounds]
    passed_on += ["--quick"] if given.quick else []
    (root / "results").mkdir(exist_ok=True)
    for question in QUESTIONS:
        result = ["--json", str(root / "results" / f"{question}.json")]
        command = [sys.executable, "-m", f"benchmarks.{question}", *passed_on, *result]
        subprocess.run(command, cwd=ROOT, check=False)


if __name__ == "__main__":
    main()
