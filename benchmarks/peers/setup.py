"""Environments of the peers: one for each, over a base that holds what all of them need.

    python -m benchmarks.peers.setup [--peers torch,grain] [--root .peers]

Peers disagree about versions, so each lives alone. torch is a gigabyte, so it lies in a base
environment once, and a `.pth` file puts that base behind the peer's own packages. The repository's
constraints hold torch at one version everywhere.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers import EVERYONE, PEERS

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))

BASE = [TORCH, "numpy", "simplejpeg", "opencv-python-headless"]


def python_of(root: Path, name: str) -> Path:
    """Return the interpreter of one environment; the limits run in the base."""
    return root / "env" / name / "bin" / "python"


def make_env(root: Path, name: str, packages: list[str]) -> None:
    folder = root / "env" / name
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True)
    if name != "base":
        (site_packages(folder) / "base.pth").write_text(f"{site_packages(root / 'env' / 'base')}\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, *packages], check=True, cwd=ROOT)


def site_packages(env: Path) -> Path:
    return next((env / "lib").glob("python3*")) / "site-packages"


def make_all(root: Path, names: list[str]) -> list[str]:
    """Make the base and the named peers; return those that failed: one does not stop the rest."""
    make_env(root, "base", BASE)
    failed = []
    for name in names:
        packages = EVERYONE[name].packages
        print(f"{name}: {' '.join(packages)}", flush=True)
        try:
            make_env(root, name, [TORCH, *packages])
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: failed, pip returned {error.returncode}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(["ours", *PEERS]))
    parser.add_argument("--root", type=Path, default=ROOT / ".peers")
    options = parser.parse_args()
    failed = make_all(options.root.resolve(), options.peers.split(","))
    sys.exit(f"no environment for: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
