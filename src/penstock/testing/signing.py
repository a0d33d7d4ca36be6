"""Signed requests that obstore cannot make: making a bucket, and setting its policy.

Signature version 4 for a PUT, as Amazon describes it; enough for test servers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

_REGION = "us-east-1"


def create_bucket(endpoint: str, access_key: str, secret_key: str, name: str) -> None:
    """Make a bucket; one that is there already is fine."""
    try:
        _put(endpoint, access_key, secret_key, name)
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise


def deny(
    endpoint: str, access_key: str, secret_key: str, name: str, actions: Sequence[str]
) -> None:
    """Refuse some actions, such as s3:DeleteObject, to all users of a bucket but administrators."""
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": list(actions),
        "Resource": [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    _put(endpoint, access_key, secret_key, name, query="policy=", body=policy.encode())


def _put(
    endpoint: str,
    access_key: str,
    secret_key: str,
    name: str,
    *,
    query: str = "",
    body: bytes = b"",
) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}?{query}", method="PUT", data=body)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {
        "host": urlsplit(endpoint).netloc,
        "x-amz-content-sha256": digest,
        "x-amz-date": moment,
    }
    signature = _signature(headers, f"PUT\n/{name}\n{query}", access_key, secret_key)
    for header, value in (headers | {"Authorization": signature}).items():
        request.add_header(header, value)
    with urllib.request.urlopen(request, timeout=30):
        pass


def _signature(headers: dict[str, str], what: str, access_key: str, secret_key: str) -> str:
    moment = headers["x-amz-date"]
    names = ";".join(headers)
    lines = "".join(f"{header}:{value}\n" for header, value in headers.items())
    canonical = f"{what}\n{lines}\n{names}\n{headers['x-amz-content-sha256']}"
    scope = f"{moment[:8]}/{_REGION}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    return (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
