"""What a host says about its peers: the table [peers] of penstock.toml, and variables.

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

from penstock.errors import OptionError

_PATHS = ("penstock.toml", "/etc/penstock/penstock.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How this host is reached by others; empty: nothing was said."""

    interface: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


def peer_settings(environment: Mapping[str, str] | None = None) -> PeerSettings:
    """Return what was set for this host."""
    environment = os.environ if environment is None else environment
    values = _table(environment.get("PENSTOCK_CONFIG"))
    for field in fields(PeerSettings):
        set_here = environment.get(f"PENSTOCK_{field.name.upper()}")
        if set_here:
            values[field.name] = set_here
    return PeerSettings(**values)


def _table(named: str | None) -> dict[str, str]:
    for path in [named] if named else _PATHS:
        try:
            table = tomllib.loads(Path(path).read_text()).get("peers", {})
        except FileNotFoundError:
            if named:
                raise OptionError(f"PENSTOCK_CONFIG names {named}, which is not there") from None
            continue
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise OptionError(f"{path} cannot be read: {error}") from None
        return _checked(table, path)
    return {}


def _checked(table: object, path: str) -> dict[str, str]:
    known = [field.name for field in fields(PeerSettings)]
    if not isinstance(table, dict):
        raise OptionError(f"[peers] in {path} must be a table with {', '.join(known)}")
    for name, value in table.items():
        if name not in known:
            raise OptionError(f"[peers] in {path} has {name!r}; it may have {', '.join(known)}")
        if not isinstance(value, str):
            raise OptionError(f"{name} of [peers] in {path} must be text, got {value!r}")
    return dict(table)
