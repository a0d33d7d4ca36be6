"""AWS credentials and settings, from the usual sources in their usual order.

First options, then the environment, then the files of the `aws` command. If none of them has keys,
the client uses its own chain (web identity, container, instance metadata). A profile that the
options name wins over the environment, since it is the more specific choice. `kind` names the
source for error messages and never holds a secret.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import OptionError
from penstock.storage.failures import ANONYMOUS
from penstock.storage.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """The settings of an S3 client."""

    kind: str
    """The source of the credentials, in words."""
    access_key: str | None = None
    """None: the client uses its own chain."""
    secret_key: str | None = field(default=None, repr=False)
    """The secret that belongs to it."""
    session_token: str | None = field(default=None, repr=False)
    """The third part of temporary credentials."""
    region: str = "us-east-1"
    """The region that requests are signed for."""
    endpoint: str | None = None
    """None: AWS itself."""


def aws_settings(options: StoreOptions, environment: Mapping[str, str]) -> AwsSettings:
    """Return the settings from options, environment and files."""
    name = options.profile or environment.get("AWS_PROFILE") or "default"
    profile = _profile(name, environment)
    if options.profile and not profile:
        raise OptionError(
            f"there is no profile {options.profile!r} in {_file('credentials', environment)} or "
            f"{_file('config', environment)}; check its name or run: aws configure"
        )
    kind, keys = _keys(options, environment, name, profile)
    region = (
        options.region
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or profile.get("region")
        or "us-east-1"
    )
    endpoint = (
        options.endpoint
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
        or profile.get("endpoint_url")
    )
    access_key, secret_key, session_token = keys
    return AwsSettings(
        kind=kind,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        region=region,
        endpoint=endpoint,
    )


_Keys = tuple[str | None, str | None, str | None]
_NO_KEYS: _Keys = (None, None, None)
_OTHER_CHAINS = {
    "AWS_WEB_IDENTITY_TOKEN_FILE": "the web identity token",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "the container's credentials",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "the container's credentials",
}


def _keys(
    options: StoreOptions, environment: Mapping[str, str], name: str, profile: Mapping[str, str]
) -> tuple[str, _Keys]:
    if options.anonymous:
        return ANONYMOUS, _NO_KEYS
    if options.access_key:
        given = (options.access_key, options.secret_key, options.session_token)
        return f"the access key {_shown(options.access_key)} of the options", given
    key_id = environment.get("AWS_ACCESS_KEY_ID")
    if key_id and not options.profile:
        token = environment.get("AWS_SESSION_TOKEN")
        keys = (key_id, environment.get("AWS_SECRET_ACCESS_KEY"), token)
        return f"AWS_ACCESS_KEY_ID {_shown(key_id)} of the environment", keys
    if "aws_access_key_id" in profile:
        key_id = profile["aws_access_key_id"]
        keys = (key_id, profile.get("aws_secret_access_key"), profile.get("aws_session_token"))
        return f"the access key {_shown(key_id)} of profile {name!r}", keys
    for variable, kind in _OTHER_CHAINS.items():
        if environment.get(variable):
            return kind, _NO_KEYS
    if profile.keys() & {"sso_session", "sso_start_url", "role_arn", "credential_process"}:
        raise OptionError(
            f"profile {name!r} gets its keys by sign-on, role or program, which is not read here; "
            f'run first: eval "$(aws configure export-credentials --profile {name} --format env)"'
        )
    return "the instance's own role", _NO_KEYS


def _shown(key_id: str) -> str:
    """Return the beginning of a key id; an id is no secret, but logs live long."""
    return f"{key_id[:4]}…"


def _file(which: str, environment: Mapping[str, str]) -> Path:
    variable = "AWS_SHARED_CREDENTIALS_FILE" if which == "credentials" else "AWS_CONFIG_FILE"
    return Path(environment.get(variable) or f"~/.aws/{which}").expanduser()


def _profile(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a profile from both files; `credentials` wins over `config`."""
    in_config = name if name == "default" else f"profile {name}"
    settings = _section(_file("config", environment), in_config)
    return settings | _section(_file("credentials", environment), name)


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, default_section="no defaults here")
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as a profile file: {error}") from error
    return dict(parser[name]) if parser.has_section(name) else {}
