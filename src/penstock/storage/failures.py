"""Translates errors of the client into ours: what failed, the numbers, and the way out.

obstore has classes for a few statuses. All other errors have one class, and its text holds the
status, the server's error code and the kind of network failure. Only this module parses that text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.errors import (
    DeniedError,
    ExistsError,
    NotFoundError,
    OptionError,
    RangeError,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnreachableError,
)

_INSTANCE_SERVICES = (
    "/latest/api/token",
    "/latest/meta-data",
    "metadata.google.internal",
    "169.254.169.254",
)
"""Where a client looks for the machine's own role, if it has found no other credentials."""
ANONYMOUS = "no credentials (anonymous)"
PLAIN_HTTP = "a request without credentials"
_WITHOUT = {
    ANONYMOUS: "it is not public: leave out anonymous=True, and give credentials with profile=, "
    "AWS_PROFILE or the usual variables",
    PLAIN_HTTP: "plain http sends none: use the store's own address (s3://, gs://, az://) with "
    "credentials, or ask for it to be made public",
}
"""The way out if no credentials were sent, by `FailedCall.credentials`."""
_EXPIRED = (
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken"),
    "TokenRefreshRequired",
)
"""Codes for expired credentials; S3 sends them with 400, other stores with 401 or 403."""
_TEXT_MAX = 200
"""Characters of the server's own words that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that failed, for the message."""

    uri: str
    """The object or prefix."""
    container: str
    """The bucket, as a uri."""
    credentials: str
    """Which credentials were used, in words."""
    timeout_s: float
    """The longest silence that was allowed."""
    has_token: bool = False
    """Whether the credentials are those of a session."""


def translated(error: BaseException, call: FailedCall) -> Exception:
    """Return our error for one of the client's."""
    text = str(error)
    status = _status(text)
    if any(mark in text for mark in _INSTANCE_SERVICES):
        return _no_credentials(call)
    if "redirect without LOCATION" in text:
        return _other_region(call, "301", "...")
    if status is not None:
        return _of_status(error, status, call)
    if isinstance(error, FileNotFoundError) or "NotFound" in type(error).__name__:
        return _not_found("", call)
    if type(error).__name__ == "NotSupportedError":
        return StoreError(
            f"{call.uri}: the server answers no ranges (it sends 200 instead of 206); "
            "use another server or copy the data to a folder or bucket",
            uri=call.uri,
        )
    if isinstance(error, ValueError):
        return OptionError(f"{call.uri}: {text.splitlines()[0]}")
    return _of_network(text, call)


def is_expired(error: BaseException, *, has_token: bool) -> bool:
    """Return whether an error says that the session of the credentials has expired.

    An answer to HEAD has no body, so it has no code: if there is a session token, a bare 400 means
    this.
    """
    text = str(error)
    status, code = _status(text), _code(text)
    if status == 400 and not code:
        return has_token and "performing HEAD" in text
    return status in (400, 401, 403) and code in _EXPIRED


def _status(text: str) -> int | None:
    found = re.search(r"status code: (\d{3})\b", text)
    return int(found[1]) if found else None


def _code(text: str) -> str:
    found = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", text)
    return found[1] if found else ""


def _of_status(error: BaseException, status: int, call: FailedCall) -> Exception:
    text = str(error)
    code = _code(text)
    shown = f"{status} {code}".strip()
    uri = call.uri
    if is_expired(error, has_token=call.has_token):
        return _denied(shown, code or "ExpiredToken", call)
    if status in (401, 403):
        return _denied(shown, code, call)
    if status == 404:
        return _not_found(code, call)
    if status == 416:
        return RangeError(f"{uri}: the range lies outside the object ({shown})", uri=uri)
    if status == 409 and code in ("ConditionalRequestConflict", "OperationAborted", "SlowDown"):
        # Two writers at once, and neither has won yet: a retry decides it.
        return UnavailableError(f"{uri}: two writers at once ({shown}); ask again", uri=uri)
    if status in (409, 412):
        return ExistsError(f"{uri} exists already ({shown})", uri=uri)
    if status in (408, 429) or status >= 500:
        return UnavailableError(
            f"{uri}: the store answered {shown}; it is overloaded or down. If this lasts, read "
            "with fewer requests at once",
            uri=uri,
        )
    if status in (301, 307, 400) and (region := _region(text)):
        return _other_region(call, shown, region)
    return StoreError(f"{uri}: the store refused the request ({shown}): {_said(text)}", uri=uri)


def _denied(shown: str, code: str, call: FailedCall) -> DeniedError:
    way_out = {
        "SignatureDoesNotMatch": "the secret does not belong to this key: check it",
        "InvalidAccessKeyId": "the store does not know this key: check the key and the endpoint",
        **dict.fromkeys(
            _EXPIRED,
            "the session has expired or its token is not valid: sign in again or set new keys, "
            "and resume the run from its last state",
        ),
        "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    }.get(code) or _WITHOUT.get(
        call.credentials,
        "check that they may read this bucket, choose others with profile= or AWS_PROFILE, "
        "or pass anonymous=True for a public bucket",
    )
    return DeniedError(
        f"{call.uri}: the store refuses {call.credentials} ({shown}); {way_out}", uri=call.uri
    )


def _no_credentials(call: FailedCall) -> DeniedError:
    return DeniedError(
        f"{call.uri}: no credentials were found in options, environment or profile, and this "
        "machine has no role of its own; set AWS_PROFILE or AWS_ACCESS_KEY_ID (for gs and az their "
        "usual variables), or pass anonymous=True for a public bucket",
        uri=call.uri,
    )


def _not_found(code: str, call: FailedCall) -> NotFoundError:
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(
            f"{call.container} does not exist (404 {code}); check the bucket's name and endpoint",
            uri=call.uri,
        )
    return NotFoundError(
        f"{call.uri} does not exist (404); check the name, upper and lower case count",
        uri=call.uri,
    )


def _region(text: str) -> str:
    found = re.search(r"<Region>([a-z0-9-]+)</Region>", text)
    return repr(found[1]) if found else ""


def _other_region(call: FailedCall, shown: str, region: str) -> OptionError:
    return OptionError(
        f"{call.uri}: the bucket lives in another region ({shown}); pass region={region}"
    )


def _of_network(text: str, call: FailedCall) -> Exception:
    found = re.search(r"performing [A-Z]+ (https?://\S+)", text)
    host = urlsplit(found[1]).netloc if found else call.container
    kind = re.search(r"\bkind: (Timeout|Connect|Interrupted|Request|Decode|Unknown)", text)
    if "IncompleteBody" in text or "UnexpectedEof" in text:
        return TruncatedError(
            f"{call.uri}: the answer ended before all promised bytes had arrived; "
            "asking again usually helps",
            uri=call.uri,
        )
    if kind is None:
        return StoreError(f"{call.uri}: {_said(text)}", uri=call.uri)
    if "dns error" in text:
        why = "its name cannot be resolved; check the spelling, the endpoint and the network"
    elif "ConnectionRefused" in text:
        why = "the connection was refused; is the server running on that port?"
    elif kind[1] == "Timeout" or "TimedOut" in text:
        why = (
            f"nothing arrived within {call.timeout_s:g} s; check the network, "
            "or raise timeout_s for a slow store"
        )
    elif "certificate" in text.lower():
        why = "its certificate is not trusted; check the endpoint's name and the system's roots"
    else:
        why = "the connection broke; check the network and the server"
    return UnreachableError(f"{call.uri}: cannot reach {host}: {why}", uri=call.uri)


def _said(text: str) -> str:
    """Return the server's or the client's own words, cut to one line."""
    message = re.search(r"<Message>(.*?)</Message>", text, re.S)
    words = message[1] if message else text.split("\n\nDebug source", maxsplit=1)[0]
    return " ".join(words.split())[:_TEXT_MAX]
