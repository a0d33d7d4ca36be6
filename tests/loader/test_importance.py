"""Importance sampling in real loaders: one stream, whoever makes it and wherever it goes on."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Importance, World
from penstock.errors import StateError
from penstock.order import GlobalOrder

from .conftest import MakeRows
from .importance_loops import (
    BATCH,
    EPOCHS,
    NUM_SAMPLES,
    Seen,
    as_ranks,
    joined,
    loader_of,
    loss_of,
    seen_of,
    stream_of,
    trained,
)


@pytest.fixture
def rows(make_rows: MakeRows) -> penstock.Dataset:
    return make_rows(NUM_SAMPLES)


# -- the stream ------------------------------------------------------------------------------


def test_the_stream_is_the_same_whoever_makes_it(rows: penstock.Dataset) -> None:
    here = stream_of(loader_of(rows))
    assert any(weight != 1 for *_, weights in here for weight in weights)
    for workers in (1, 2):
        assert stream_of(loader_of(rows, workers=workers)) == here


def test_the_first_epoch_is_plain_and_later_ones_prefer_hard_samples(
    rows: penstock.Dataset,
) -> None:
    seen = stream_of(loader_of(rows))
    plain = GlobalOrder(num_samples=NUM_SAMPLES, seed=3)
    first = [i for epoch, _, ids, _ in seen for i in ids if epoch == 0]
    assert first == plain.ids(0, 0, NUM_SAMPLES).tolist()
    later = np.array([i for epoch, _, ids, _ in seen for i in ids if epoch > 0])
    counts = np.bincount(later, minlength=NUM_SAMPLES)
    hard = np.arange(NUM_SAMPLES) % 11 == 0
    assert counts[hard].mean() > 2 * counts[~hard].mean()


def test_batches_hold_the_rows_of_their_ids_and_floats_as_weights(rows: penstock.Dataset) -> None:
    with loader_of(rows, output="torch") as loader:
        for batch in loader:
            assert (batch["data"][:, 0] == batch.ids * 16).all()
            assert batch.weights.dtype.is_floating_point
            assert batch.weights.shape == batch.ids.shape
            loader.observe(batch, loss_of(batch.ids))


# -- resuming --------------------------------------------------------------------------------


def test_a_run_goes_on_exactly_after_any_batch(rows: penstock.Dataset) -> None:
    states: list[bytes] = []
    with loader_of(rows) as loader:
        states.append(pickle.dumps(loader.state_dict()))
        save = lambda number: states.append(pickle.dumps(loader.state_dict()))  # noqa: E731
        whole = list(trained(loader, save))
    assert len(states) == len(whole) + 1
    for number, state in enumerate(states[:-1]):
        with loader_of(rows) as loader:
            loader.load_state_dict(pickle.loads(state))
            # Two windows and what was queued: later draws follow from the same scores.
            assert list(itertools.islice(trained(loader), 16)) == whole[number : number + 16]
    with loader_of(rows) as loader:
        loader.load_state_dict(pickle.loads(states[17]))
        assert list(trained(loader)) == whole[17:]


def test_an_engine_that_is_killed_changes_nothing(rows: penstock.Dataset) -> None:
    whole = stream_of(loader_of(rows))
    with loader_of(rows, workers=1) as loader:

        def kill(number: int) -> None:
            if number in (7, 33):
                assert loader._client is not None
                os.kill(loader._client.engine_pid, signal.SIGKILL)

        assert list(trained(loader, kill)) == whole
        assert "another goes on" in str(loader.stats())


def test_leaving_the_loop_early_begins_the_epochs_again_with_all_that_was_learnt(
    rows: penstock.Dataset,
) -> None:
    def left_early(workers: Any) -> tuple[Seen, Any]:
        with loader_of(rows, workers=workers, epochs=2) as loader:
            first = list(itertools.islice(trained(loader), 31))
            assert loader.importance is not None
            learnt = int(loader.importance.table().num_seen.sum())
            again = list(trained(loader))
            assert [seen[:2] for seen in again] == [(e, s) for e in (0, 1) for s in range(20)]
            assert again[:20] == first[:20]  # The warm-up.
            return again, learnt

    here, learnt = left_early("here")
    assert learnt == 31 * BATCH
    assert left_early(1) == (here, learnt)


def test_an_epoch_that_is_set_is_drawn_from_what_is_known(rows: penstock.Dataset) -> None:
    with loader_of(rows, epochs=1) as loader:
        list(trained(loader))
        loader.set_epoch(5)
        seen = list(trained(loader))
    assert {epoch for epoch, *_ in seen} == {5}
    assert all(weight != 1 for _, _, _, weights in seen for weight in weights[:1])


# -- several ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_draws_do_not_depend_on_the_number_of_ranks(
    rows: penstock.Dataset, meeting_place: Path, num_ranks: int
) -> None:
    alone = stream_of(loader_of(rows))
    ranks, states = as_ranks(rows, num_ranks)
    assert joined(ranks) == alone
    for state in states[1:]:
        assert {k: np.asarray(v).tolist() for k, v in state["importance"].items()} == {
            k: np.asarray(v).tolist() for k, v in states[0]["importance"].items()
        }


def test_a_run_goes_on_with_another_number_of_ranks(
    rows: penstock.Dataset, meeting_place: Path
) -> None:
    alone = stream_of(loader_of(rows))
    state, done = None, 0
    for num_ranks, limit in ((2, 23), (3, 14), (1, None)):
        ranks, states = as_ranks(rows, num_ranks, state, limit)
        seen = joined(ranks)
        assert seen == alone[done : done + len(seen)]
        done, state = done + len(seen), states[-1]
    assert done == len(alone)


def test_losses_of_an_earlier_run_at_the_same_place_are_not_taken_for_those_of_this_one(
    rows: penstock.Dataset, meeting_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_ranks(rows, 2, loss=lambda ids: 100 - loss_of(ids))
    # As in processes of their own, which begin to count anew.
    monkeypatch.setattr("penstock.engine.opening._meetings", {})
    again, _ = as_ranks(rows, 2)
    assert joined(again) == stream_of(loader_of(rows))


def test_a_rank_that_forgets_to_observe_is_found_out(
    rows: penstock.Dataset, meeting_place: Path
) -> None:
    def rank_of(rank: int) -> int:
        with loader_of(rows, world=World(rank=rank, num_ranks=2)) as loader:
            for number, batch in enumerate(loader):
                if (rank, number) != (1, 5):
                    loader.observe(batch, loss_of(batch.ids))
        return rank

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(rank_of, rank) for rank in range(2)]
        for run in runs:
            with pytest.raises(StateError, match="observe for the same batches"):
                run.result(timeout=100)


def test_two_loaders_of_one_job_do_not_mix_their_losses(
    rows: penstock.Dataset, meeting_place: Path
) -> None:
    def rank_of(rank: int) -> list[Seen]:
        world = World(rank=rank, num_ranks=2)
        one, other = (loader_of(rows, world=world, seed=seed) for seed in (3, 4))
        with one, other:
            pairs = list(zip(trained(one), trained(other), strict=True))
            return [list(seen) for seen in zip(*pairs, strict=True)]

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(rank_of, range(2)))
    for place, seed in enumerate((3, 4)):
        alone = stream_of(loader_of(rows, seed=seed))
        assert joined([run[place] for run in runs]) == alone


# -- states ----------------------------------------------------------------------------------


def test_a_state_survives_torch_as_tensors(rows: penstock.Dataset, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = stream_of(loader_of(rows))
    with loader_of(rows) as loader:
        list(itertools.islice(trained(loader), 29))
        torch.save(loader.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(state["importance"]["score"], torch.Tensor)
    with loader_of(rows) as loader:
        loader.load_state_dict(state)
        assert list(trained(loader)) == whole[29:]
        assert loader.importance is not None
        assert loader.importance.num_observed == len(whole) - 29


_WITHOUT_TORCH = """
import pickle, sys
import numpy as np
import penstock

folder, place = sys.argv[1:3]
loader = penstock.Loader(
    penstock.open(folder), global_batch_size=12, epochs=3, seed=3, workers="here", output="numpy",
    shuffle=penstock.Importance(window=60, score="loss"),
)
for number, batch in enumerate(loader, 1):
    ids = batch.ids
    losses = (1 + (ids * 37 % 101) / 20 + 9 * (ids % 11 == 0)).astype(np.float32)
    loader.observe(batch, losses)
    if number == 29:
        break
state = loader.state_dict()
assert "torch" not in sys.modules
assert isinstance(state["importance"]["score"], np.ndarray)
with open(place, "wb") as file:
    pickle.dump(state, file)
"""


def test_a_state_of_a_process_without_torch_is_one_of_arrays(
    rows: penstock.Dataset, tmp_path: Path
) -> None:
    place = tmp_path / "state.pickle"
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path / "rows-240"), str(place)]
    subprocess.run(command, check=True, timeout=60)
    with loader_of(rows) as loader:
        loader.load_state_dict(pickle.loads(place.read_bytes()))
        assert list(trained(loader)) == stream_of(loader_of(rows))[29:]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(rows: penstock.Dataset) -> None:
    with loader_of(rows) as loader:
        list(itertools.islice(trained(loader), 9))
        state = loader.state_dict()
    with loader_of(rows) as loader:
        iteration = trained(loader)
        first = list(itertools.islice(iteration, 5))
        without = {k: v for k, v in state.items() if k != "importance"}
        scores = dict(state["importance"])
        del scores["losses"]
        for bad in (without, {**state, "importance": scores}):
            with pytest.raises(StateError, match=r"saved (state|scores)"):
                loader.load_state_dict(bad)
        assert [*first, *iteration] == stream_of(loader_of(rows))
    other = Importance(window=60, score="loss", floor=0.3)
    for shuffle, way_out in (
        (other, "give the window, floor, score and warmup that it was saved with"),
        ("global", r"give it shuffle=penstock.Importance"),
    ):
        with (
            loader_of(rows, shuffle=shuffle) as loader,
            pytest.raises(StateError, match=way_out),
        ):
            loader.load_state_dict(state)
    with (
        loader_of(rows, shuffle="global") as plain,
        loader_of(rows) as loader,
        pytest.raises(StateError, match="give it shuffle='global'"),
    ):
        loader.load_state_dict(plain.state_dict())


def test_a_copy_of_a_loader_has_its_scores_and_its_place(rows: penstock.Dataset) -> None:
    whole = stream_of(loader_of(rows))
    with loader_of(rows) as loader:
        list(itertools.islice(trained(loader), 29))
        state = loader.state_dict()
        copy = pickle.loads(pickle.dumps(loader))
    with copy:
        assert np.array_equal(copy.importance.table().score, loader.importance.table().score)
        copy.load_state_dict(state)
        assert list(trained(copy)) == whole[29:]


# -- ends of epochs, stages, mixtures --------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_padding_weighs_nothing_and_is_never_scored(
    make_rows: MakeRows, meeting_place: Path, num_ranks: int
) -> None:
    rows = make_rows(131)
    padded = []

    def loss(ids: Any) -> Any:
        return loss_of(ids)

    def rank_of(rank: int) -> int:
        world = World(rank=rank, num_ranks=num_ranks)
        with loader_of(rows, world=world, shuffle=Importance(window=33, score="loss")) as loader:
            for batch in loader:
                assert (batch.weights[~batch.mask] == 0).all()
                assert (batch.weights[batch.mask] > 0).all()
                losses = np.where(batch.mask, loss(batch.ids), 1e9).astype(np.float32)
                padded.extend(batch.ids[~batch.mask].tolist())
                loader.observe(batch, losses)
            assert loader.importance is not None
            return int(loader.importance.table().score.max())

    with ThreadPoolExecutor(num_ranks) as pool:
        highest = list(pool.map(rank_of, range(num_ranks)))
    assert padded
    assert set(highest) == {round(4096 * float(loss_of(np.arange(131)).max()))}


def test_an_incomplete_last_batch_can_be_left_out(make_rows: MakeRows) -> None:
    rows, shuffle = make_rows(131), Importance(window=33, score="loss")
    seen = stream_of(loader_of(rows, drop_last=True, shuffle=shuffle))
    assert {len(ids) for _, _, ids, _ in seen} == {BATCH}
    assert len(seen) == EPOCHS * (131 // BATCH)
    assert stream_of(loader_of(rows, drop_last=True, shuffle=shuffle, workers=1)) == seen


@pytest.mark.parametrize(
    ("num_samples", "options"),
    [
        (1, {"global_batch_size": 4}),
        (7, {"global_batch_size": 3, "shuffle": Importance(window=3, warmup=0)}),
        (50, {"global_batch_size": 50, "shuffle": Importance(window=1)}),
        (50, {"global_batch_size": 7, "shuffle": Importance(window=7, score="loss")}),
        (50, {"global_batch_size": 7, "shuffle": Importance(window=1, score="loss")}),
    ],
)
def test_tiny_data_sets_and_odd_windows_come_to_their_end(
    make_rows: MakeRows, num_samples: int, options: dict[str, Any]
) -> None:
    rows = make_rows(num_samples)
    seen = stream_of(loader_of(rows, epochs=5, **options))
    assert sum(len(ids) for _, _, ids, _ in seen) == 5 * num_samples
    assert stream_of(loader_of(rows, epochs=5, workers=1, **options)) == seen


@pytest.mark.parametrize("workers", ["here", 1])
def test_stages_give_the_same_stream_however_far_they_run_ahead(
    rows: penstock.Dataset, workers: Any
) -> None:
    whole = stream_of(loader_of(rows))
    with loader_of(rows, workers=workers) as loader:
        stages, seen = loader.stages(), []
        made: list[Any] = []
        tickets: list[Any] = []

        def run_ahead() -> None:
            """A lane of its own fetches as soon as something is known."""
            while True:
                try:
                    tickets.append(stages.fetch())
                except StopIteration:
                    return

        lane = threading.Thread(target=run_ahead)
        lane.start()
        while len(seen) < len(whole):
            # Everything that is fetched is made before the oldest batch is used.
            while tickets:
                made.append(stages.decode(tickets.pop(0)))
            if made:
                batch = made.pop(0)
                stages.used()
                loader.observe(batch, loss_of(batch.ids))
                seen.append(seen_of(batch))
            elif not tickets:
                lane.join(0.001)
        lane.join(30)
        assert not lane.is_alive()
    assert [each[:2] for each in seen] == [each[:2] for each in whole]
    assert seen == whole


def test_a_mixture_keeps_its_shares(tmp_path: Path, make_rows: MakeRows) -> None:
    mixture = penstock.Mixture([make_rows(100), make_rows(160)], weights=[3, 1])
    options: dict[str, Any] = {"shuffle": Importance(window=65, score="loss")}
    seen = stream_of(loader_of(mixture, **options))
    ids = np.array([i for epoch, _, ids, _ in seen for i in ids if epoch == 2])
    assert len(ids) == 260
    assert abs(int((ids < 100).sum()) - 195) <= 4
    assert any(weight != 1 for *_, weights in seen for weight in weights)
    assert stream_of(loader_of(mixture, workers=1, **options)) == seen
