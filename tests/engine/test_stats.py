"""Counts that are added up and subtracted."""

from penstock.engine.snapshot import LiveCounts
from penstock.engine.stats import Counters, EngineStats, SourceStats


def test_counts_of_several_engines_are_added_by_source() -> None:
    first = EngineStats(sources={"s3": SourceStats(size_bytes=5, requests=1)}, decode_s=1.0)
    second = EngineStats(sources={"s3": SourceStats(size_bytes=7), "peers": SourceStats()})
    both = first + second
    assert both.sources["s3"] == SourceStats(size_bytes=12, requests=1)
    assert list(both.sources) == ["s3", "peers"]
    assert both.decode_s == 1.0


def test_the_difference_of_two_counts_undoes_their_sum() -> None:
    before = LiveCounts(samples=3, sources={"s3": SourceStats(size_bytes=5)}, cpu_s={"engine": 1.0})
    recent = LiveCounts(samples=2, sources={"s3": SourceStats(size_bytes=4)}, cpu_s={"train": 0.5})
    assert (before + recent - before).samples == 2
    assert (before + recent - before).sources["s3"] == recent.sources["s3"]


def test_stores_tiers_and_peers_are_told_apart() -> None:
    counters = Counters()
    for source in ("folder", "s3", "tier:memory", "tier:disk", "peers"):
        counters.add_reads(source, 10, 1, 0.1)
    counted = counters.counted()
    assert (counted.store_bytes, counted.tier_bytes, counted.peer_bytes) == (20, 20, 10)


def test_reads_that_were_taken_are_not_counted_twice() -> None:
    counters = Counters()
    counters.add_reads("s3", 10, 2, 0.5)
    assert counters.taken_reads() == [("s3", 10, 2, 0.5)]
    assert counters.taken_reads() == []
