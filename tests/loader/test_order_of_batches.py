"""What is delivered, in which order, on which rank: the promises that everything else stands on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import OptionError, StateError
from penstock.order import StreamHash

from .conftest import MakeRows


def delivered(loader: penstock.Loader, batches_max: int | None = None) -> list[Any]:
    out = []
    with loader:
        for batch in loader:
            out.append(batch)
            if len(out) == batches_max:
                break
    return out


def hash_of(loader: penstock.Loader, batches: list[Any]) -> StreamHash:
    """Hash of what one rank was given; positions are found by asking the order, not the loader."""
    total = StreamHash()
    for batch in batches:
        ids, mask = np.asarray(batch.ids), np.asarray(batch.mask)
        positions = loader.order.positions(batch.epoch, ids)
        total = total.update(batch.epoch, positions, ids, mask)
    return total


def loader_for(dataset: penstock.Dataset, rank: int, num_ranks: int, **options: Any) -> Any:
    world = penstock.World(rank=rank, num_ranks=num_ranks)
    settings = {"global_batch_size": 24, "seed": 7, "output": "numpy", "epochs": 2, "threads": 2}
    return penstock.Loader(dataset, world=world, **(settings | options))


@pytest.mark.parametrize("shuffle", ["global", "blocks", None])
@pytest.mark.parametrize("num_samples", [240, 251, 20])
def test_the_stream_is_the_same_on_any_number_of_ranks(
    make_rows: MakeRows, shuffle: Any, num_samples: int
) -> None:
    dataset = make_rows(num_samples)
    digests, steps = set(), set()
    for num_ranks in (1, 2, 3, 4, 8):
        total = StreamHash()
        for rank in range(num_ranks):
            loader = loader_for(dataset, rank, num_ranks, shuffle=shuffle)
            batches = delivered(loader)
            steps.add(len(batches))
            assert len(loader) == len(batches)
            total = total.merge(hash_of(loader, batches))
        assert total.num_samples == 2 * num_samples
        digests.add(total.hexdigest())
    assert len(digests) == 1
    assert len(steps) == 1


@settings(max_examples=25)
@given(
    stop=st.integers(0, 21),
    ranks_before=st.sampled_from([1, 2, 3, 4, 8]),
    ranks_after=st.sampled_from([1, 2, 3, 4, 8]),
    shuffle=st.sampled_from(["global", "blocks", None]),
)
def test_resuming_on_another_world_continues_the_same_stream(
    tmp_path_factory: pytest.TempPathFactory,
    stop: int,
    ranks_before: int,
    ranks_after: int,
    shuffle: Any,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "resumed"
    if not folder.exists():
        folder.mkdir()
        np.save(folder / "rows.npy", np.arange(251 * 4, dtype=np.int64).reshape(251, 4))
    dataset = penstock.open(folder)
    whole = loader_for(dataset, 0, 1, shuffle=shuffle)
    expected = hash_of(whole, delivered(whole))
    total, states = StreamHash(), []
    for rank in range(ranks_before):
        loader = loader_for(dataset, rank, ranks_before, shuffle=shuffle)
        batches = delivered(loader, stop) if stop else []
        total = total.merge(hash_of(loader, batches))
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states), "all ranks save the same state"
    for rank in range(ranks_after):
        loader = loader_for(dataset, rank, ranks_after, shuffle=shuffle)
        loader.load_state_dict(states[0])
        total = total.merge(hash_of(loader, delivered(loader)))
    assert total == expected


def test_a_state_can_be_saved_and_loaded_at_every_batch(make_rows: MakeRows) -> None:
    dataset = make_rows(50)
    options: dict[str, Any] = {"batch_size": 7, "seed": 3, "output": "numpy", "epochs": 2}
    all_ids = [b.ids.tolist() for b in delivered(penstock.Loader(dataset, **options))]
    with penstock.Loader(dataset, **options) as loader:
        for done, _ in enumerate(loader, start=1):
            state = json.loads(json.dumps(loader.state_dict()))
            resumed = penstock.Loader(dataset, **options)
            resumed.load_state_dict(state)
            # The state of the last batch of all is the beginning of the next two epochs.
            if done < len(all_ids):
                assert [b.ids.tolist() for b in delivered(resumed)] == all_ids[done:]


def test_a_state_counts_what_was_delivered_not_what_was_made_ahead(make_rows: MakeRows) -> None:
    with penstock.Loader(make_rows(1000), batch_size=10, output="numpy") as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert loader.state_dict()["position"] == 30


def test_a_state_is_small_and_plain(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(1000), batch_size=10)
    assert len(json.dumps(loader.state_dict()).replace(" ", "")) <= 160


def test_a_state_of_another_data_set_or_seed_is_refused(make_rows: MakeRows) -> None:
    state = penstock.Loader(make_rows(50), batch_size=5, seed=1).state_dict()
    with pytest.raises(StateError, match="data set"):
        penstock.Loader(make_rows(51), batch_size=5, seed=1).load_state_dict(state)
    dataset = make_rows(52)
    state = penstock.Loader(dataset, batch_size=5, seed=1).state_dict()
    with pytest.raises(StateError, match="seed"):
        penstock.Loader(dataset, batch_size=5, seed=2).load_state_dict(state)
    with pytest.raises(StateError, match="order"):
        penstock.Loader(dataset, batch_size=5, seed=1, shuffle="blocks").load_state_dict(state)


def test_the_last_batch_is_padded_and_masked_or_dropped(make_rows: MakeRows) -> None:
    dataset = make_rows(25)
    padded = delivered(penstock.Loader(dataset, batch_size=10, output="numpy"))
    assert [len(b.ids) for b in padded] == [10, 10, 10]
    assert padded[-1].mask.tolist() == [True] * 5 + [False] * 5
    assert padded[-1].ids[5:].tolist() == padded[0].ids[:5].tolist()
    dropped = delivered(penstock.Loader(dataset, batch_size=10, drop_last=True, output="numpy"))
    assert [b.mask.all() for b in dropped] == [True, True]


def test_each_epoch_has_an_order_of_its_own_and_iterating_again_goes_on(
    make_rows: MakeRows,
) -> None:
    dataset = make_rows(64)
    loader = penstock.Loader(dataset, batch_size=64, seed=5, output="numpy")
    first, second = (next(iter(delivered(loader))) for _ in range(2))
    assert (first.epoch, second.epoch) == (0, 1)
    assert sorted(first.ids) == sorted(second.ids) == list(range(64))
    assert first.ids.tolist() != second.ids.tolist()
    both = delivered(penstock.Loader(dataset, batch_size=64, seed=5, epochs=2, output="numpy"))
    assert [b.ids.tolist() for b in both] == [first.ids.tolist(), second.ids.tolist()]


def test_leaving_a_loop_early_begins_the_same_epoch_again(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(64), batch_size=8, seed=5, output="numpy")
    peek = next(iter(loader))
    whole = delivered(loader)
    assert whole[0].ids.tolist() == peek.ids.tolist()
    assert len(whole) == len(loader) == 8


def test_set_epoch_moves_and_does_not_undo_a_resume(make_rows: MakeRows) -> None:
    dataset = make_rows(64)
    loader = penstock.Loader(dataset, batch_size=8, seed=5, output="numpy")
    loader.set_epoch(3)
    assert delivered(loader)[0].epoch == 3
    resumed = penstock.Loader(dataset, batch_size=8, seed=5, output="numpy")
    resumed.load_state_dict(loader.state_dict() | {"epoch": 2, "position": 16})
    resumed.set_epoch(2)
    assert [b.step for b in delivered(resumed)] == [2, 3, 4, 5, 6, 7]


def test_kill_9_and_resume_delivers_the_same_stream(make_rows: MakeRows, tmp_path: Path) -> None:
    dataset = make_rows(500)
    whole = penstock.Loader(dataset, batch_size=8, seed=9, epochs=2, output="numpy")
    expected = [b.ids[b.mask].tolist() for b in delivered(whole)]
    program = """
import json, os, sys, penstock
loader = penstock.Loader(penstock.open(sys.argv[1]), batch_size=8, seed=9, epochs=2, output="numpy")
if os.path.exists(sys.argv[2]):
    loader.load_state_dict(json.load(open(sys.argv[2])))
for batch in loader:
    print(json.dumps(batch.ids[batch.mask].tolist()), flush=True)
    with open(sys.argv[2] + ".new", "w") as file:
        json.dump(loader.state_dict(), file)
    os.replace(sys.argv[2] + ".new", sys.argv[2])
    sys.stdin.readline()
"""
    got: list[list[int]] = []
    for stop_after in (1, 40, 30, None):
        process = subprocess.Popen(
            [sys.executable, "-c", program, dataset.uri, str(tmp_path / "state.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for done, line in enumerate(process.stdout, start=1):
            got.append(json.loads(line))
            if done == stop_after:
                # The state of this batch is not written yet or just written: resume sees either.
                os.kill(process.pid, signal.SIGKILL)
                break
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if stop_after is not None and (tmp_path / "state.json").exists():
            position = json.loads((tmp_path / "state.json").read_text())
            kept = (position["epoch"] * 504 + position["position"]) // 8
            got = got[:kept]
        elif stop_after is not None:
            got = []
    assert got == expected


def test_a_mixture_has_its_proportions_in_every_batch(make_rows: MakeRows) -> None:
    mixture = penstock.Mixture([make_rows(900), make_rows(100)], [0.5, 0.5])
    options: dict[str, Any] = {"global_batch_size": 32, "seed": 1, "output": "numpy"}
    batches = delivered(penstock.Loader(mixture, **options))
    assert len(batches) == 32
    for batch in batches:
        from_first = int((batch.ids[batch.mask] < 900).sum())
        assert abs(from_first - batch.mask.sum() / 2) <= 2
        local = np.where(batch.ids < 900, batch.ids, batch.ids - 900)
        assert (batch["data"][:, 0] == local * 16).all()
    small = np.concatenate([b.ids[b.mask & (b.ids >= 900)] for b in batches]) - 900
    uses = np.bincount(small, minlength=100)
    assert uses.max() - uses.min() <= 1, "no sample returns before all others were used"


def test_options_that_make_no_sense_are_refused(make_rows: MakeRows) -> None:
    dataset = make_rows(10)
    for wrong in (
        {},
        {"batch_size": 0},
        {"batch_size": 4, "global_batch_size": 8},
        {"batch_size": 4, "shuffle": "sideways"},
        {"batch_size": 4, "workers": "fibres"},
        {"batch_size": 4, "epochs": 0},
        {"batch_size": 4, "look_ahead": "lots"},
        {"batch_size": 4, "pad": {"data": 0}, "collate": list},
    ):
        with pytest.raises(OptionError):
            penstock.Loader(dataset, **wrong)
    with pytest.raises(TypeError, match="never ends"):
        len(penstock.Loader(dataset, batch_size=4, epochs=None))
    with pytest.raises(OptionError, match="empty"):
        penstock.Loader(dataset[:0], batch_size=4)
