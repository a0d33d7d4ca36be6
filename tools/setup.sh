#!/bin/sh
# Makes .venv with Penstock (editable) and everything its tests, linters and demo need.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

"$python" - <<'CHECK' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Penstock needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; "
             "run: make PYTHON=python3.11 ...")
CHECK

if ! "$python" -c "import ensurepip, venv" 2>/dev/null; then
    # Debian ships venv apart from Python.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv
    else
        echo "this Python cannot make virtual environments; run: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi

# Tests of many nodes run in network namespaces; where these cannot be made they are skipped.
if [ "$(id -u)" = 0 ] && ! command -v ip >/dev/null && command -v apt-get >/dev/null; then
    tools/install_network.sh
fi

# Pages are tested in a real browser; where there is none these tests are skipped.
if [ "$(id -u)" = 0 ] && ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver ||
        echo "no chromium: tests of pages will be skipped" >&2
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setting up .venv (once; a few minutes, most of it torch)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
# DLIO asks for tensorflow and NVIDIA's DALI, a gigabyte that its torch path does not use. Where
# pydftracer has no build for this Python, DLIO's tests are skipped.
if .venv/bin/python -c "import dftracer" 2>/dev/null; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dlio-benchmark==2.0.0
    # Its wheel has a top-level package `tests`, which would hide ours from worker processes.
    rm -rf .venv/lib/python3.*/site-packages/tests
fi
touch .venv/.complete
