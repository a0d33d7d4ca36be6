"""Write docs/benchmarks.md from the results of this folder.

python -m benchmarks.results.page
"""

from __future__ import annotations

import subprocess

from benchmarks.results import ROOT, Recorded, results

PAGE = ROOT / "docs" / "benchmarks.md"
TOP = """# Benchmarks

What Penstock was measured to do, and beside what. Every section is a file of
[benchmarks/results](../benchmarks/results); `python -m benchmarks.results.record` runs a command
and writes one, `python -m benchmarks.results.page` makes this page of them. Sections in prose are
older: they were written by hand from what the commands printed at that commit. A section whose code
has changed since says so: its figures may have moved.
[benchmarks/README.md](../benchmarks/README.md) says how to run the commands and how to read them.
"""
CHANGED = "The code has changed since, "
"""How the line begins that hangs on the commits that came later."""


def section(result: Recorded) -> str:
    """Return a section of the page."""
    head = result.head
    about = (
        f"`{head['command']}`  \n"
        f"{head['date']}, commit {head['commit']}; {head['machine']}; {head['versions']}."
    )
    age = num_commits_since(head["commit"], result.measures)
    if age:
        about += f"  \n{CHANGED}in {age} commits to {', '.join(f'`{m}`' for m in result.measures)}."
    return f"\n## {head['title']}\n\n{result.text}\n{about}\n"


def num_commits_since(commit: str, paths: list[str]) -> int | None:
    """Return how many commits have changed something since another one; None: git cannot tell."""
    command = ["git", "rev-list", "--count", f"{commit.removesuffix('-dirty')}..HEAD", "--", *paths]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(answer.stdout) if answer.returncode == 0 else None


def page() -> str:
    """Return the page."""
    found = results()
    contents = "".join(f"* [{r.head['title']}](#{anchor(r.head['title'])})\n" for r in found)
    return f"{TOP}\n{contents}" + "".join(section(result) for result in found)


def anchor(title: str) -> str:
    """Return how a link names a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
