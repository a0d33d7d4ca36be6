"""What a process and all its descendants cost: CPU seconds and memory, as the kernel counts them.

Worker processes hide their cost from `time.process_time`, so the whole tree is added up.
"""

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PPID, UTIME, CHILDREN_STIME = 1, 11, 14  # fields of /proc/PID/stat behind the command's name


def stat_of(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:  # gone in the meantime
        return None


def descendants() -> list[int]:
    """Return the processes below this one."""
    parent = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := stat_of(int(entry.name))):
            parent[int(entry.name)] = int(stat[PPID])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, its_parent in parent.items() if its_parent == pid]
    return found[1:]


def cpu_s(children: list[int]) -> float:
    """Return the CPU seconds of this process, and of others to the tick of 10 ms."""
    ticks = 0
    for pid in children:
        if stat := stat_of(pid):
            ticks += sum(map(int, stat[UTIME : CHILDREN_STIME + 1]))
    return time.process_time() + ticks / TICKS_PER_S


def machine_s() -> float:
    """Return the CPU seconds that all cores have worked, or were kept from us by a hypervisor."""
    user, nice, system, _, _, *rest = Path("/proc/stat").read_text().split(maxsplit=11)[1:9]
    return sum(map(int, (user, nice, system, *rest))) / TICKS_PER_S


def lies_in_file(address: int) -> bool:
    """Tell whether memory is a mapped file: then nothing has been loaded so far, only promised."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            # Shared memory has the name of a file, too, and no disk behind it.
            is_memory = bool(path) and path[0].startswith(("/dev/", "/memfd:"))
            return bool(path) and path[0].startswith("/") and not is_memory
    return False


def memory_bytes(children: list[int]) -> dict[str, int]:
    """Return the peak of resident memory, and the memory that is no file's, now.

    The peak counts pages that processes share once for each, since the kernel keeps it per process;
    the other counts them once, so batches in shared memory are not counted again by their readers.
    """
    peak, private = 0, 0
    for pid in [os.getpid(), *children]:
        peak += kib_of(pid, "status").get("VmHWM", 0) * 1024
        shares = kib_of(pid, "smaps_rollup")
        private += (shares.get("Pss_Anon", 0) + shares.get("Pss_Shmem", 0)) * 1024
    return {"peak_rss_bytes": peak, "private_bytes": private}


def kib_of(pid: int, name: str) -> dict[str, int]:
    """Return the sizes in a file of /proc/PID; none of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
