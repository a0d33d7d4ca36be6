"""What importance sampling tells people: hard samples, wrong labels, coverage, and a page."""

import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.engine.draw_summary import DrawSummary
from penstock.order import GlobalOrder
from penstock.order.importance import ImportanceCourse, ImportanceOrder, ScoreTable, StepLosses

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 2000, 50, 6
WRONG = np.arange(0, NUM_SAMPLES, 100)
"""Samples whose losses stay high, as those of wrong labels do."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> penstock.Dataset:
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "rows.npy", np.arange(NUM_SAMPLES))
    return penstock.open(folder)


def losses_of(ids: Any, epoch: int) -> Any:
    """Return losses that shrink, but for those of wrong labels, and differ at random."""
    ids = np.asarray(ids)
    noise = np.random.default_rng((7, epoch)).gamma(2.0, size=NUM_SAMPLES)[ids]
    return np.where(np.isin(ids, WRONG), 8 + noise, noise / (epoch + 1)).astype(np.float32)


def trained(dataset: penstock.Dataset, **options: Any) -> tuple[penstock.Loader, list[Any]]:
    """Return a loader after all epochs, and the ids that each of them has used."""
    options = {"score": "loss-rank", "workers": "here", **options}
    shuffle = penstock.Importance(window=0.25, score=options.pop("score"))
    loader = penstock.Loader(
        dataset, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=shuffle, output="numpy", **options
    )
    used: list[Any] = [[] for _ in range(EPOCHS)]
    for batch in loader:
        used[batch.epoch].append(batch.ids)
        loader.observe(batch, losses_of(batch.ids, batch.epoch))
    loader.close()
    return loader, [np.concatenate(ids) for ids in used]


# -- hard samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["loss-rank", "loss"])
def test_samples_that_stay_hardest_are_found(dataset: penstock.Dataset, score: str) -> None:
    loader, _ = trained(dataset, score=score)
    assert loader.importance is not None
    wrong = set(WRONG.tolist())
    hardest = set(loader.importance.hardest(len(wrong)).tolist())
    assert len(hardest & wrong) >= 0.9 * len(wrong)
    suspects = set(loader.importance.suspects().tolist())
    assert len(suspects & wrong) >= 0.8 * len(wrong)
    assert len(suspects) <= 0.02 * NUM_SAMPLES


def test_nothing_is_suspected_where_losses_are_equal(dataset: penstock.Dataset) -> None:
    shuffle = penstock.Importance(window=0.25, score="loss")
    loader = penstock.Loader(dataset, batch_size=BATCH_SIZE, epochs=5, shuffle=shuffle)
    assert loader.importance is not None
    assert loader.importance.suspects().tolist() == []
    for batch in loader:
        loader.observe(batch, np.ones(len(batch.ids)))
    assert loader.importance.suspects().tolist() == []


# -- coverage and drift ------------------------------------------------------------------------


def test_coverage_is_that_of_the_batches(dataset: penstock.Dataset) -> None:
    loader, used = trained(dataset)
    assert loader.importance is not None
    draws = loader.importance.seen().draws
    assert draws is not None
    told = pickle.loads(pickle.dumps(draws)).until(4 * EPOCHS - 1, EPOCHS - 1)
    assert [(e.epoch, e.num_draws, e.num_distinct) for e in told.epochs] == [
        (epoch, NUM_SAMPLES, len(np.unique(ids))) for epoch, ids in enumerate(used)
    ]
    assert told.num_windows == len(told.windows) == 4 * EPOCHS
    assert len(pickle.dumps(draws)) < NUM_SAMPLES * 2 + 4000  # Without a flag for each sample.


def test_windows_that_are_known_but_not_used_are_left_out() -> None:
    plain = GlobalOrder(num_samples=40, seed=1)
    course = ImportanceCourse(ImportanceOrder(plain=plain, options=penstock.Importance(window=0.5)))
    seen = DrawSummary()
    for _ in range(3):
        for window in course.known_windows:
            seen.add(course.draws(window))
        course.close_window()
    assert [w.window for w in seen.windows] == [0, 1, 2, 3]
    used = seen.until(1, 0)
    assert ([w.window for w in used.windows], used.num_windows, used.num_plain) == ([0, 1], 2, 2)
    assert [(e.epoch, e.num_distinct) for e in used.epochs] == [(0, 40)]


def test_drift_is_how_far_samples_have_moved() -> None:
    table, options, ids = ScoreTable(5), penstock.Importance(), np.arange(5)
    up, down = np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32)[::-1].copy()
    assert table.learn([StepLosses(ids, up)], options) is None
    assert table.learn([StepLosses(ids, up)], options) == 0
    # The ends swap (1, 1), their neighbours move half as far, the middle stays.
    assert table.learn([StepLosses(ids, down)], options) == pytest.approx(0.6, abs=1e-3)


# -- the page ----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Notes what a browser would fetch, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "data")]

    def handle_data(self, data: str) -> None:
        if self._tag in ("h1", "h2", "h3") and data.strip():
            self.headings.append(data.strip())


@pytest.mark.parametrize("workers", ["here", 1])
def test_the_page_has_everything_and_needs_nothing(
    dataset: penstock.Dataset, tmp_path: Path, workers: Any
) -> None:
    loader, used = trained(dataset, workers=workers)
    assert loader.importance is not None
    path = loader.importance.report(tmp_path / "report.html")
    text = path.read_text()
    page = Page(text)
    assert all(url.startswith(("#s", "data:,")) for url in page.fetched)
    assert page.headings == [
        "Importance sampling",
        "In short",
        "Samples",
        "How hard samples are",
        "How often samples would be drawn now",
        "Windows",
        "What the draws of a window are worth",
        "Drift of scores",
        "Coverage",
        "Distinct samples by epoch",
        "How often samples were scored",
        "Windows that were plain",
        "Hardest samples",
        "Suspected label errors",
    ]
    distinct = len(np.unique(used[-1]))
    assert f"Epoch {EPOCHS - 1} drew {distinct:,} of 2,000 samples in 2,000 draws" in text
    assert "<td>4</td><td>0–3</td>" in text  # Four windows of warm-up.
    suspects = loader.importance.suspects().tolist()
    assert f'<pre class="wrapped">{", ".join(map(str, suspects))}</pre>' in text


def test_there_is_a_page_before_anything_was_observed(
    dataset: penstock.Dataset, tmp_path: Path
) -> None:
    loader = penstock.Loader(dataset, batch_size=50, shuffle=penstock.Importance())
    assert loader.importance is not None
    text = loader.importance.report(tmp_path / "report.html").read_text()
    assert "No losses were observed yet." in text


def test_hits_stand_beside_what_was_possible(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((NUM_SAMPLES, 2500), np.uint8))
    dataset = penstock.open(tmp_path / "rows.npy")
    loader, _ = trained(dataset, tiers=[penstock.Memory("2MB", folder=str(tmp_path))])
    hits = loader.stats().cache_hits
    assert hits is not None
    assert loader.importance is not None
    text = loader.importance.report(tmp_path / "report.html").read_text()
    cells = r'<td class="left">{}</td><td>([0-9.]+)%</td>'
    for name, share in (
        ("this run", hits.share),
        (r"the most possible \(byte-MIN\)", hits.most_share),
    ):
        (found,) = re.findall(cells.format(name), text)
        assert float(found) / 100 == pytest.approx(share, rel=0.01)


def test_a_loader_with_scores_can_be_pickled(dataset: penstock.Dataset) -> None:
    loader, _ = trained(dataset)
    again = pickle.loads(pickle.dumps(loader))
    assert again.importance.table().digest() == loader.importance.table().digest()  # type: ignore[union-attr]
