"""Run a benchmark and keep what it printed as a result.

python -m benchmarks.results.record NAME --measures FOLDER [FOLDER ...] -- MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys

from benchmarks.results import FOLDER, ROOT, Recorded, read, write
from penstock.trace.host import usable_cores

PACKAGES = ("torch", "numpy", "obstore")


def machine() -> str:
    """Return cores and GPU of this machine, in words."""
    words = [f"{usable_cores():g} cores", platform.machine()]
    try:
        import torch

        if torch.cuda.is_available():
            words.insert(0, torch.cuda.get_device_name())
    except ImportError:
        pass
    return ", ".join(words)


def versions() -> str:
    """Return versions of what results hang on."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Return the commit that is measured, with a mark if there are changes beside it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the result, with its number: 03-slow-store")
    parser.add_argument("--title", help="of its section; else as it was")
    parser.add_argument("--measures", nargs="+", help="folders; else as they were")
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, help="-- MODULE ARGUMENTS")
    args = parser.parse_args()
    module = [word for word in args.benchmark if word != "--"]
    path = FOLDER / f"{args.name}.md"
    before = read(path).head if path.exists() else {}
    process = subprocess.Popen(
        [sys.executable, "-m", *module], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        printed.append(line)
    if process.wait():
        sys.exit(f"{shlex.join(module)} ended with {process.returncode}; nothing is kept")
    head = {
        "title": args.title or before["title"],
        "command": f"python -m {shlex.join(module)}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "measures": " ".join(args.measures or before["measures"].split()),
    }
    text = "```text\n" + "".join(printed).strip("\n") + "\n```\n"
    sys.stdout.write(f"kept in {write(Recorded(name=args.name, head=head, text=text))}\n")


if __name__ == "__main__":
    main()
