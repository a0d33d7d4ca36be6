"""What the kernel says of a process and of its machine: counters, and facts that do not change.

Functions that read and return, nothing else. What cannot be read (another user's process, another
kernel, no such device) is left out of the answer, never guessed.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SECTOR_BYTES = 512
_TEXT_BYTES_MAX = 1 << 20
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
"""Devices that stand for others, or for memory."""
_NO_LINKS = ("lo", "docker", "veth", "br-", "virbr")


def process_counters(pid: int) -> dict[str, float]:
    """Return the counters of a process so far; empty if there is none."""
    folder = _PROC / str(pid)
    words = _text(folder / "stat").rpartition(")")[2].split()
    if not words:
        return {}
    out = {
        "cpu.user_s": int(words[11]) * _TICK_S,
        "cpu.system_s": int(words[12]) * _TICK_S,
        "faults.major": float(words[9]),
        "threads": float(words[17]),
    }
    delay_ns = 0
    with suppress(OSError):
        for thread in os.listdir(folder / "task"):  # noqa: PTH208 - names are enough.
            fields = _text(f"{folder}/task/{thread}/schedstat").split()
            delay_ns += int(fields[1]) if len(fields) > 1 else 0
        out["cpu.delay_s"] = delay_ns / 1e9
    memory = _text(folder / "statm").split()
    if len(memory) > 2:
        out["memory.rss_bytes"] = int(memory[1]) * _PAGE_BYTES
        out["memory.shared_bytes"] = int(memory[2]) * _PAGE_BYTES
    io = _table(folder / "io")
    if "rchar" in io:
        out["io.rchar"], out["io.read_bytes"] = io["rchar"], io["read_bytes"]
    return out


class NodeCounters:
    """Counters of the machine; remembers the last ones where a share of time is wanted."""

    def __init__(self) -> None:
        self._cpu = _cpu_times()

    def read(self) -> dict[str, float]:
        """Return the counters as they are now; shares are of the time since the last call."""
        before, self._cpu = self._cpu, _cpu_times()
        out = {"node.cores": float(os.cpu_count() or 1), **_shares(before, self._cpu)}
        for resource in ("cpu", "io", "memory"):
            pressure = _pressure(resource)
            if pressure is not None:
                out[f"node.psi_{resource}"] = pressure
        memory = _table(_PROC / "meminfo", scale=1024)
        if memory:
            out["node.page_cache_bytes"] = memory.get("Cached", 0) + memory.get("Buffers", 0)
            out["node.memory_free_bytes"] = memory.get("MemAvailable", 0)
        return out | _disks() | _links() | _gpus()


def system_facts(path: str | Path | None = None) -> dict[str, Any]:
    """Return what a process has to work with; `path` is where its data lies, if in files."""
    facts: dict[str, Any] = {
        "cores": usable_cores(),
        "memory_bytes": usable_memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "hostname": socket.gethostname(),
    }
    if path is not None and (found := filesystem_of(path)):
        facts["filesystem"] = found
    if (gpu := _gpu_name()) is not None:
        facts["gpu"] = gpu
    return facts


def usable_cores() -> float:
    """Return the cores that this process may use: by its affinity, and by the cgroup's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            cores = min(cores, int(quota) / int(period))
    return cores


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: of the machine, or of its cgroup."""
    memory = _table(_PROC / "meminfo", scale=1024).get("MemTotal", 0)
    limits = [_text(folder / "memory.max").strip() for folder in _cgroups()]
    known = [int(limit) for limit in limits if limit.isdecimal()]
    return int(min([memory, *known]))


def filesystem_of(path: str | Path) -> dict[str, Any]:
    """Return the file system that a path lies on; empty where that cannot be found out."""
    real, best = os.path.realpath(path), ("", "", "")
    for line in _text(_PROC / "self/mounts").splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        is_inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if is_inside and len(mount) >= len(best[0]):
            best = mount, kind, device
    if not best[0]:
        return {}
    facts: dict[str, Any] = {"mount": best[0], "type": best[1], "device": best[2]}
    disk = Path("/sys/class/block") / Path(os.path.realpath(best[2])).name
    for folder in (disk, disk.resolve().parent):
        spins = _text(folder / "queue/rotational").strip()
        if spins:
            facts["rotational"] = spins == "1"
            break
    return facts


def _cgroups() -> list[Path]:
    """Return the folders of this process's cgroup and of those around it (version 2)."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        if line.startswith("0::"):
            inner = _CGROUP / line[3:].strip("/")
            return [p for p in (inner, *inner.parents) if p.is_relative_to(_CGROUP)]
    return []


def _cpu_times() -> tuple[int, int, int]:
    """Return ticks of all cores: busy, stolen by other machines, all."""
    first = _text(_PROC / "stat").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in first[:8]]
    if len(ticks) < 8:
        return 0, 0, 0
    return sum(ticks) - ticks[3] - ticks[4], ticks[7], sum(ticks)


def _shares(before: tuple[int, int, int], now: tuple[int, int, int]) -> dict[str, float]:
    total = now[2] - before[2]
    if total <= 0:
        return {}
    return {
        "node.cpu_busy": (now[0] - before[0]) / total,
        "node.cpu_steal": (now[1] - before[1]) / total,
    }


def _pressure(resource: str) -> float | None:
    """Return the percentage of the last ten seconds in which a task waited for a resource."""
    for word in _text(_PROC / "pressure" / resource).split():
        if word.startswith("avg10="):
            return float(word[6:])
    return None


def _disks() -> dict[str, float]:
    """Return bytes of whole disks, and the seconds that the busiest was busy."""
    read = written = busy_ms = 0
    found = False
    for line in _text(_PROC / "diskstats").splitlines():
        words = line.split()
        if len(words) < 13 or words[2].startswith(_NO_DISKS):
            continue
        if not os.path.exists(f"/sys/block/{words[2]}"):  # noqa: PTH110
            continue  # A part of a disk that is counted.
        found = True
        read += int(words[5]) * _SECTOR_BYTES
        written += int(words[9]) * _SECTOR_BYTES
        busy_ms = max(busy_ms, int(words[12]))
    if not found:
        return {}
    return {
        "node.disk_read_bytes": float(read),
        "node.disk_write_bytes": float(written),
        "node.disk_busy_s": busy_ms / 1e3,
    }


def _links() -> dict[str, float]:
    received = sent = 0
    for line in _text(_PROC / "net/dev").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        words = numbers.split()
        if len(words) > 8 and not name.strip().startswith(_NO_LINKS):
            received, sent = received + int(words[0]), sent + int(words[8])
    return {"node.net_rx_bytes": float(received), "node.net_tx_bytes": float(sent)}


def _gpus() -> dict[str, float]:
    """Return the mean load and the used memory of all devices, where NVML is installed."""
    nvml = _nvml()
    if nvml is None:
        return {}
    with suppress(Exception):  # Of a library that this project does not depend on.
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        loads = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        used = [float(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
        if loads:
            return {"gpu.busy": sum(loads) / len(loads), "gpu.memory_bytes": sum(used)}
    return {}


def _gpu_name() -> str | None:
    nvml = _nvml()
    if nvml is None:
        return None
    with suppress(Exception):
        count = nvml.nvmlDeviceGetCount()
        name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
        return f"{count} x {name if isinstance(name, str) else name.decode()}"
    return None


_NVML: list[Any] = []
"""The library, once it was looked for; None if it is not there or finds no device."""


def _nvml() -> Any:
    if not _NVML:
        found: Any = None
        with suppress(Exception):  # Not installed, no driver, no device.
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            found = library
        _NVML.append(found)
    return _NVML[0]


def _text(path: str | Path) -> str:
    """Return a file of the kernel's; without Python's file objects, which take as long again."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, _TEXT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _table(path: Path, scale: int = 1) -> dict[str, float]:
    """Return the numbers of a file with a name, a colon and a number in each line."""
    out = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            out[name] = float(int(words[0]) * scale)
    return out
