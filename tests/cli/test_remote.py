"""The same verbs against a real object store."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_pack_info_and_verify_reach_a_bucket(penstock: Run, shards: Path, s3: Any) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": s3.access.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.access.secret_key,
    }
    where = f"{s3.uri}train/"
    there = (where, "--endpoint", s3.access.endpoint, "--json")
    packed = penstock("pack", shards, *there, **keys)
    assert packed.returncode == 0, packed.stderr
    info = penstock("info", *there, **keys)
    assert json.loads(info.stdout)["num_samples"] == 40, info.stderr
    assert json.loads(penstock("verify", *there, **keys).stdout)["ok"]


def test_a_store_that_refuses_is_an_error_in_one_line(penstock: Run, s3: Any) -> None:
    words = ("info", f"{s3.uri}train/", "--endpoint", s3.access.endpoint, "--anonymous")
    answer = penstock(*words)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("penstock: error: ")
    assert "Traceback" not in answer.stderr
