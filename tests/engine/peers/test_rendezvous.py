"""Places where nodes find each other."""

from __future__ import annotations

import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.engine.peers.rendezvous import Rendezvous, StoreRendezvous
from penstock.engine.peers.runs import is_in_sight, is_running, process_mark, run_name
from penstock.errors import RendezvousError
from penstock.storage import MemoryStore
from penstock.testing.faults import FaultPlan, FaultyStore

Make = Callable[[], Rendezvous]


@pytest.fixture(params=["folder", "memory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return what each process would do to get to one and the same place."""
    if request.param == "folder":
        return lambda: StoreRendezvous((tmp_path / "made when needed").as_uri().replace("%20", " "))
    if request.param == "memory":
        name = f"memory://{uuid.uuid4().hex}/"
        return lambda: StoreRendezvous(name)
    bucket = request.getfixturevalue("s3")
    return lambda: StoreRendezvous(f"{bucket.uri}/meet/", bucket.options)


def test_what_one_puts_another_gets(make: Make) -> None:
    mine, other = make(), make()
    assert other.try_get("run/a") is None
    mine.put("run/a", b"\x00one")
    assert other.get("run/a", timeout_s=10) == b"\x00one"
    other.put("run/a", b"two")
    assert mine.try_get("run/a") == b"two"


def test_of_many_that_put_once_all_get_the_value_of_one(make: Make) -> None:
    values = [f"value {number}".encode() for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda value: make().put_once("run/secret", value), values))
    assert len(set(seen)) == 1
    assert seen[0] in values
    assert make().try_get("run/secret") == seen[0]


def test_a_value_that_comes_late_is_waited_for(make: Make) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: make().get("run/late", timeout_s=60))
        make().put("run/other", b"")
        make().put("run/late", b"here")
        assert waiting.result() == b"here"


def test_a_value_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"run/never within 50 ms; start all nodes"):
        StoreRendezvous(tmp_path).get("run/never", timeout_s=0.05)


def test_secrets_lie_in_a_folder_of_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir(mode=0o777)
    StoreRendezvous(tmp_path / "meet").put("run/secret", b"hush")
    (own,) = (tmp_path / "meet").iterdir()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)
    with pytest.raises(RendezvousError, match="of this user alone"):
        StoreRendezvous(tmp_path / "meet").put("run/secret", b"hush")


def test_a_store_that_is_away_for_a_moment_is_looked_at_again() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    store.write("run/a", b"here")
    faulty = FaultyStore(store, FaultPlan(seed=3, unavailable=0.7))
    assert StoreRendezvous(faulty).get("run/a", timeout_s=60) == b"here"


# -- runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "run"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "at-n1-29500"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, "torch-n1-1"),
        ({"TORCHELASTIC_RUN_ID": "a/b"}, "torch-a_b-b4b55af7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "run"),  # A batch script, not srun.
        ({"PMIX_NAMESPACE": "prterun-n1-33@1"}, "mpi-prterun-n1-33_1-8c16de7e"),
    ],
)
def test_runs_have_names_that_all_their_processes_know(
    environment: dict[str, str], expected: str
) -> None:
    assert run_name(environment) == expected


def test_a_process_is_known_from_all_that_had_its_number_before() -> None:
    assert is_running(process_mark())
    code = (
        "from penstock.engine.peers.runs import process_mark as m; print(m(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        mark = other.stdout.readline().strip()
        assert is_running(mark)
        assert not is_running(mark + "0")  # The same number, started at another time.
        other.stdin.close()
    assert not is_running(mark)
    assert is_in_sight(mark)
    assert not is_in_sight("another-machine/1|1/1")
    assert not is_running("nonsense")
