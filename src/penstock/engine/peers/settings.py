"""Settings of this host for peers: the table [peers] of penstock.toml, and variables.

    [peers]
    interface = "ib0"               # or "10.0.0.0/8", or several of them: "ib0, eth0"
    tls_cert = "/etc/penstock/node.pem"
    tls_key = "/etc/penstock/node.key"
    tls_ca = "/etc/penstock/ca.pem"

The file is $PENSTOCK_CONFIG, else ./penstock.toml, else /etc/penstock/penstock.toml. A variable
(PENSTOCK_INTERFACE, PENSTOCK_TLS_CERT, PENSTOCK_TLS_KEY, PENSTOCK_TLS_CA) wins over it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import OptionError

_PATHS = ("penstock.toml", "/etc/penstock/penstock.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How others reach this host; an empty text is not set."""

    interface: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


def peer_settings(environment: Mapping[str, str] | None = None) -> PeerSettings:
    """Return the settings of this host."""
    environment = os.environ if environment is None else environment
    table, path = config_table("peers", environment)
    values = _checked(table, path)
    for field in fields(PeerSettings):
        set_here = environment.get(f"PENSTOCK_{field.name.upper()}")
        if set_here:
            values[field.name] = set_here
    return PeerSettings(**values)


def config_table(name: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return a table of the first penstock.toml that exists, and the path of that file."""
    named = environment.get("PENSTOCK_CONFIG")
    for path in [named] if named else _PATHS:
        try:
            table = tomllib.loads(Path(path).read_text()).get(name, {})
        except FileNotFoundError:
            if named:
                raise OptionError(f"PENSTOCK_CONFIG names {named}, which is not there") from None
            continue
        except (OSError, ValueError) as error:
            raise OptionError(f"{path} cannot be read: {error}") from error
        if not isinstance(table, dict):
            raise OptionError(
                f"[{name}] in {path} must be a table: a line [{name}] with its options below"
            )
        return table, path
    return {}, ""


def _checked(table: dict[str, Any], path: str) -> dict[str, str]:
    known = [field.name for field in fields(PeerSettings)]
    for name, value in table.items():
        if name not in known:
            raise OptionError(f"[peers] in {path} has {name!r}; it may have {', '.join(known)}")
        if not isinstance(value, str):
            raise OptionError(f"{name} of [peers] in {path} must be text, got {value!r}")
    return dict(table)
