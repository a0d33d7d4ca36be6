"""Results of benchmarks as files, and the page that shows them.

    python -m benchmarks.results.record 03-slow-store -- benchmarks.stalls
    python -m benchmarks.results.page           # writes docs/benchmarks.md

A result is a Markdown file of this folder with a head of `name: value` lines: what was run, of
which commit, on which machine, with which versions, when, and which code it measures. The page
shows all of it, and says of each result how many commits have changed that code since.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
HEAD = ("title", "command", "commit", "date", "machine", "versions", "measures")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A result of a benchmark."""

    name: str
    """Of its file: a number, which orders the page, and a word."""
    head: dict[str, str]
    text: str

    @property
    def measures(self) -> list[str]:
        """Return the folders and files that it measures."""
        return self.head["measures"].split()


def results() -> list[Recorded]:
    """Return all results in the order of the page."""
    return [read(path) for path in sorted(FOLDER.glob("*.md"))]


def read(path: Path) -> Recorded:
    """Return a result."""
    top, _, text = path.read_text().partition("\n\n")
    head = dict(line.split(": ", 1) for line in top.splitlines())
    assert tuple(head) == HEAD, f"{path.name}: its head has {', '.join(head)}"
    return Recorded(name=path.stem, head=head, text=text.strip() + "\n")


def write(result: Recorded) -> Path:
    """Write a result; return its file."""
    lines = [f"{name}: {result.head[name]}" for name in HEAD]
    path = FOLDER / f"{result.name}.md"
    path.write_text("\n".join(lines) + "\n\n" + result.text.strip() + "\n")
    return path
