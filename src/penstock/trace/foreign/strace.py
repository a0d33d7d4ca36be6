"""The view through strace, where no library can be preloaded: every call, at a high price.

strace writes a text line for each call. They are read when the job has ended and become rows like
those of the preloaded library, one process each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from penstock.trace.recorder import Recorder
from penstock.trace.schema import Flag, Kind

_LOG = "strace.txt"
_CALLS = "read,pread64,readv,preadv,preadv2,recvfrom,recvmsg,open,openat,mmap"
_LINE = re.compile(
    r"^(?P<pid>\d+)\s+(?P<time>\d+\.\d+) (?P<call>\w+)\((?P<arguments>.*)\)\s+= "
    r"(?P<result>-?\d+|0x[0-9a-f]+)(?:<(?P<opened>[^>]*)>)?.*? <(?P<took>\d+\.\d+)>$"
)
_UNFINISHED = re.compile(r"^(?P<pid>\d+)\s+(?P<head>\d+\.\d+ .*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?P<pid>\d+)\s+\d+\.\d+ <\.\.\. \w+ resumed>(?P<tail>.*)$")
_FILE = re.compile(r"^\d+<(?P<name>[^>]*)>")
_NOISE = re.compile(
    r"\.(py|pyc|pyi|so)$|\.so\.|pyvenv\.cfg$|^/(proc|sys|etc|usr/lib|usr/share|lib)|/site-packages"
    r"|/lib/python3|^/dev/(?!shm/)|^/dev/shm/(torch_|sem\.)"
)
_READS = frozenset({"read", "pread64", "readv", "preadv", "preadv2", "recvfrom", "recvmsg"})


def command_of(folder: Path, command: list[str]) -> list[str]:
    """Return a command that runs another one under strace."""
    options = ["-f", "-qq", "-ttt", "-T", "-yy", "-s", "0", "-e", f"trace={_CALLS}"]
    return ["strace", *options, "-e", "signal=none", "-o", str(folder / _LOG), *command]


def read_log(folder: Path, *, perf_ns: int, time_ns: int) -> None:
    """Turn the log into rows; the two times are one moment on both clocks."""
    log = folder / _LOG
    if not log.exists():
        return
    ranks, own = _ranks(folder), f"<{folder}/"
    lines: dict[int, list[re.Match[str]]] = defaultdict(list)
    pending: dict[str, str] = {}
    with log.open(errors="replace") as file:
        for text in file:
            line = _whole(text.rstrip("\n"), pending)
            match = _LINE.match(line) if line else None
            if match and own not in line:  # What the hooks read of the trace is no data.
                lines[int(match["pid"])].append(match)
    for pid, matches in lines.items():
        recorder = Recorder(folder, role="native", rank=ranks.get(pid, 0))
        positions: dict[str, int] = {}
        for match in matches:
            _record(recorder, match, positions, perf_ns - time_ns)
        recorder.facts({"pid_traced": pid})
        recorder.close()
    log.unlink()


def _whole(line: str, pending: dict[str, str]) -> str:
    """Join the two lines of a call that was interrupted; "" until the second one comes."""
    if unfinished := _UNFINISHED.match(line):
        pending[unfinished["pid"]] = unfinished["head"]
        return ""
    if resumed := _RESUMED.match(line):
        return f"{resumed['pid']} {pending.pop(resumed['pid'], '')}{resumed['tail']}"
    return line


def _ranks(folder: Path) -> dict[int, int]:
    """Return the rank of each process that recorded in Python: strace does not know ranks."""
    out = {}
    for path in folder.glob("*.trace"):
        rank, _, pid, *_ = path.stem.split("-")
        out[int(pid)] = int(rank)
    return out


def _record(
    recorder: Recorder, match: re.Match[str], positions: dict[str, int], shift_ns: int
) -> None:
    seconds, _, fraction = match["time"].partition(".")
    start_ns = int(seconds) * 10**9 + int(fraction.ljust(9, "0")) + shift_ns
    end_ns = start_ns + int(float(match["took"]) * 1e9)
    call, arguments, result = match["call"], match["arguments"], int(match["result"], 0)
    if call in ("open", "openat"):
        name = match["opened"] or ""
        if result >= 0 and name.startswith("/") and not _NOISE.search(name):
            positions[f"{result}<{name}>"] = 0
            recorder.span(
                Kind.OPEN, start_ns, end_ns,
                object_id=recorder.name(name), flags=Flag.NATIVE, count=1,
            )  # fmt: skip
        return
    handle = _FILE.match(arguments)
    if call == "mmap":
        _record_map(recorder, arguments, start_ns, end_ns)
    elif handle and call in _READS and result > 0:
        name = handle["name"]
        if name.startswith(("TCP", "TCPv6")):
            peer = f"tcp://{name.rpartition('->')[2].rstrip(']')}"
            recorder.span(
                Kind.READ, start_ns, end_ns, object_id=recorder.name(peer), size_bytes=result,
                flags=Flag.NATIVE | Flag.SOCKET, count=1,
            )  # fmt: skip
        elif name.startswith("/") and not _NOISE.search(name):
            key = handle[0]
            if call.startswith("pread"):
                offset = _offset(arguments)
            else:
                offset = positions.get(key, -1)
                if key in positions:
                    positions[key] += result
            recorder.span(
                Kind.READ, start_ns, end_ns, object_id=recorder.name(name), offset=offset,
                size_bytes=result, flags=Flag.NATIVE, count=1,
            )  # fmt: skip


def _offset(arguments: str) -> int:
    words = arguments.split(", ")
    last = next((word for word in reversed(words) if word.isdecimal()), "-1")
    return int(last)


def _record_map(recorder: Recorder, arguments: str, start_ns: int, end_ns: int) -> None:
    found = re.search(
        r", (\d+), (PROT_[A-Z_|]+), [^,]*, \d+<([^>]*)>, (0x[0-9a-f]+|\d+)$", arguments
    )
    if found and "EXEC" not in found[2] and not _NOISE.search(found[3]):
        recorder.span(
            Kind.MAP, start_ns, end_ns, object_id=recorder.name(found[3]),
            size_bytes=int(found[1]), offset=int(found[4], 0), flags=Flag.NATIVE, count=1,
        )  # fmt: skip
