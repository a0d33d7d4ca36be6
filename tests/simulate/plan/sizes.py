"""Summaries of samples that are only lengths."""

from __future__ import annotations

from penstock.dataset.part import Ints
from penstock.simulate.plan.summary import Summary, by_class


def summary_of_sizes(lengths: Ints) -> Summary:
    """Return the summary of samples of some lengths that are units each."""
    counts, sizes = by_class(lengths)
    return Summary(
        num_samples=len(lengths),
        num_reads=len(lengths),
        class_counts=tuple(counts.tolist()),
        class_bytes=tuple(sizes.tolist()),
    )
