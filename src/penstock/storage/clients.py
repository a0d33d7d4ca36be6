"""obstore clients: made on first use, shared by equal stores, never used across a fork.

obstore does its network I/O in threads of its own runtime. A forked child inherits the runtime
without its threads, so any call there would block for ever. A process that was forked after obstore
was loaded is therefore *cut off*: it reads through a relay process of its own (see `relayed`). This
module knows whether the process is cut off.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionError
from penstock.storage.credentials import AwsSettings, aws_settings
from penstock.storage.failures import ANONYMOUS, PLAIN_HTTP
from penstock.storage.options import StoreOptions
from penstock.storage.uris import ParsedUri

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

REMOTE_SCHEMES = ("s3", "gs", "az", "abfs", "http", "https")
_CONNECT_TIMEOUT_S_MAX = 10.0
IDLE_MAX, IDLE_S = 64, 20.0
"""Idle connections to one store that are kept open, and for how long. As many as a rank may have
requests in flight: with 16, one request in twenty opens a connection, which costs 13 %
more CPU even without TLS. The time is short because they take sockets of the store, and because a
router may forget an idle connection, which then costs a time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClient:
    """An open client and, in words, the credentials it uses."""

    store: ObjectStore
    """What obstore's functions take."""
    credentials: str
    """Never holds a secret."""
    keys: AwsSettings | None = field(default=None, repr=False)
    """The keys from options, environment or files; None: the client finds its own."""


_Address = tuple[str, str, StoreOptions]
_clients: dict[_Address, StoreClient] = {}
_lock = threading.Lock()
"""Held while a client is made, so that equal stores share one. Lookups do without it."""
_is_cut_off = False


def is_cut_off() -> bool:
    """Return whether obstore must not be called in this process."""
    return _is_cut_off


def client_of(place: ParsedUri, options: StoreOptions) -> StoreClient:
    """Return the client of a place's container, made on first use."""
    assert not _is_cut_off, "a forked child must not touch its parent's client"
    address = (place.scheme, place.container, options)
    client = _clients.get(address)
    if client is None:
        with _lock:
            client = _clients.get(address) or _make(place, options)
            _clients[address] = client
    return client


def renewed(place: ParsedUri, options: StoreOptions, expired: StoreClient) -> bool:
    """Replace a client with expired credentials; return whether there are new ones.

    A run may outlive its keys: new keys are then written into the profile's file. The client itself
    renews keys that it has found by itself (roles).
    """
    with _lock:
        address = (place.scheme, place.container, options)
        if _clients.get(address) is not expired:
            return True  # Another thread has replaced it already.
        if expired.keys is None or aws_settings(options, os.environ) == expired.keys:
            return False
        _clients[address] = _make(place, options)
    return True


def forget_client(place: ParsedUri, options: StoreOptions) -> None:
    """Drop the client of a container."""
    _clients.pop((place.scheme, place.container, options), None)


def _after_fork_in_child() -> None:
    global _is_cut_off, _clients, _lock
    # Loaded counts as started: other code in the process may have called obstore.
    _is_cut_off = _is_cut_off or "obstore" in sys.modules
    if _is_cut_off:
        # Never destroyed: the destructors would wait for the runtime, which has no threads here.
        _abandoned.append(_clients)
    _clients, _lock = {}, threading.Lock()


_abandoned: list[dict[_Address, StoreClient]] = []
os.register_at_fork(after_in_child=_after_fork_in_child)


def _make(place: ParsedUri, options: StoreOptions) -> StoreClient:
    make: Callable[[ParsedUri, StoreOptions], StoreClient] = {
        "s3": _s3, "gs": _gs, "az": _az, "abfs": _az, "http": _http, "https": _http,
    }[place.scheme]  # fmt: skip
    try:
        return make(place, options)
    except OptionError:
        raise
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(f"{place.container_uri} cannot be opened: {first_line}") from error


def _settings(options: StoreOptions, *, is_http: bool) -> dict[str, Any]:
    client_options: ClientConfig = {
        # `timeout` covers a whole request, which is long for a large object; `read_timeout` bounds
        # the silence within it.
        "timeout": timedelta(seconds=options.deadline_s),
        "read_timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=min(options.timeout_s, _CONNECT_TIMEOUT_S_MAX)),
        "pool_max_idle_per_host": str(IDLE_MAX),
        "pool_idle_timeout": timedelta(seconds=IDLE_S),
        "allow_http": is_http,
    }
    # The only retries are ours (`RetryingStore`): counted, bounded, and tested in virtual time.
    retry_config: RetryConfig = {
        "max_retries": 0,
        "retry_timeout": timedelta(seconds=options.timeout_s),
    }
    return {"client_options": client_options, "retry_config": retry_config}


class _Keys:
    """Gives the client the same credentials each time it asks."""

    def __init__(self, aws: AwsSettings) -> None:
        self._answer: dict[str, str | None] = {
            "access_key_id": aws.access_key,
            "secret_access_key": aws.secret_key or "",
            "expires_at": None,
        }
        if aws.session_token:
            self._answer["token"] = aws.session_token

    def __call__(self) -> dict[str, str | None]:
        return self._answer


def _s3(place: ParsedUri, options: StoreOptions) -> StoreClient:
    from obstore.store import S3Store

    aws = aws_settings(options, os.environ)
    config: dict[str, Any] = {"region": aws.region, "skip_signature": options.anonymous}
    provider: dict[str, Any] = {}
    if aws.access_key:
        # A provider instead of settings: with settings the client would also send the environment's
        # AWS_SESSION_TOKEN, which belongs to another key.
        provider["credential_provider"] = _Keys(aws)
    # A bucket's name with a dot does not match the certificate of `*.s3.amazonaws.com`.
    is_path_style = options.path_style
    if is_path_style is None:
        is_path_style = aws.endpoint is not None or "." in place.container
    config["virtual_hosted_style_request"] = not is_path_style
    if aws.endpoint:
        scheme, _, host = aws.endpoint.rstrip("/").partition("://")
        prefix = "" if is_path_style else f"{place.container}."
        config["endpoint"] = f"{scheme}://{prefix}{host}"
        if "AWS_ENDPOINT_URL_S3" in os.environ:  # else it would win over the options
            config["aws_endpoint_url_s3"] = config["endpoint"]
    is_http = bool(aws.endpoint and aws.endpoint.startswith("http://"))
    store = S3Store(
        place.container,
        config=config,  # type: ignore[arg-type]
        **_settings(options, is_http=is_http),
        **provider,
    )
    return StoreClient(store=store, credentials=aws.kind, keys=aws if aws.access_key else None)


def _gs(place: ParsedUri, options: StoreOptions) -> StoreClient:
    from obstore.store import GCSStore

    if options.endpoint:
        raise OptionError("gs:// takes no endpoint; for a compatible server use s3:// and its keys")
    config: dict[str, Any] = {"skip_signature": True} if options.anonymous else {}
    store = GCSStore(place.container, config=config, **_settings(options, is_http=False))  # type: ignore[arg-type]
    return StoreClient(store=store, credentials=_usual(options, "Google's"))


def _az(place: ParsedUri, options: StoreOptions) -> StoreClient:
    from obstore.store import AzureStore

    container, _, host = place.container.partition("@")
    config: dict[str, Any] = {"skip_signature": True} if options.anonymous else {}
    if host:
        config["account_name"] = host.partition(".")[0]
    if options.access_key:
        config |= {"account_name": options.access_key, "account_key": options.secret_key}
    if options.endpoint:
        config["endpoint"] = options.endpoint
    is_http = bool(options.endpoint and options.endpoint.startswith("http://"))
    store = AzureStore(container, config=config, **_settings(options, is_http=is_http))  # type: ignore[arg-type]
    return StoreClient(store=store, credentials=_usual(options, "Azure's"))


def _http(place: ParsedUri, options: StoreOptions) -> StoreClient:
    from obstore.store import HTTPStore

    url = f"{place.scheme}://{place.container}"
    store = HTTPStore.from_url(url, **_settings(options, is_http=place.scheme == "http"))
    return StoreClient(store=store, credentials=PLAIN_HTTP)


def _usual(options: StoreOptions, whose: str) -> str:
    if options.anonymous:
        return ANONYMOUS
    if options.access_key:
        return "the key of the options"
    return f"{whose} credentials of the environment"
