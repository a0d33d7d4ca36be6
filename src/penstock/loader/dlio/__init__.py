"""Penstock under DLIO, the benchmark behind MLPerf Storage.

DLIO emulates training: it generates a data set, reads it through a loader, sleeps where a model
would compute, and reports accelerator utilisation (AU), the share of the time spent in that sleep.
It finds other people's loaders and readers by class name:

* `loader.PenstockDataLoader` (`reader.data_loader_classname`) replaces DLIO's torch loader;
* `reader.PenstockReader` (`reader.reader_classname`) replaces the reader inside DLIO's own loaders;
* `ledger.Ledger` records which samples were read, so that a run can prove what it did;
* `python -m penstock.loader.dlio` starts DLIO, and refuses class names that DLIO would silently
  ignore.

Both follow DLIO's order and its division of samples among ranks. `loader` and `reader` import DLIO,
so nothing else in Penstock imports them. `parse` and `ledger` do not: worker processes use them.
"""
