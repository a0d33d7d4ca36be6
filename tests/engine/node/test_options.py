"""Flags, file, and what is said when they make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.node.options import config_here, options_of
from penstock.engine.peers.addresses import addresses_here
from penstock.errors import OptionError
from penstock.storage.tier_sizes import Disk, Memory

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[node]\nmemory = "1GB"\ndisk = ["/a:1TB", "/b:2TB"]\nlimit-user = "5GB"\n')
    config, path = config_here({"PENSTOCK_CONFIG": str(file)})
    assert path == str(file)
    options = options_of({"memory": "2GB", "disk": [], "socket": "/s", "listen": None}, config)
    assert options.wishes == (Memory("2GB"), Disk("/a", "1TB"), Disk("/b", "2TB"))
    assert options.limits.owner_bytes == 5 * 10**9
    assert options.listen == addresses_here(7410)


def test_memory_may_lie_in_another_folder() -> None:
    options = options_of({"memory": "/run/memory:1GB", "socket": "/s", "http": "none"}, {})
    assert options.wishes == (Memory("1GB", folder="/run/memory"),)
    assert options.http is None


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, "needs something to keep data in"),
        ({"disk": ["/nvme"]}, "has no size"),
        ({"memory": "1GB", "listen": "here"}, "is not an address"),
        ({"memory": "1GB", "share": "friends"}, "none of user, group, all"),
        ({"memory": "1GB", "socket": "/" + 120 * "x"}, "has 121 bytes, and the system takes 107"),
        ({"memory": "lots"}, "has no size"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(given: dict[str, str], hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        options_of({"socket": "/s", **given}, {})


def test_a_word_in_the_file_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[node]\nmemmory = "1GB"\n')
    with pytest.raises(OptionError, match=r"no option 'memmory'; did you mean 'memory'\?"):
        config_here({"PENSTOCK_CONFIG": str(file)})
    with pytest.raises(OptionError, match="which is not there"):
        config_here({"PENSTOCK_CONFIG": str(tmp_path / "nowhere.toml")})


def test_the_example_file_is_understood() -> None:
    config, _ = config_here({"PENSTOCK_CONFIG": str(DEPLOY / "penstock.toml")})
    options = options_of({}, {**config, "socket": "/s"})
    assert [wish.kind for wish in options.wishes] == ["memory", "disk"]
