"""A job on the hosts of a network: the same program on each, started by torchrun or by hand.

    with NetworkJob(network.hosts, [sys.executable, "train.py"], folder=logs) as job:
        job.wait(timeout_s=60)

By hand every rank is one process with the variables that torchrun would set, and a second less of
start. By torchrun there is an agent on each host; the first host keeps the rendezvous.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.testing.servers import ServerError
from testkit.network_host import Host

_PORT = 29_400
_POLL_S = 0.02
_LOG_CHARS = 8000
_PATIENCE = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""A second for latecomers, three for one that has fallen silent: torchrun's own are 30 and 15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a job is started."""

    by: Literal["hand", "torchrun"] = "torchrun"
    ranks_per_host: int = 1
    hosts_min: int | None = None
    """With torchrun, go on with so few hosts when others are lost; None needs all of them."""
    restarts: int = 0
    """With torchrun, how often all ranks may begin anew."""
    env: Mapping[str, str] = field(default_factory=dict)
    private_shm: str | None = None
    """A size: each host has a /dev/shm of its own."""


class NetworkJob:
    """A program on some hosts, from `with` to the end of its block."""

    def __init__(
        self,
        hosts: Sequence[Host],
        command: Sequence[str],
        *,
        folder: Path,
        launch: Launch | None = None,
    ) -> None:
        """Say where to run what; what it prints goes to a file for each process in `folder`."""
        self.hosts = list(hosts)
        self._command = list(command)
        self._folder = folder
        self._launch = launch or Launch()
        self.processes: dict[str, list[subprocess.Popen[Any]]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, host in enumerate(self.hosts):
                self.start(host, number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, host: Host, number: int) -> None:
        """Start the program on a host; again on one that was lost."""
        launch = self._launch
        commands: list[tuple[list[str], dict[str, str]]]
        if launch.by == "torchrun":
            commands = [(self._agent(host), {})]
        else:
            every = range(launch.ranks_per_host)
            commands = [(self._command, self._variables(number, local)) for local in every]
        self.processes[host.name] = []
        for local, (command, variables) in enumerate(commands):
            with (self._folder / f"{host.name}-{local}.log").open("ab") as log:
                process = host.popen(
                    command,
                    # Gloo would look for the interface by the host's name.
                    env={"GLOO_SOCKET_IFNAME": "eth0", **launch.env, **variables},
                    private_shm=launch.private_shm,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes[host.name].append(process)

    def _variables(self, number: int, local: int) -> dict[str, str]:
        per_host = self._launch.ranks_per_host
        return {
            "RANK": str(number * per_host + local),
            "WORLD_SIZE": str(len(self.hosts) * per_host),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(_PORT),
        }

    def _agent(self, host: Host) -> list[str]:
        launch, first = self._launch, self.hosts[0]
        num_hosts = str(len(self.hosts))
        if launch.hosts_min is not None:
            num_hosts = f"{launch.hosts_min}:{num_hosts}"
        script = self._command[1:] if self._command[0] == sys.executable else self._command
        return [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}",
            f"--nproc-per-node={launch.ranks_per_host}", f"--max-restarts={launch.restarts}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={first.literal}:{_PORT}", "--rdzv-id=job",
            f"--rdzv-conf=is_host={int(host is first)},{_PATIENCE}",
            f"--local-addr={host.address}", "--monitor-interval=0.1", *script,
        ]  # fmt: skip

    def wait(self, *, timeout_s: float, hosts: Sequence[Host] | None = None) -> None:
        """Wait until the program has ended well on these hosts, by default on all of them."""
        wanted = [p for host in hosts or self.hosts for p in self.processes[host.name]]
        deadline_s = time.monotonic() + timeout_s
        while any(process.returncode != 0 for process in wanted):
            if any(process.poll() for process in wanted) or time.monotonic() > deadline_s:
                codes = [process.poll() for process in wanted]
                raise ServerError(
                    f"the job did not end well within {timeout_s:g} s, exit codes {codes}:\n"
                    f"{self.logs()}"
                )
            time.sleep(_POLL_S)

    def logs(self) -> str:
        """Return the ends of what the processes have printed."""
        paths = sorted(self._folder.glob("*.log"))
        texts = {path.stem: path.read_text(errors="replace")[-_LOG_CHARS:] for path in paths}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def stop(self) -> None:
        """Kill what still runs on the job's hosts."""
        for host in self.hosts:
            for process in self.processes.pop(host.name, []):
                process.kill()
                process.wait()
            host.kill_programs()
