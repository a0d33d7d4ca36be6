"""Nodes that use each other's tiers: each byte is read from the store once, whoever needs it."""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import Disk, World
from penstock.engine import peer_reads
from penstock.engine.cluster import Cluster
from penstock.engine.peer_reads import UnitsRead
from penstock.engine.peers.base import Answer, Ask
from penstock.engine.shared_members import SharedMembers
from penstock.errors import OptionError, PeerError
from penstock.order.stream_hash import StreamHash

from .conftest import write_tar

BLOB_BYTES = 70_000
TRIES_MAX = 4
NUM_BLOBS = 96


@pytest.fixture
def large(tmp_path: Path) -> penstock.Dataset:
    """96 samples of 70 kB in three tars: units of their own."""
    for shard in range(3):
        numbers = range(shard * 32, shard * 32 + 32)
        samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in numbers]
        write_tar(tmp_path / "large" / f"x-{shard}.tar", samples, shard * 32)
    return penstock.open(tmp_path / "large")


def go(dataset: Any, world: World, folder: Path, **options: Any) -> Any:
    """Be one rank: go through all epochs, looking at every byte."""
    tier = folder / f"node{world.node}"
    tier.mkdir(exist_ok=True)
    size = options.pop("size", "1GB")
    look = options.pop("look", looks_right)
    state, limit = options.pop("state", None), options.pop("limit", None)
    options = {"global_batch_size": 16, "epochs": 3, "output": "numpy", **options}
    options.setdefault("tiers", [Disk(tier, size)])
    stream = StreamHash()
    with penstock.Loader(dataset, world=world, peers=str(folder / "meet"), **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, limit):
            look(batch)
            stream = stream.update(batch.epoch, batch.positions, batch.ids, batch.mask)
        return stream, loader.stats()


def looks_right(batch: Any) -> None:
    for i, value in zip(batch.ids.tolist(), batch.get("bin", ()), strict="bin" in batch):
        assert len(value) == BLOB_BYTES
        assert (value == i).all()


def together(
    dataset: Any, num_nodes: int, folder: Path, *, ranks_a_node: int = 1, **options: Any
) -> Any:
    """Be all ranks at once; return the hash of what they delivered, and their counts."""
    num_ranks = num_nodes * ranks_a_node
    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [
            pool.submit(
                go,
                dataset,
                World(rank=rank, num_ranks=num_ranks, num_nodes=num_nodes),
                folder,
                **options,
            )
            for rank in range(num_ranks)
        ]
        results = [run.result(timeout=100) for run in runs]
    stream = StreamHash()
    for part, _ in results:
        stream = stream.merge(part)
    return stream, [stats for _, stats in results]


def alone(dataset: Any, **options: Any) -> StreamHash:
    stream = StreamHash()
    options = {"global_batch_size": 16, "epochs": 3, "output": "numpy", **options}
    options.pop("look", None)
    with penstock.Loader(dataset, world=World(), **options) as loader:
        for batch in loader:
            stream = stream.update(batch.epoch, batch.positions, batch.ids, batch.mask)
    return stream


def sparingly(most_bytes: float, *where: Any, **options: Any) -> tuple[Any, Any]:
    """Run a job that should read so much of the store at most, and return its stream and stats.

    What is late on a busy machine is asked of the store beside: that happens, but not each time.
    """
    dataset, num_nodes, folder = where
    for number in range(TRIES_MAX):
        (folder / f"try{number}").mkdir()
        stream, stats = together(dataset, num_nodes, folder / f"try{number}", **options)
        if sum(s.store_bytes for s in stats) <= most_bytes:
            return stream, stats
    raise AssertionError(
        f"{sum(s.store_bytes for s in stats)} bytes of the store, {most_bytes:.0f} at most"
    )


@pytest.mark.parametrize("num_nodes", [2, 4])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.2])
@pytest.mark.parametrize("assignment", ["fixed", "locality"])
def test_each_byte_is_read_as_often_as_it_must_be(
    large: penstock.Dataset, tmp_path: Path, num_nodes: int, share: float, assignment: Any
) -> None:
    size = int(share * large.size_bytes / num_nodes)
    held = min(NUM_BLOBS, num_nodes * (size // BLOB_BYTES))
    bound = (NUM_BLOBS + 2 * (NUM_BLOBS - held)) * BLOB_BYTES
    # Neighbours in a tar are read together with the headers between them.
    most = 1.02 * bound + 2 * 3 * num_nodes * BLOB_BYTES
    options: dict[str, Any] = {"size": size, "assignment": assignment}
    stream, stats = sparingly(most, large, num_nodes, tmp_path, **options)
    assert stream == alone(large)
    assert bound <= sum(s.store_bytes for s in stats) + 2 * num_nodes * BLOB_BYTES
    assert share < 1 or sum(s.peer_bytes for s in stats) > 0


def shift(sample: dict[str, Any]) -> dict[str, Any]:
    return {"first": np.int64(sample["bin"][0]) + 1000}


def test_worker_processes_get_what_other_nodes_sent(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"transform": shift, "workers": 1, "epochs": 2}
    stream, _ = sparingly(1.02 * large.size_bytes + 4 * BLOB_BYTES, large, 2, tmp_path, **options)
    assert stream == alone(large, epochs=2)


def test_ranks_of_a_node_share_what_it_keeps(large: penstock.Dataset, tmp_path: Path) -> None:
    stream, _ = sparingly(
        1.02 * large.size_bytes + 8 * BLOB_BYTES,
        large,
        2,
        tmp_path,
        ranks_a_node=2,
        assignment="locality",
    )
    assert stream == alone(large)


def test_rows_of_several_arrays_come_from_several_nodes(tmp_path: Path) -> None:
    """A row is far smaller than what is kept as one, and its fields may be at home anywhere."""
    num_rows = 4000
    folder = tmp_path / "arrays"
    folder.mkdir()
    tokens = np.arange(num_rows * 64, dtype=np.int32).reshape(num_rows, 64)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "labels.npy", np.arange(num_rows, dtype=np.int64) * 7)
    dataset = penstock.open(folder, fields={"tokens": "tokens.npy", "labels": "labels.npy"})

    def look(batch: Any) -> None:
        assert (batch["tokens"] == tokens[batch.ids]).all()
        assert (batch["labels"] == batch.ids * 7).all()

    options: dict[str, Any] = {"global_batch_size": 64, "epochs": 2, "look": look}
    # Of each node only half fits: nothing is kept twice.
    stream, stats = together(dataset, 2, tmp_path, size=int(0.6 * dataset.size_bytes), **options)
    assert stream == alone(dataset, **options)
    # On a busy machine some answers are late, and asked of the store beside.
    assert sum(s.store_bytes for s in stats) <= 1.2 * dataset.size_bytes
    # One epoch more or less of half the rows, and not of the runs they lie in.
    assert 0.5 * dataset.size_bytes < sum(s.peer_bytes for s in stats) < 1.5 * dataset.size_bytes


def test_blocks_come_whole_from_the_node_that_keeps_them(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = np.arange(6000)
    table = pa.table({"number": numbers, "text": [f"{i:0200}" for i in numbers]})
    (tmp_path / "parquet").mkdir()
    pq.write_table(table, tmp_path / "parquet" / "a.parquet", row_group_size=500, compression=None)
    dataset = penstock.open(tmp_path / "parquet")

    def look(batch: Any) -> None:
        assert (np.asarray(batch["number"]) == batch.ids).all()

    options: dict[str, Any] = {"global_batch_size": 100, "epochs": 2, "shuffle": "blocks"}
    size = int(0.7 * dataset.size_bytes)
    stream, stats = together(dataset, 2, tmp_path, size=size, look=look, **options)
    assert stream == alone(dataset, **options)
    assert sum(s.store_bytes for s in stats) <= 1.3 * dataset.size_bytes
    assert sum(s.peer_bytes for s in stats) > 0


def test_where_all_fits_everywhere_copies_come_from_nodes_and_not_from_the_store(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    _, stats = sparingly(
        1.02 * large.size_bytes + 9 * BLOB_BYTES,
        large,
        3,
        tmp_path,
        size=2 * large.size_bytes,
        epochs=6,
    )
    # After each node has had each sample once at most, nothing moves any more.
    assert sum(s.peer_bytes for s in stats) <= 2 * large.size_bytes


def test_a_mixture_is_one_cache_too(large: penstock.Dataset, tmp_path: Path) -> None:
    mixture = penstock.Mixture([large[:32], large[32:]], [0.5, 0.5])
    options: dict[str, Any] = {"look": lambda batch: None, "epochs": 2}
    stream, _ = sparingly(
        1.02 * large.size_bytes + 4 * BLOB_BYTES,
        mixture,
        2,
        tmp_path,
        size=large.size_bytes,
        **options,
    )
    assert stream == alone(mixture, **options)


def test_the_stream_goes_on_with_more_and_with_fewer_nodes(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    """What the nodes had is found again by those that are still there."""
    whole = alone(large, epochs=2)
    with penstock.Loader(large, global_batch_size=16, epochs=2, output="numpy") as loader:
        stream, batches = StreamHash(), iter(loader)
        for _ in range(3):
            batch = next(batches)
            stream = stream.update(batch.epoch, batch.positions, batch.ids, batch.mask)
        state = loader.state_dict()
    for num_nodes in (4, 2, 3):
        rest, _ = together(large, num_nodes, tmp_path, epochs=2, state=state)
        assert stream.merge(rest) == whole


def test_nodes_that_do_not_load_the_same_are_told(
    large: penstock.Dataset, blobs: penstock.Dataset, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(go, dataset, World(rank=rank, num_ranks=2, num_nodes=2), tmp_path)
            for rank, dataset in enumerate((large, large[:64]))
        ]
        errors = [run.exception(timeout=100) for run in runs]
    assert any(isinstance(e, OptionError) and "same" in str(e) for e in errors), errors


def test_peers_without_tiers_or_a_place_to_meet_say_what_to_do(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"give tiers=|start `penstock node`"):
        next(iter(penstock.Loader(large, batch_size=8, world=World(), peers=True)))
    world = World(rank=0, num_ranks=2, num_nodes=2)
    tiers = [Disk(tmp_path, "1GB")]
    with pytest.raises(OptionError, match="have to meet"):
        next(iter(penstock.Loader(large, batch_size=8, world=world, peers=True, tiers=tiers)))


def errors_of(loaders: list[penstock.Loader]) -> list[BaseException | None]:
    """Be all ranks up to the first batch; return how each ended."""

    def begin(loader: penstock.Loader) -> None:
        with loader:
            next(iter(loader))

    with ThreadPoolExecutor(len(loaders)) as pool:
        return [run.exception(timeout=60) for run in [pool.submit(begin, x) for x in loaders]]


def test_where_no_node_has_a_tier_all_say_so_at_once(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "peers": str(tmp_path / "meet")}
    worlds = [World(rank=rank, num_ranks=2, num_nodes=2) for rank in range(2)]
    errors = errors_of([penstock.Loader(large, world=world, **options) for world in worlds])
    assert all(isinstance(e, OptionError) and "give tiers=" in str(e) for e in errors), errors


def test_a_node_without_a_tier_reads_what_the_others_keep(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    def tierless(world: World) -> Any:
        return go(large, world, tmp_path, tiers=[] if world.node else [Disk(tmp_path, "1GB")])

    with ThreadPoolExecutor(2) as pool:
        worlds = [World(rank=rank, num_ranks=2, num_nodes=2) for rank in range(2)]
        (one, _), (other, stats) = pool.map(tierless, worlds, timeout=60)
    assert one.merge(other) == alone(large)
    assert stats.peer_bytes > 2 * stats.store_bytes


def test_ranks_that_begin_their_loaders_in_another_order_are_told(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    """Of one data set: what it is does not tell them apart."""
    options: dict[str, Any] = {"batch_size": 8, "peers": str(tmp_path / "meet")}
    loaders = [
        penstock.Loader(
            large,
            seed=rank,  # Each has begun the loader with this one first.
            world=World(rank=rank, num_ranks=2, num_nodes=2),
            tiers=[Disk(tmp_path / str(rank), "1GB")],
            **options,
        )
        for rank in range(2)
    ]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    errors = errors_of(loaders)
    assert all(isinstance(e, OptionError) and "the same order" in str(e) for e in errors), errors


def test_threads_are_named_for_what_they_do(large: penstock.Dataset, tmp_path: Path) -> None:
    seen: set[str] = set()
    together(
        large, 2, tmp_path, look=lambda batch: seen.update(t.name for t in enumerate_threads())
    )
    assert seen >= {"penstock-ask", "penstock-serve", "penstock-tend", "penstock-time"}, seen


@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_the_secret_does_not_stay_where_nodes_have_met(
    large: penstock.Dataset, tmp_path: Path, ranks_a_node: int
) -> None:
    together(large, 2, tmp_path, ranks_a_node=ranks_a_node, epochs=1)
    left = [path for path in (tmp_path / "meet").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} <= {"hello", "node"}, left


@given(
    lengths=st.lists(st.sampled_from([0, 1, 500, 999, 1000, 1001, 4100]), max_size=6),
    absent=st.sets(st.integers(0, 4)),
)
def test_what_is_larger_than_an_answer_comes_in_pieces(
    lengths: list[int], absent: set[int]
) -> None:
    """As if it had been one answer."""
    ranges = np.array([[7 + i, 0, n + 9, 9, n] for i, n in enumerate(lengths)], np.int64)
    ranges = ranges.reshape(-1, 5)
    into = memoryview(np.zeros(sum(lengths), np.uint8))
    found: list[Any] = []

    def ask_one(ask: Ask, view: memoryview, done: Any) -> None:
        assert len(view) == int(ask.ranges[:, 4].sum()) <= 1000
        at, gone = 0, []
        for number, (unit, _, size, inside, length) in enumerate(ask.ranges.tolist()):
            assert 9 <= inside <= inside + length <= size
            if unit - 7 in absent:
                gone.append(number)
            else:
                part = np.frombuffer(view, np.uint8)[at : at + length]
                part[:] = (np.arange(inside, inside + length) + unit) % 251
            at += length
        sums = tuple(0 if i in gone else 1000 for i in range(len(ask.ranges)))
        done(Answer(absent=tuple(gone), sums=sums, progress_mark=3, was_parked=False, seconds=1.0))

    ask = Ask(shelf=bytes(16), ranges=ranges)
    with mock.patch.object(peer_reads, "PIECE_BYTES", 1000):
        peer_reads.ask_in_pieces(ask, into, ask_one, found.append)
    (answer,) = found
    assert answer.absent == tuple(sorted(i for i in absent if i < len(lengths)))
    assert answer.sums == tuple(0 if i in absent else 1000 for i in range(len(lengths)))
    at = 0
    for i, length in enumerate(lengths):
        expected = (np.arange(9, 9 + length) + 7 + i) % 251
        if i not in absent:
            assert (np.frombuffer(into, np.uint8)[at : at + length] == expected).all()
        at += length


def test_homes_may_move_while_the_last_batch_of_an_epoch_is_planned(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    """A node that ends first counts as lost to the others, who go on to the end."""
    options: dict[str, Any] = {"global_batch_size": 40, "epochs": 4}
    world = {"num_ranks": 2, "num_nodes": 2}
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(go, large, World(rank=0, **world), tmp_path, limit=2, **options),
            pool.submit(go, large, World(rank=1, **world), tmp_path, **options),
        ]
        _, (stream, _) = [run.result(timeout=100) for run in runs]
    assert stream.num_samples == 4 * (20 + 20), "all of its own share"


def test_a_node_that_was_missed_takes_its_share_from_who_has_kept_it(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    """Others read the share of a node that stood still; it does not read it once more."""
    together(large, 2, tmp_path, epochs=2)  # Both hold everything now.
    shutil.rmtree(tmp_path / "node1")
    with mock.patch.object(SharedMembers, "was_missed", True):
        stream, stats = together(large, 2, tmp_path, epochs=1)
    assert stream == alone(large, epochs=1)
    # What is late on a busy machine is asked of the store beside; node 1's share is half.
    assert sum(s.store_bytes for s in stats) < 0.3 * large.size_bytes


@pytest.mark.parametrize("broken", ["wrong", "gone"])
def test_what_a_stand_in_does_not_send_right_comes_from_the_store(
    large: penstock.Dataset, tmp_path: Path, broken: str
) -> None:
    asked = Cluster.ask

    def ask(self: Cluster, source: str, ask: Ask, into: memoryview, **then: Any) -> None:
        def done(answer: Answer | PeerError) -> None:
            if broken == "wrong":
                into[:] = bytes(len(into))
            then["done"](PeerError("gone", kind="lost") if broken == "gone" else answer)

        asked(self, source, ask, into, parked=then["parked"], done=done)

    together(large, 2, tmp_path, epochs=2)
    shutil.rmtree(tmp_path / "node1")
    with (
        mock.patch.object(SharedMembers, "was_missed", True),
        mock.patch.object(Cluster, "ask", ask),
    ):
        stream, _ = together(large, 2, tmp_path, epochs=1)
    assert stream == alone(large, epochs=1)


@pytest.mark.parametrize("an_object", [1, 4])
def test_what_a_lost_peer_had_comes_right_from_any_number_of_objects(
    tmp_path: Path, an_object: int
) -> None:
    """Units that were asked of one peer lie in many objects; the store has to be asked for each."""
    for number in range(96 // an_object):
        numbers = range(number * an_object, (number + 1) * an_object)
        samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in numbers]
        write_tar(tmp_path / "many" / f"x-{number:03}.tar", samples, number * an_object)
    dataset = penstock.open(tmp_path / "many")
    asked = UnitsRead.ask

    def ask(self: UnitsRead, source: str, deferred: Any, answered: Any) -> None:
        # As if the peer had just gone, each second time.
        if sum(fill.unit for fill in self.fills) % 2:
            answered(PeerError("gone", kind="lost"))
        else:
            asked(self, source, deferred, answered)

    with mock.patch.object(UnitsRead, "ask", ask):
        stream, _ = together(dataset, 2, tmp_path, size=2 * dataset.size_bytes)
    assert stream == alone(dataset)
