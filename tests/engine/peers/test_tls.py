"""Peers that speak TLS, with certificates made by the openssl command."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from testkit.waiting import wait_until
from tests.engine.peers.test_server import Endless
from tests.engine.peers.transport_kit import Waiting, client, node
from tests.storage.conftest import fill

from penstock.engine.peers.base import Ask
from penstock.engine.peers.settings import PeerSettings
from penstock.engine.peers.tls import client_context, server_context
from penstock.errors import OptionError

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="NOT TESTED: TLS needs the openssl command"
)


def openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


def authority(folder: Path) -> PeerSettings:
    """Make an authority and one certificate of it."""
    folder.mkdir()
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        *("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority"),
        cwd=folder,
    )
    openssl("req", *key, "-keyout", "key", "-out", "csr", "-subj", "/CN=node", cwd=folder)
    openssl(
        *("x509", "-req", "-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "cert.pem"),
        cwd=folder,
    )
    return PeerSettings(
        tls_cert=str(folder / "cert.pem"),
        tls_key=str(folder / "key"),
        tls_ca=str(folder / "ca.pem"),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> PeerSettings:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PeerSettings:
    return authority(tmp_path_factory.mktemp("tls") / "theirs")


def test_all_of_it_works_inside_tls(tmp_path: Path, ours: PeerSettings) -> None:
    with (
        node(tmp_path, filled=False, tls=server_context(ours)) as a,
        client(tls=client_context(ours)) as c,
    ):
        waiting = Waiting(c, a.address, list(range(60)), wait_s=600)
        assert waiting.is_parked.wait(20)
        fill(a.tiers)
        assert waiting.is_right()
        asks = [Waiting(c, a.address, [u, (u + 1) % 60]) for u in range(60)]
        assert all(ask.is_right() for ask in asks)
        assert c.status("node-a", [a.address], 20)["fill"] == 0.5
        assert a.server.counts()["accepted"] == 1


def test_large_answers_fit_through_tls(tmp_path: Path, ours: PeerSettings) -> None:
    with (
        node(tmp_path, tls=server_context(ours)) as a,
        client(tls=client_context(ours)) as c,
    ):
        shelf = Endless(tmp_path / "endless")
        (tmp_path / "endless").write_bytes(np.random.default_rng(1).bytes(20 * 2**20))
        a.shelves.add(shelf)
        size = 20 * 2**20
        into = bytearray(size)
        done: list[object] = []
        ask = Ask(shelf=shelf.name, ranges=np.array([[0, 0, size, 0, size]], np.int64))
        c.ask(
            "node-a",
            [a.address],
            ask,
            memoryview(into),
            parked=lambda: None,
            done=done.append,
        )
        wait_until(lambda: bool(done))
        assert into == (tmp_path / "endless").read_bytes()


def test_certificates_of_another_authority_are_refused_by_both(
    tmp_path: Path, ours: PeerSettings, theirs: PeerSettings
) -> None:
    with node(tmp_path, tls=server_context(ours)) as a:
        with client(tls=client_context(theirs)) as c:
            assert Waiting(c, a.address, [5]).error().kind == "refused"
        # One that trusts us but that we do not trust.
        mixed = PeerSettings(tls_cert=theirs.tls_cert, tls_key=theirs.tls_key, tls_ca=ours.tls_ca)
        with client(tls=client_context(mixed)) as c:
            assert Waiting(c, a.address, [5]).error().kind in ("refused", "lost")
        assert a.server.counts()["requests"] == 0
        with client(tls=client_context(ours)) as c:
            assert Waiting(c, a.address, [5]).is_right()


def test_plain_and_tls_do_not_mix_and_do_not_hang(tmp_path: Path, ours: PeerSettings) -> None:
    with node(tmp_path, tls=server_context(ours)) as a:
        with client() as c:
            assert Waiting(c, a.address, [5]).error().kind in ("lost", "broken")
        with socket.create_connection((a.address.host, a.address.port), timeout=20) as sock:
            sock.sendall(b"garbage that is no TLS" * 10)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    with node(tmp_path) as plain, client(tls=client_context(ours)) as c:
        assert Waiting(c, plain.address, [5]).error().kind in ("lost", "refused")


def test_half_of_the_settings_is_an_error_that_names_the_rest(ours: PeerSettings) -> None:
    assert server_context(PeerSettings()) is None
    with pytest.raises(OptionError, match="tls_key, tls_ca is not set"):
        server_context(PeerSettings(tls_cert=ours.tls_cert))
    with pytest.raises(OptionError, match="nowhere"):
        client_context(PeerSettings(tls_cert="nowhere", tls_key="nowhere", tls_ca="nowhere"))
