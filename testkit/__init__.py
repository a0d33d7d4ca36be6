"""What the tests and benchmarks of this repository share and users do not get.

`shaper` puts a slow, faulty network before a store; `network` makes hosts out of network
namespaces. `programs` and `rewrites` draw step programs and schedules at random; `fuzz` damages
files and messages. `browser` drives Chromium, and `waiting` waits for what another process does.
"""
