"""Every argument of `Loader`, `IterableDataset` and `Mixture`: it works as meant, or says so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import OptionError, StateError

from .conftest import MakeRows


@pytest.fixture
def rows(make_rows: MakeRows) -> penstock.Dataset:
    return make_rows(20)


def view_of(dataset: Any, **options: Any) -> Any:
    pytest.importorskip("torch")
    from penstock.torch import IterableDataset

    return IterableDataset(dataset, **options)


BOTH = [
    ({"batch_size": 2.0}, r"batch_size must be a whole number, got 2\.0"),
    ({"batch_size": "32"}, r"batch_size must be a whole number, got '32'"),
    ({"batch_size": True}, r"batch_size must be a whole number, got True"),
    ({"batch_size": np.True_}, r"batch_size must be a whole number, got np\.True_"),
    ({"batch_size": -1}, r"batch_size must be at least 1, got -1"),
    ({"batch_size": None}, r"give batch_size .* or global_batch_size"),
    ({"global_batch_size": 8}, r"one of them; got 4 and 8"),
    ({"batch_size": None, "global_batch_size": 0}, r"global_batch_size must be at least 1"),
    ({"epochs": 2.5}, r"epochs must be a whole number, got 2\.5; None never ends"),
    ({"epochs": float("inf")}, r"epochs must be a whole number, got inf; None never ends"),
    ({"epochs": 0}, r"epochs must be at least 1, got 0; None never ends"),
    ({"epochs": True}, r"epochs must be a whole number"),
    ({"seed": None}, r"seed=None: without a seed no run could be resumed.*give a number"),
    ({"seed": -1}, r"seed must be at least 0, got -1"),
    ({"seed": 1.0}, r"seed must be a whole number, got 1\.0"),
    ({"seed": "7"}, r"seed must be a whole number, got '7'"),
    ({"seed": 2**64}, r"at most 18446744073709551615"),
    ({"shuffle": "sideways"}, r"'sideways': there are 'global' \(or True\), 'blocks'"),
    ({"shuffle": 1}, r"shuffle=1: there are"),
    ({"shuffle": ["global"]}, r"shuffle=\['global'\]: there are"),
    ({"drop_last": "yes"}, r"drop_last must be True or False, got 'yes'"),
    ({"drop_last": None}, r"drop_last must be True or False"),
    ({"world": 4}, r"world must be a penstock\.World\(rank=…, num_ranks=…\), got 4"),
    ({"transform": [abs]}, r"transform must be a function, got \["),
    ({"collate": "list"}, r"collate must be a function, got 'list'"),
    ({"collate": list, "pad": {"data": 0}}, r"with collate= you join yourself"),
    ({"pad": 0}, r'such as pad=\{"tokens": 0\}; got 0'),
    ({"pad": {"data": None}}, r'such as pad=\{"tokens": 0\}; got \{\'data\': None\}'),
    ({"pad": {"txt": 0}}, r"pad= names a field 'txt', samples have: data"),
    ({"threads": 0}, r"threads must be at least 1"),
    ({"threads": 1.5}, r"threads must be a whole number"),
    ({"tiers": None}, r"tiers=None: a tier is a place and a size"),
    ({"tiers": "8GB"}, r"tiers='8GB': a tier is a place and a size"),
    ({"look_ahead": "lots"}, r"'lots' is not a size"),
    ({"look_ahead": 2e9}, r"must be a whole number, got 2000000000\.0; write for example 128MB"),
    ({"look_ahead": -5}, r"must be at least 0, got -5"),
    ({"look_ahead": 0}, r"look_ahead must be at least 1"),
    ({"output": "jax"}, r"output='jax': there are 'auto', 'torch' and 'numpy'"),
    ({"output": None}, r"output=None: there are"),
]
LOADER = [
    ({"workers": 0}, r"workers must be at least 1.*number of worker processes"),
    ({"workers": "process"}, r"workers='process' is called workers='processes' now"),
    ({"assignment": "near"}, r"assignment='near': there are 'fixed' and 'locality'"),
    ({"peers": None}, r"peers.* must be True or False, got None"),
    ({"trace": True}, r"trace must be the name of a folder to record in, got True"),
]
VIEW = [
    ({"workers": "process"}, r"give that num_workers="),
    ({"num_workers": 4}, r"no option 'num_workers': It has samples, world, batch_size"),
    ({"peers": True}, r"use penstock\.Loader for peers="),
    ({"trace": "run"}, r"use it for trace="),
    ({"samples": 1}, r"samples must be True or False"),
    ({"samples": True, "pad": {"data": 0}}, r"give it collate_fn="),
]


@pytest.mark.parametrize(("options", "message"), BOTH + LOADER)
def test_a_loader_refuses(rows: penstock.Dataset, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        penstock.Loader(rows, **{"batch_size": 4, **options})


@pytest.mark.parametrize(("options", "message"), BOTH + VIEW)
def test_a_view_refuses(rows: penstock.Dataset, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        view_of(rows, **{"batch_size": 4, **options})


WORKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"batch_size": np.int64(4)}, {}),
    ({"batch_size": np.uint8(4)}, {}),
    ({"batch_size": None, "global_batch_size": np.int32(4)}, {}),
    ({"epochs": np.int64(1)}, {}),
    ({"seed": np.int64(7)}, {"seed": 7}),
    ({"seed": np.uint64(2**64 - 1)}, {"seed": 2**64 - 1}),
    ({"shuffle": True}, {"shuffle": "global"}),
    ({"shuffle": False}, {"shuffle": None}),
    ({"shuffle": np.False_}, {"shuffle": None}),
    ({"shuffle": "sequential"}, {"shuffle": None}),
    ({"drop_last": np.True_}, {"drop_last": True}),
    ({"world": penstock.World(np.int64(0), np.int64(1))}, {}),
    ({"threads": np.int64(1)}, {}),
    ({"tiers": []}, {}),
    ({"pad": None}, {}),
    ({"look_ahead": np.int64(10**6)}, {}),
    ({"look_ahead": "1MB"}, {}),
]


@pytest.mark.parametrize(("options", "same"), WORKS)
def test_it_works_as_meant(
    rows: penstock.Dataset, options: dict[str, Any], same: dict[str, Any]
) -> None:
    """It delivers what plain values deliver, and its states are JSON that either can load."""
    loader = penstock.Loader(rows, **{"batch_size": 4, **options})
    plain = penstock.Loader(rows, batch_size=4, **same)
    view = view_of(rows, **{"batch_size": 4, **options})
    expected = [batch.ids.tolist() for batch in plain]
    assert [batch.ids.tolist() for batch in loader] == expected
    assert [batch.ids.tolist() for batch in view] == expected
    for state in (loader.state_dict(), view.state_dict()):
        assert json.loads(json.dumps(state)) == state
        assert {type(value) for value in state.values()} <= {int, str}
        plain.load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("train/", r"'train/' is a name.*penstock\.Loader\(penstock\.open\('train/'\), …\)"),
        (Path("train"), r"penstock\.open\('train'\)"),
        (None, r"penstock\.open returns.*got NoneType"),
        ([{"x": 1}], r"penstock\.open returns.*got list"),
    ],
)
def test_a_loader_reads_data_sets_only(wrong: Any, message: str) -> None:
    for make in (penstock.Loader, view_of):
        with pytest.raises(OptionError, match=message):
            make(wrong, batch_size=4)


def test_several_data_sets_are_a_mixture(rows: penstock.Dataset) -> None:
    with pytest.raises(OptionError, match=r"penstock\.Mixture\(\[…\]\)"):
        penstock.Loader([rows, rows], batch_size=4)  # type: ignore[arg-type]


# -- mixtures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: penstock.Mixture([]), r"not empty, got none"),
        (lambda a, b: penstock.Mixture({}), r"not empty, got none"),
        (lambda a, b: penstock.Mixture([a, b[:0]]), r"not empty; number 1 is"),
        (lambda a, b: penstock.Mixture(a), r"\[first, second\] or \{first: weight\}"),
        (lambda a, b: penstock.Mixture("train"), r"takes several data sets.*'train'"),
        (lambda a, b: penstock.Mixture([a, "b/"]), r"'b/' is a name.*penstock\.open\('b/'\)"),
        (lambda a, b: penstock.Mixture({"a/": 0.5}), r"made of data sets.*got float"),
        (lambda a, b: penstock.Mixture([a, penstock.Mixture([b])]), r"mix all data sets in one"),
        (lambda a, b: penstock.Mixture([a, b], [1]), r"1 weights for 2 data sets"),
        (lambda a, b: penstock.Mixture([a, b], [0, 0]), r"all weights are 0"),
        (lambda a, b: penstock.Mixture([a, b], [1, -1]), r"a weight.*from 0 on, got -1"),
        (lambda a, b: penstock.Mixture([a, b], [1, float("nan")]), r"finite number.*got nan"),
        (lambda a, b: penstock.Mixture([a, b], [1, "2"]), r"a weight must be a number, got '2'"),
        (lambda a, b: penstock.Mixture([a, b], [1, None]), r"a weight must be a number, got None"),
        (lambda a, b: penstock.Mixture([a, b], 0.5), r"one number for each data set, got 0\.5"),
        (lambda a, b: penstock.Mixture([a, b], {"a": 1}), r"one number for each data set"),
        (lambda a, b: penstock.Mixture({a: 1, b: 2}, [1, 2]), r"weights are given twice"),
        (
            lambda a, b: penstock.Mixture({"a": a, "b": b}, {"a": 1}),
            r"weights are for \['a'\], data sets are \['a', 'b'\]",
        ),
        (lambda a, b: penstock.Mixture([a, b], samples_per_epoch=0), r"at least 1, got 0"),
        (lambda a, b: penstock.Mixture([a, b], samples_per_epoch=9.5), r"whole number, got 9\.5"),
    ],
)
def test_a_mixture_refuses(rows: penstock.Dataset, make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(rows[:10], rows[10:])


def test_a_mixture_may_be_written_in_any_of_these_ways(rows: penstock.Dataset) -> None:
    a, b = rows[:10], rows[10:]

    def stream(mixture: penstock.Mixture) -> list[int]:
        return [i for batch in penstock.Loader(mixture, batch_size=5) for i in batch.ids.tolist()]

    expected = stream(penstock.Mixture([a, b], [0.7, 0.3]))
    for other in (
        penstock.Mixture({a: 0.7, b: 0.3}),
        penstock.Mixture({"a": a, "b": b}, {"b": 0.3, "a": 0.7}),
        penstock.Mixture({"a": a, "b": b}, [0.7, 0.3]),
        penstock.Mixture((a, b), np.array([0.7, 0.3], np.float32)),
        penstock.Mixture([a, b], [np.int64(7), 3], samples_per_epoch=np.int64(20)),
    ):
        assert stream(other) == expected
        json.dumps(penstock.Loader(other, batch_size=5).state_dict())


def test_a_data_set_of_weight_0_is_never_drawn(rows: penstock.Dataset) -> None:
    a, b = rows[:10], rows[10:]
    mixture = penstock.Mixture([a, b, a], [1, 0, 2])
    loader = penstock.Loader(mixture, batch_size=6)
    ids = np.concatenate([np.asarray(batch.ids)[np.asarray(batch.mask)] for batch in loader])
    assert len(ids) == 30
    assert not ((ids >= 10) & (ids < 20)).any()
    assert loader.order.positions(0, [15]).tolist() == [-1]


@pytest.mark.parametrize("shuffle", [None, False, "blocks"])
def test_a_mixture_is_drawn_at_random(rows: penstock.Dataset, shuffle: Any) -> None:
    with pytest.raises(OptionError, match="leave out shuffle="):
        penstock.Loader(penstock.Mixture([rows]), batch_size=4, shuffle=shuffle)


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ({"seed": 7}, {"shuffle": None}, "for order shuffle='global'.* has shuffle=None; give it"),
        ({"shuffle": None}, {"seed": 7}, "for order shuffle=None.* has shuffle='global'; give it"),
        ({"shuffle": "blocks"}, {}, "for order shuffle='blocks'.*; give it shuffle='blocks'"),
        ({"seed": 7}, {"seed": 8}, "for seed 7, this run has 8; give seed=7"),
        ({"mix": [1, 1]}, {}, "for order a Mixture, this run has shuffle='global'"),
        ({"mix": [1, 1]}, {"mix": [1, 2]}, "give the weights, samples_per_epoch and global_b"),
        ({}, {"part": 10}, "for data set [0-9a-f]{32}, this run has [0-9a-f]{32}; open the data"),
    ],
)
def test_a_state_of_another_run_says_what_differs(
    rows: penstock.Dataset, saved: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    def made(make: Any, mix: Any = None, part: int = 20, **options: Any) -> Any:
        dataset = rows if part == 20 else rows[:part]
        source = dataset if mix is None else penstock.Mixture([dataset[:10], dataset[10:]], mix)
        return make(source, batch_size=20, **options)

    loader = made(penstock.Loader, **saved)
    loader.set_epoch(np.int64(3))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["epoch"] == 3
    for make in (penstock.Loader, view_of):
        with pytest.raises(StateError, match=f"{message}.*or begin a new run"):
            made(make, **now).load_state_dict(state)
        made(make, **saved).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"no state of a Penstock loader.*it has \[\]"),
        ({"model": 1}, r"it has \['model'\]"),
        (None, r"it has NoneType"),
        ({"epoch": 1.5}, r"damaged: epoch must be a whole number, got 1\.5"),
        ({"position": True}, r"damaged: position must be a whole number, got True"),
        ({"position": 21}, r"position 21 lies beyond an epoch of 20"),
    ],
)
def test_what_is_no_state_says_so(rows: penstock.Dataset, state: Any, message: str) -> None:
    for make in (penstock.Loader, view_of):
        loader = make(rows, batch_size=4)
        is_part = state and ("epoch" in state or "position" in state)
        with pytest.raises(StateError, match=message):
            loader.load_state_dict({**loader.state_dict(), **state} if is_part else state)


@pytest.mark.parametrize("epoch", [-1, 1.0, None, "1"])
def test_epochs_are_whole_numbers(rows: penstock.Dataset, epoch: Any) -> None:
    for make in (penstock.Loader, view_of):
        with pytest.raises(OptionError, match="epoch must be"):
            make(rows, batch_size=4).set_epoch(epoch)


def grown(folder: Path, number: int) -> penstock.Dataset:
    with penstock.Writer(folder, append=number > 0) as writer:
        for i in range(20):
            writer.write({"label": np.int64(number * 20 + i)})
    return penstock.open(folder)


def test_a_state_of_an_older_version_is_gone_on_with_in_that_version(tmp_path: Path) -> None:
    loader = penstock.Loader(grown(tmp_path / "set", 0), batch_size=8)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [batch.ids.tolist() for batch in batches]
    newest = grown(tmp_path / "set", 1)
    view = view_of(newest, batch_size=8)
    view.load_state_dict(state)
    assert [batch.ids.tolist() for batch in view] == expected
    resumed = penstock.Loader(newest, batch_size=8, seed=1)
    with pytest.raises(StateError, match="seed"):
        resumed.load_state_dict(state)
    assert len(resumed.dataset) == 40, "a state that is refused changes nothing"


# -- printing --------------------------------------------------------------------------------------


def test_a_batch_prints_what_it_is_and_not_what_it_holds(rows: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        n = int(sample["data"][0]) // 16
        return {"x": sample["data"], "bin": b"a" * (n % 2), "txt": "no", "target": {"n": n}}

    loader = penstock.Loader(rows, batch_size=4, shuffle=None, transform=transform, output="numpy")
    assert repr(next(iter(loader))) == (
        "Batch of 4 samples, epoch 0, step 0\n"
        "  x       int32 [4, 16]\n"
        "  bin     list of 4: uint8 [0], uint8 [1]\n"
        "  txt     list of 4: str\n"
        "  target  list of 4: dict\n"
        "  ids     int64 [4]\n"
        "  mask    bool [4]"
    )
    assert "Batch, epoch 0, step 0" in repr(penstock.Batch())


def test_a_loader_prints_its_options(rows: penstock.Dataset) -> None:
    loader = penstock.Loader(rows, global_batch_size=4, shuffle=False, seed=3)
    shown = repr(loader)
    assert (
        "global_batch_size=4, epochs=1, seed=3, shuffle=None, at epoch 0, position 0 of 20" in shown
    )
