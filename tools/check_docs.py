"""Check the documentation: relative links resolve, its Python runs, its transcripts are true.

    python tools/check_docs.py                      all pages
    python tools/check_docs.py docs/guides/resume.md

Each page runs in a process and an empty folder of its own, with `PENSTOCK_CACHE` there. In order:

* a ```python block is executed, all of a page in one namespace; one whose first line is
  `# file: NAME` is written to that file instead, to be imported by later ones;
* a ```console block has commands (`$ penstock …`) and what they print, which is compared; times and
  rates may differ, and the folder is shown as `/home/me`;
* a `<!-- setup` comment holds Python that the reader need not see;
* `<!-- not run: reason -->` before a block leaves it out.

Every page gets one line; the exit code is 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = "/home/me"
PAGE_SECONDS_MAX = 120.0
LINKS_ONLY = ("README.md", "benchmarks/README.md")
"""Pages whose code is a picture of code: nothing on them is run."""
_FORK = multiprocessing.get_context("fork")

_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\s*\n)?^```(?P<kind>python|console)\n(?P<code>.*?)^```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.M | re.S,
)
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_MEASURED = re.compile(r"\d[\d.,]* (ns|us|ms|s|[kMGT]?B/s)(?![\w/])")
_PROGRESS = re.compile(r"^[a-z]+: [\d,]+ of [\d,]+ .*\n", re.M)
"""What a command says every ten seconds, if it takes that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Something on a page that can be run."""

    kind: str
    """python, console or setup."""
    code: str
    line: int
    """Line of the page where the code begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a page."""

    page: str
    num_run: int = 0
    num_skipped: int = 0
    seconds: float = 0.0
    failure: str = ""

    def line(self) -> str:
        """Return it in one line; a failure adds what happened."""
        if self.failure:
            return f"FAILED  {self.page}\n{self.failure}"
        skipped = f", {self.num_skipped} not run" if self.num_skipped else ""
        return f"ok      {self.page}: {self.num_run} blocks{skipped}, {self.seconds:.1f} s"


def pages() -> list[Path]:
    """Return all pages: those of the docs and those beside the code."""
    beside = (*LINKS_ONLY, "CONTRIBUTING.md", "CHANGELOG.md")
    return [*(ROOT / name for name in beside), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str) -> Iterator[Block | None]:
    """Yield the blocks of a page; None for one that is not run."""
    for found in _BLOCK.finditer(text):
        kind = found["kind"] or "setup"
        group = "code" if found["kind"] else "setup"
        line = text.count("\n", 0, found.start(group)) + 1
        yield None if found["skip"] else Block(kind=kind, code=found[group], line=line)


# -- links -----------------------------------------------------------------------------------


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    out = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            out.append(f"{target}: there is no {path}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            out.append(f"{target}: {path.name} has no heading for #{anchor}")
    return out


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# -- one page, in its own process ------------------------------------------------------------


def run_page(page: Path, folder: Path, said: Path) -> None:
    """Run the blocks of a page; write what went wrong, or how much was run."""
    atexit._clear()  # What the parent wants done at its end is not ours to do.
    os.chdir(folder)
    # Everything that a page prints, also by processes it starts, is kept for a failure.
    descriptor = os.open(folder / ".printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"PENSTOCK_CACHE": str(folder / ".cache"), "PENSTOCK_REPOSITORY": str(ROOT)}
    os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    counts = {"num_run": 0, "num_skipped": 0}
    failure = ""
    for block in blocks_of(page.read_text()):
        if block is None:
            counts["num_skipped"] += 1
            continue
        try:
            run_block(block, page, folder, names)
        except BaseException:
            failure = _trimmed(traceback.format_exc())
            sys.stdout.flush()
            failure += (folder / ".printed").read_text()[-2000:]
            break
        counts["num_run"] += 1
    said.write_text(json.dumps({**counts, "failure": failure}))
    atexit._run_exitfuncs()  # Servers that a page has started end with it, also after a failure.
    os._exit(0)


def run_block(block: Block, page: Path, folder: Path, names: dict[str, Any]) -> None:
    """Run one block."""
    if block.kind == "console":
        check_transcript(block, page, folder)
        return
    first, _, rest = block.code.partition("\n")
    if first.startswith("# file: "):
        (folder / first.removeprefix("# file: ").strip()).write_text(rest)
        return
    where = str(page.relative_to(ROOT))
    # Empty lines before it, so that tracebacks name the page's own lines.
    exec(compile("\n" * (block.line - 1) + block.code, where, "exec"), names)


def check_transcript(block: Block, page: Path, folder: Path) -> None:
    """Run the commands of a transcript and compare what they print."""
    for shown in re.split(r"^(?=\$ )", block.code, flags=re.M):
        command, _, expected = shown.removeprefix("$ ").partition("\n")
        if not shown.startswith("$ "):
            continue
        answer = subprocess.run(
            command if re.search(r"[|>&;]", command) else shlex.split(command),
            shell=bool(re.search(r"[|>&;]", command)),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        said = _PROGRESS.sub("", answer.stderr)
        printed = (answer.stdout + said).replace(str(folder), HOME)
        if _steady(printed) != _steady(expected):
            difference = difflib.unified_diff(
                expected.splitlines(), printed.splitlines(), "page", "printed", lineterm=""
            )
            raise AssertionError(f"{page.name}: $ {command}\n" + "\n".join(difference))


def _steady(text: str) -> str:
    lines = (_MEASURED.sub("# s", line).rstrip() for line in text.strip().splitlines())
    return "\n".join(lines)


def _trimmed(text: str) -> str:
    """Return a traceback without this program's own frames."""
    own = re.compile(rf'  File "{re.escape(__file__)}".*\n(    .*\n)*')
    return own.sub("", text)


# -- all pages -------------------------------------------------------------------------------


def check(chosen: Sequence[Path], at_once: int) -> Iterator[Result]:
    """Yield a result for each page, in the order in which they are done."""
    waiting, running = list(chosen), dict[int, tuple[Path, Any, Path, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            page = waiting.pop(0)
            links = broken_links(page)
            if links or _name(page) in LINKS_ONLY:
                yield Result(page=_name(page), failure="\n".join(links))
                continue
            place = Path(tempfile.mkdtemp(prefix="penstock-docs-")).resolve()
            folder = place / "me"
            folder.mkdir()
            process = _FORK.Process(target=run_page, args=(page, folder, place / "said"))
            process.start()
            running[process.sentinel] = (page, process, place, time.monotonic())
        for sentinel in wait(list(running), timeout=1.0):
            assert isinstance(sentinel, int)
            yield _result(*running.pop(sentinel))
        for _, process, _, began_s in running.values():
            if time.monotonic() - began_s > PAGE_SECONDS_MAX:
                process.kill()


def _result(page: Path, process: Any, place: Path, began_s: float) -> Result:
    process.join()
    said = place / "said"
    seconds = time.monotonic() - began_s
    found = {
        "failure": f"the process ended with {process.exitcode} after {seconds:.0f} s, before the "
        f"page did; a page may take {PAGE_SECONDS_MAX:.0f} s"
    }
    if said.exists():
        found = json.loads(said.read_text())
    shutil.rmtree(place, ignore_errors=True)
    return Result(page=_name(page), seconds=seconds, **found)  # type: ignore[arg-type]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _warm_up() -> None:
    """Import once what most pages need; pages are forked from here."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Some pages use `testkit`, as a reader can in a checkout.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path.insert(0, str(ROOT))
    import numpy  # noqa: F401

    import penstock  # noqa: F401

    try:
        import torch  # noqa: F401
    except ImportError:
        return


def main() -> int:
    """Check what was asked for."""
    parser = argparse.ArgumentParser(description="Check links, Python and transcripts of the docs.")
    parser.add_argument("pages", nargs="*", type=Path, help="all of them when none is named")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="one JSON object a page instead")
    args = parser.parse_args()
    chosen = [path.resolve() for path in args.pages] or [p for p in pages() if p.exists()]
    _warm_up()
    failed = 0
    for result in check(chosen, args.at_once):
        failed += bool(result.failure)
        text = {"page": result.page, "failure": result.failure}
        sys.stdout.write((json.dumps(text) if args.json else result.line()) + "\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
