"""Traces: what happened in a run, written down cheaply and read back as columns.

A run is a folder. Every process of it that records has one file there with compressed columns, and
a small mapped file for each thread with the rows that are not in a column yet: a process that is
killed loses nothing that it recorded. `read_trace` merges the files of all processes and ranks and
puts them on one clock.

This room records and reads; it knows neither loaders nor what a row means for a run. What it means
is `report`'s business. Whoever records holds a `Recorder` or None and asks before it calls: tracing
that is off costs one comparison.
"""

from penstock.trace.reading import Process, Trace, read_trace
from penstock.trace.recorder import Recorder, recorder_of
from penstock.trace.schema import COLUMNS, Flag, Kind

__all__ = ["COLUMNS", "Flag", "Kind", "Process", "Recorder", "Trace", "read_trace", "recorder_of"]
