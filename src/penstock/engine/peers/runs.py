"""Names that tell runs apart, and marks that tell processes with the same number apart.

The name of a run separates jobs that meet at one rendezvous at the same time. It cannot separate a
run from its own restarts: if torchrun restarts its workers because one has failed, the agents of
the other nodes do not count that as a restart, so there is no restart number that all share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from penstock.storage.process_wait import process_fields

_NAME_MAX = 80


def run_name(environment: Mapping[str, str] | None = None) -> str:
    """Return the name that all processes of a run give it.

    >>> run_name({"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"})
    'slurm-71-0-0'
    >>> run_name({"TORCHELASTIC_RUN_ID": "resnet", "SLURM_JOB_ID": "71"})
    'torch-resnet'
    """
    env = os.environ if environment is None else environment
    address = f"{env.get('MASTER_ADDR', '')}-{env.get('MASTER_PORT', '')}".strip("-")
    torch_run = env.get("TORCHELASTIC_RUN_ID")
    if torch_run is not None:
        # torchrun says "none" if the user gave no name.
        return _plain(f"torch-{address if torch_run in ('', 'none') else torch_run}")
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        restarts = env.get("SLURM_RESTART_COUNT", "0")
        return _plain(f"slurm-{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}-{restarts}")
    mpi_run = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if mpi_run:
        return _plain(f"mpi-{mpi_run}")
    return _plain(f"at-{address}") if address else "run"


def is_once(name: str) -> bool:
    """Return whether processes that use this name belong to one start of the job.

    Slurm never restarts a single step; all others may start new processes under an old name.
    """
    return name.startswith("slurm-")


def _plain(name: str) -> str:
    """Return a name that can be part of a key; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_NAME_MAX]
    return plain if plain == name else f"{plain}-{crc32(name.encode()):08x}"


def process_mark() -> str:
    """Return a mark that no other process ever has: boot, PID namespace, number, start time."""
    started = started_at(os.getpid())
    assert started is not None
    return f"{_space()}|{os.getpid()}/{started}"


def is_running(mark: str) -> bool:
    """Return whether the process of a mark is alive in this PID namespace."""
    space, _, process = mark.rpartition("|")
    pid, _, started = process.partition("/")
    return space == _space() and pid.isdecimal() and started_at(int(pid)) == started


def is_in_sight(mark: str) -> bool:
    """Return whether the process of a mark would be visible in this PID namespace."""
    return mark.rpartition("|")[0] == _space()


def is_of_this_boot(mark: str) -> bool:
    """Return whether the process of a mark was started by the kernel that runs here now."""
    return mark.partition("/")[0] == _boot()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _space() -> str:
    return f"{_boot()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def started_at(pid: int) -> str | None:
    """Return when a process was started, in ticks since the boot; None if it is dead."""
    fields = process_fields(pid)
    return None if not fields or fields[0] in ("Z", "X") else fields[19]
