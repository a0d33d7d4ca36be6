"""What happened, written down cheaply.

A recorder keeps spans (something took a while) and marks (something happened) in memory and writes
them as a Chrome trace that Perfetto opens. Who records holds a recorder or None, and asks before it
calls: tracing that is off costs one comparison.
"""

from penstock.trace.recorder import Kind, Recorder

__all__ = ["Kind", "Recorder"]
