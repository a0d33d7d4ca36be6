"""The page of `penstock top`, from made-up ranks."""

from penstock.cli.screen import plain
from penstock.engine.snapshot import LiveCounts, LiveRank, LiveSnapshot
from penstock.engine.stats import SourceStats
from penstock.report.live.screen import hint_of, page_of_ranks, slowest_of


def rank_of(
    rank: int,
    *,
    pace: int = 100,
    stall: float = 0.0,
    read_s: float = 0.0,
    decode_s: float = 0.0,
    state: str = "running",
) -> LiveRank:
    recent = LiveCounts(
        samples=10 * pace,
        batches=10,
        elapsed_s=10,
        stall_s=10 * stall,
        decode_s=decode_s,
        sources={"s3": SourceStats(size_bytes=50_000_000, requests=10, seconds=read_s)},
        cpu_s={"engine": 3.0, "worker": 12.0},
    )
    return LiveRank(
        now=LiveSnapshot(
            rank=rank, host=f"node{rank // 8}", epoch=1, counts=recent, state=state,
            ready_batches=3, memory_bytes=10**9,
        ),
        recent=recent,
    )  # fmt: skip


def text_of(ranks: list[LiveRank], width: int = 80, height: int = 1000) -> list[str]:
    return [plain(line) for line in page_of_ranks("runs/a", ranks, width=width, height=height)]


def test_a_page_has_totals_and_a_line_for_each_rank() -> None:
    lines = text_of([rank_of(0), rank_of(1, pace=40), rank_of(9, state="killed")])
    assert lines[0] == "penstock top  2 of 3 ranks running, 2 hosts, 10 s   runs/a"
    assert "140 samples/s" in lines[1]
    assert "s3 10 MB/s" in lines[2]
    assert "cpu 3.0 cores, 2 GB" in lines[2]
    assert [line.split()[:2] for line in lines[5:8]] == [
        ["0", "running"],
        ["1", "running"],
        ["9", "killed"],
    ]
    assert lines[6].endswith("◂")  # The slowest.


def test_lines_fit_the_terminal_whatever_its_size() -> None:
    ranks = [rank_of(n, pace=10**9, stall=0.5, read_s=50) for n in range(64)]
    for width, height in ((40, 16), (80, 24), (110, 24), (200, 60)):
        lines = text_of(ranks, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= height
    assert "tiers" in text_of(ranks, 160)[4]
    assert "tiers" not in text_of(ranks, 80)[4]


def test_of_many_ranks_those_that_differ_are_shown() -> None:
    ranks = [rank_of(n, pace=100 + n % 3) for n in range(64)]
    ranks[17] = rank_of(17, pace=20)
    ranks[41] = rank_of(41, state="silent")
    lines = text_of(ranks, height=24)
    shown = [int(line.split()[0]) for line in lines[5:] if line.split()[:1] and line[4].isdigit()]
    assert {17, 41} <= set(shown)
    assert len(shown) < 20
    [spread] = [line for line in lines if line.startswith("  samples/s")]
    assert spread.split()[1] == "20"
    assert spread.split()[-1] == "102"


def test_the_slowest_rank_is_the_one_that_holds_the_others_up() -> None:
    alike = [rank_of(n) for n in range(4)]
    assert slowest_of(alike) is None
    assert slowest_of(alike[:1]) is None
    slow = rank_of(4, pace=50)
    assert slowest_of([*alike, slow]) is slow
    # All go at one pace, because they wait for each other; one of them waits for its data.
    waits = rank_of(4, stall=0.4)
    assert slowest_of([*alike, waits]) is waits
    assert slowest_of([*alike, rank_of(4, pace=1, state="killed")]) is None


def test_a_hint_says_what_goes_on_while_ranks_wait() -> None:
    assert hint_of([rank_of(0, stall=0.05)]) == ""
    assert "decoding keeps workers busy" in hint_of([rank_of(0, stall=0.5, decode_s=40, read_s=2)])
    assert "reads from s3 take the time" in hint_of([rank_of(0, stall=0.5, decode_s=4, read_s=80)])
    assert "hardly anything" in hint_of([rank_of(0, stall=0.5)])
    ranks = [rank_of(0), rank_of(1), rank_of(2, stall=0.5, read_s=80)]
    assert hint_of(ranks, ranks[2]).startswith("only rank 2 waits for data")
