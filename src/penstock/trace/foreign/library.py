"""The preloaded library: compiled when it is first needed, kept for this user."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S_MAX = 120


def preload_library() -> tuple[Path | None, str]:
    """Return the library and "", or None and a sentence that says why there is none."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + os.uname().machine.encode()).hexdigest()[:16]
    folder = _cache_folder()
    library = folder / f"preload-{key}.so"
    if library.exists():
        return library, ""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None, (
            "there is no C compiler (cc, gcc, clang), so the library that sees reads below Python "
            "could not be built; install one, for example with apt install gcc"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Compiled under another name and moved: two jobs that start at once do not see a half file.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "preload.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
        done = subprocess.run(
            [*command, "-o", str(made), str(SOURCE), "-ldl", "-lpthread"],
            capture_output=True,
            text=True,
            timeout=_COMPILE_S_MAX,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            return None, f"{compiler} could not build the library that sees reads: {lines[0]}"
        made.replace(library)
    return library, ""


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "penstock"
    except RuntimeError:  # Containers often run as a user without a home.
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
