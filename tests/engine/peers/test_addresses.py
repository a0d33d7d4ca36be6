"""Addresses of this host, and which of them are told to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.peers import addresses
from penstock.engine.peers.addresses import (
    InterfaceAddress,
    addresses_here,
    chosen_addresses,
    interface_addresses,
)
from penstock.engine.peers.base import Address
from penstock.engine.peers.settings import PeerSettings, peer_settings
from penstock.errors import OptionError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CONFIG", "INTERFACE", "TLS_CERT", "TLS_KEY", "TLS_CA"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


def pretend(monkeypatch: pytest.MonkeyPatch, *there: tuple[str, str]) -> None:
    made = [
        InterfaceAddress(interface=name, host=host, is_loopback=name == "lo")
        for name, host in there
    ]
    monkeypatch.setattr(addresses, "interface_addresses", lambda: made)


def hosts(wish: str | None = None) -> list[str]:
    return [each.host for each in chosen_addresses(wish)]


def test_the_system_knows_its_loopback() -> None:
    there = {(each.interface, each.host): each for each in interface_addresses()}
    assert there["lo", "127.0.0.1"].is_loopback
    assert ("lo", "::1") in there or not Path("/proc/net/if_inet6").read_text()
    assert Address(host="127.0.0.1", port=7) in addresses_here(7, "lo")
    assert addresses_here(7, "127.0.0.0/8") == (Address(host="127.0.0.1", port=7),)


def test_loopback_is_given_only_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lo = [("lo", "127.0.0.1"), ("lo", "::1")]
    pretend(monkeypatch, *lo)
    assert hosts() == ["127.0.0.1", "::1"]
    pretend(monkeypatch, *lo, ("eth0", "fe80::1%eth0"))
    assert hosts() == ["fe80::1%eth0"]
    pretend(monkeypatch, *lo, ("eth0", "fe80::1%eth0"), ("eth0", "fd00::2"), ("ib0", "10.0.0.1"))
    assert set(hosts()) == {"fd00::2", "10.0.0.1"}


def test_interfaces_and_networks_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, ("lo", "127.0.0.1"), ("eth0", "192.0.2.1"), ("ib0", "10.0.0.1"))
    assert hosts("ib0") == ["10.0.0.1"]
    assert hosts("192.0.2.0/24") == ["192.0.2.1"]
    assert hosts("lo") == ["127.0.0.1"]
    assert hosts("eth0, 10.0.0.0/8") == ["192.0.2.1", "10.0.0.1"]
    (tmp_path / "penstock.toml").write_text('[peers]\ninterface = "ib0"\n')
    assert hosts() == ["10.0.0.1"]
    monkeypatch.setenv("PENSTOCK_INTERFACE", "eth0")
    assert hosts() == ["192.0.2.1"]


def test_a_choice_that_is_not_there_names_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("eth0", "192.0.2.1"))
    with pytest.raises(OptionError, match=r"'ib7'.*eth0 \(192\.0\.2\.1\)"):
        hosts("ib7")
    with pytest.raises(OptionError, match=r"10\.0\.0\.0/8"):
        hosts("10.0.0.0/8")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[peers]\ninterfaces = "ib0"', "interfaces"),
        ("[peers]\ninterface = 3", "must be text"),
        ("peers = 3", "must be a table"),
        ("[peers", "cannot be read"),
    ],
)
def test_settings_that_make_no_sense_are_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "penstock.toml").write_text(text)
    with pytest.raises(OptionError, match=fault):
        peer_settings()


def test_a_named_file_must_be_there_and_others_need_not(tmp_path: Path) -> None:
    assert peer_settings({}) == PeerSettings()
    with pytest.raises(OptionError, match="is not there"):
        peer_settings({"PENSTOCK_CONFIG": str(tmp_path / "nowhere.toml")})
    (tmp_path / "other.toml").write_text('[peers]\ntls_ca = "ca.pem"\n[node]\nx = 1\n')
    found = peer_settings({"PENSTOCK_CONFIG": str(tmp_path / "other.toml")})
    assert found == PeerSettings(tls_ca="ca.pem")
