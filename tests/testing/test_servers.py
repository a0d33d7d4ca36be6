from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import NotFoundError
from penstock.storage import RemoteStore
from penstock.testing.forks import HANG_S
from penstock.testing.ports import free_ports
from penstock.testing.servers import S3Access

_SCRIPT = """
import signal
from penstock.testing.servers import SeaweedServer
server = SeaweedServer()
access = server.__enter__()
print(server._process.pid, server._folder, access.endpoint, flush=True)
signal.pause()
"""


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_server(end: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    pid, folder, _ = owner.stdout.readline().split()
    owner.stdout.close()
    assert _is_running(int(pid))
    owner.send_signal(end)
    owner.wait()
    deadline_s = time.monotonic() + HANG_S
    while _is_running(int(pid)):
        assert time.monotonic() < deadline_s, "the server outlived its owner"
        time.sleep(0.01)
    if end == signal.SIGINT:
        assert not Path(folder).exists()
    else:
        shutil.rmtree(folder)  # what nobody could remove


def test_buckets_are_made_and_may_be_made_again(s3_server: S3Access) -> None:
    uri = s3_server.create_bucket("twice")
    assert s3_server.create_bucket("twice") == uri == "s3://twice/"
    store = RemoteStore(uri, s3_server.options)
    assert list(store.list()) == []
    with pytest.raises(NotFoundError):
        list(RemoteStore("s3://never-made", s3_server.options).list())


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(50))) == 50
