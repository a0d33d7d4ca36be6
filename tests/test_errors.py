"""What an error tells people to install can be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[1]
CODE = "import errors; print(errors.MissingPackageError('this', 'that', 'jpeg'))"


def said(site: Path) -> str:
    """Return the message in a Python that finds the metadata of a distribution first."""
    code = f"import sys; sys.path[:0] = [{str(site)!r}, {str(CHECKOUT / 'src/penstock')!r}]; {CODE}"
    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'penstock[jpeg]'"),
        ({"url": CHECKOUT.as_uri(), "dir_info": {}}, f"pip install '{CHECKOUT}[jpeg]'"),
        (
            {"url": CHECKOUT.as_uri(), "dir_info": {"editable": True}},
            f"pip install -e '{CHECKOUT}[jpeg]'",
        ),
        (
            {"url": "file:///gone/since", "dir_info": {}},
            "pip install '.[jpeg]' in a checkout of Penstock",
        ),
        (
            {"url": "https://h/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'penstock[jpeg] @ git+https://h/p.git@abc'",
        ),
        (
            {"url": "file:///w/penstock-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'penstock[jpeg] @ file:///w/penstock-1-py3-none-any.whl'",
        ),
    ],
)
def test_the_command_installs_from_where_penstock_came(
    tmp_path: Path, origin: dict[str, Any] | None, command: str
) -> None:
    metadata = tmp_path / "penstock-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0.1.0\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    assert said(tmp_path) == f"this needs the package 'that', which is not installed: {command}"


def test_sources_that_were_never_installed_name_the_checkout(tmp_path: Path) -> None:
    assert said(tmp_path).endswith("pip install '.[jpeg]' in a checkout of Penstock")
