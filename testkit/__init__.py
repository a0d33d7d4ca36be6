"""What the tests and benchmarks of this repository share and users do not get.

`shaper` puts a slow, faulty network before a store; `network` makes hosts out of network
namespaces. `virtual_cluster` plays seeded faults on whole clusters in virtual time. `programs` and
`rewrites` draw step programs and schedules at random; `fuzz` damages files and messages. `browser`
drives Chromium, and `waiting` waits for what another process does.
"""

import os
import sys
from pathlib import Path


def search_path() -> str:
    """Return `PYTHONPATH` for a process of this kit: it runs the packages that its owner runs.

    Not the current folder, which is an empty entry in `sys.path`: where that is the checkout, the
    kit is found by its own place.
    """
    return os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[1])])
