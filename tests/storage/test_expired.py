"""Credentials that expire while a job runs: new ones are taken up, or the error says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DeniedError
from penstock.storage import ObjectInfo, StoreOptions, open_store
from penstock.testing.http_server import Fault, HttpServer

X = ObjectInfo(key="x", size_bytes=5)


@pytest.fixture
def sign_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give a function that writes new keys where the `aws` command keeps them."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def write(key: str) -> None:
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
            f"aws_session_token = token-of-{key}\n"
        )

    return write


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", status=400, code="ExpiredToken", first=1),
        Fault(kind="status", status=403, code="ExpiredToken", first=1),
        Fault(kind="status", status=400, method="HEAD"),
    ],
    ids=["400", "403", "HEAD"],
)
def test_new_keys_are_taken_up_without_an_error(
    sign_in: Callable[[str], None], fault: Fault
) -> None:
    sign_in("FIRST")
    with HttpServer({"bucket/x": b"right"}, faults=(fault,)) as server:
        store = open_store("s3://bucket/", StoreOptions(endpoint=server.url))
        assert store.read_range(X, 0, 5) == b"right"
        sign_in("SECOND")
        assert store.info("x").size_bytes == 5
        assert store.read_range(X, 0, 5) == b"right"
        store.close()
    keys = [request.authorization.partition("Credential=")[2][:6] for request in server.log]
    assert keys[0] == "FIRST/"
    assert keys[-1] == "SECOND"
    assert keys == sorted(keys), "once new keys are used, the old ones are not"


def test_keys_that_nobody_renews_are_an_error_at_once(sign_in: Callable[[str], None]) -> None:
    sign_in("FIRST")
    fault = Fault(kind="status", status=400, code="ExpiredToken", count=99)
    with HttpServer({"bucket/x": b"right"}, faults=(fault,)) as server:
        store = open_store("s3://bucket/", StoreOptions(endpoint=server.url))
        with pytest.raises(DeniedError, match=r"FIRS….*400 ExpiredToken.*sign in again"):
            store.read_range(X, 0, 5)
        store.close()
    assert len(server.log) == 1
