"""One signed request: making a bucket, which obstore cannot do.

Signature version 4 for a PUT without body or query, as Amazon describes it; enough for test
servers.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.error
import urllib.request
from datetime import UTC, datetime
from urllib.parse import urlsplit

_REGION = "us-east-1"
_NOTHING = hashlib.sha256(b"").hexdigest()


def create_bucket(endpoint: str, access_key: str, secret_key: str, name: str) -> None:
    """Make a bucket; one that is there already is fine."""
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for header, value in _signed_headers(endpoint, name, access_key, secret_key, moment).items():
        request.add_header(header, value)
    try:
        with urllib.request.urlopen(request, timeout=30):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise


def _signed_headers(
    endpoint: str, name: str, access_key: str, secret_key: str, moment: str
) -> dict[str, str]:
    host = urlsplit(endpoint).netloc
    headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": moment}
    names = ";".join(headers)
    lines = "".join(f"{header}:{value}\n" for header, value in headers.items())
    canonical = f"PUT\n/{name}\n\n{lines}\n{names}\n{_NOTHING}"
    scope = f"{moment[:8]}/{_REGION}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return headers | {"Authorization": authorization}
