"""`penstock node`: the real command, its errors, and the files that deploy it."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import COMMAND

from penstock.cli.node import configure
from penstock.cli.parser import Parser
from penstock.engine.node.options import options_of
from penstock.engine.peers.local import LocalNode

Run = Callable[..., subprocess.CompletedProcess[str]]
Begin = Callable[..., subprocess.Popen[str]]
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@pytest.fixture
def begin(environment: dict[str, str], tmp_path: Path) -> Iterator[Begin]:
    """Give a function that starts the command with a small disk and ports of its own."""
    started = []

    def start(*words: str, **more: str) -> subprocess.Popen[str]:
        fixed = ["--disk", f"{tmp_path}:2MB", "--listen", "127.0.0.1:0", "--http", "none"]
        process = subprocess.Popen(
            [*COMMAND, "node", "--socket", str(tmp_path / "s"), *fixed, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | more,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    shown = ""
    while text not in shown:
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else shown
        shown += line
    return shown


def test_it_says_what_it_has_tells_systemd_and_ends_on_a_signal(
    begin: Begin, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        process = begin(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(200).startswith(b"READY=1\n")
        shown = until(process, "http")
        assert f"0 B of 2 MB in {tmp_path}/penstock-node" in shown
        node = LocalNode.connect(str(tmp_path / "s"))
        assert node is not None
        node.close()
        process.send_signal(signal.SIGINT)
        assert systemd.recv(200).startswith(b"STOPPING=1\n")
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--disk", "/nowhere/at/all:1GB"], "/nowhere/at/all.*make the folder"),
        (["--listen", "203.0.113.7:1"], "no peer server at 203.0.113.7:1"),
    ],
)
def test_what_cannot_be_had_is_one_line(begin: Begin, words: list[str], hint: str) -> None:
    process = begin(*words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("penstock: error: "), errors
    assert errors.count("\n") == 1, errors
    assert re.search(hint, errors), errors


def parsed(words: list[str]) -> None:
    """Read words as the verb does; a flag that is none ends the test."""
    parser = Parser(prog="penstock node", add_help=False)
    configure(parser)
    given = vars(parser.parse_args(words))
    options = options_of({name.replace("_", "-"): value for name, value in given.items()}, {})
    assert options.wishes


def test_the_systemd_unit_is_sound_and_its_flags_are_ours(tmp_path: Path) -> None:
    unit = (DEPLOY / "penstock-node.service").read_text()
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    program, verb, *words = shlex.split(start.partition("=")[2])
    assert (Path(program).name, verb) == ("penstock", "node")
    parsed([*words, "--socket", "/s"])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "penstock-node.service").write_text(unit.replace(program, "/bin/true"))
    shutil.copy(DEPLOY / "mnt-penstock.mount", tmp_path)
    names = [str(path) for path in tmp_path.iterdir() if path.suffix in (".service", ".mount")]
    command = ["systemd-analyze", "verify", *names]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_the_kubernetes_example_is_sound_and_its_flags_are_ours() -> None:
    yaml = pytest.importorskip("yaml")
    daemons, pod = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = daemons["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["penstock", "node"]
    words = [word.replace("$(HOST_IP)", "10.0.0.1") for word in container["args"]]
    parsed([*words, "--socket", "/s"])
    ports = {port["name"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports
    assert {probe["httpGet"]["path"] for probe in probes} == {"/healthz", "/metrics"}
    # A job finds tiers and socket where the service has them.
    assert mounted(pod["spec"], "train").items() <= mounted(spec, "penstock").items()


def mounted(spec: dict[str, Any], name: str) -> dict[str, str]:
    """Return which folder of the host is where in a container."""
    (container,) = [each for each in spec["containers"] if each["name"] == name]
    paths = {
        each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each
    }
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(paths) <= set(mounts)
    return {mounts[volume]: path for volume, path in paths.items()}
