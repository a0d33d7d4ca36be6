"""Loaders by importance, as a job of one rank or of several goes through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import penstock
from penstock import Importance, World

NUM_SAMPLES, BATCH, EPOCHS = 240, 12, 3
IMPORTANCE = Importance(window=60, score="loss")
Seen = list[tuple[Any, ...]]


def loss_of(ids: Any) -> Any:
    """Losses that depend on nothing but the sample: a few are much harder."""
    ids = np.asarray(ids)
    return (1 + (ids * 37 % 101) / 20 + 9 * (ids % 11 == 0)).astype(np.float32)


def loader_of(dataset: Any, **options: Any) -> penstock.Loader:
    options.setdefault("shuffle", IMPORTANCE)
    if "batch_size" not in options:
        options.setdefault("global_batch_size", BATCH)
    defaults = {"epochs": EPOCHS, "seed": 3, "workers": "here", "output": "numpy"}
    return penstock.Loader(dataset, **{**defaults, **options})


def seen_of(batch: Any) -> tuple[Any, ...]:
    mask = np.asarray(batch.mask)
    ids, weights = np.asarray(batch.ids)[mask], np.asarray(batch.weights)[mask]
    return batch.epoch, batch.step, tuple(ids.tolist()), tuple(weights.tolist())


def trained(
    loader: penstock.Loader,
    after: Callable[[int], None] = lambda number: None,
    loss: Callable[[Any], Any] = loss_of,
) -> Iterator[tuple[Any, ...]]:
    """Yield what a training loop was given, batch by batch."""
    for number, batch in enumerate(loader, 1):
        loader.observe(batch, loss(batch.ids))
        after(number)
        yield seen_of(batch)


def stream_of(loader: penstock.Loader) -> Seen:
    with loader:
        return list(trained(loader))


def as_ranks(
    dataset: Any, num_ranks: int, state: Any = None, limit: int | None = None, **options: Any
) -> tuple[list[Seen], list[Any]]:
    """Be all ranks of a job at once; return what each was given, and its state at the end."""
    loss = options.pop("loss", loss_of)

    def rank_of(rank: int) -> tuple[Seen, Any]:
        world = World(rank=rank, num_ranks=num_ranks)
        with loader_of(dataset, world=world, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen = list(itertools.islice(trained(loader, loss=loss), limit))
            return seen, loader.state_dict()

    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [pool.submit(rank_of, rank) for rank in range(num_ranks)]
        seen, states = zip(*(run.result(timeout=100) for run in runs), strict=True)
    return list(seen), list(states)


def joined(ranks: list[Seen]) -> Seen:
    """Return the global batches of all ranks."""
    out = []
    for shares in zip(*ranks, strict=True):
        assert len({(epoch, step) for epoch, step, _, _ in shares}) == 1
        ids, weights = (sum((share[i] for share in shares), ()) for i in (2, 3))
        out.append((*shares[0][:2], ids, weights))
    return out
