"""The plug-in in the real DLIO: classes in this process, and whole runs of two ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import OptionError
from penstock.loader.dlio.ledger import LedgerEntry, read_ledgers
from penstock.loader.dlio.parse import array_of, fitted

pytest.importorskip("dlio_benchmark", reason="DLIO is not installed (docs/guides/dlio.md)")

NUM_FILES, BATCH_SIZE, NUM_EPOCHS = 24, 3, 2
WORKLOAD = """
model: tiny
framework: pytorch
workflow: {{generate_data: true, train: true, checkpoint: false}}
dataset: {{data_folder: {folder}/data, format: npz, num_files_train: 24, num_samples_per_file: 1,
  record_length: 20000, record_length_stdev: 3000, record_length_resize: 4096}}
reader: {{data_loader: pytorch, batch_size: 3, read_threads: 1, file_shuffle: seed,
  sample_shuffle: seed, data_loader_sampler: index,
  data_loader_classname: penstock.loader.dlio.loader.PenstockDataLoader}}
train: {{epochs: 2, computation_time: 0.001}}
output: {{folder: {folder}}}
"""


def run_dlio(folder: Path) -> None:
    """Generate a data set and train on it with two ranks, in DLIO's own program."""
    conf = folder / "conf" / "workload"
    conf.mkdir(parents=True)
    (conf / "tiny.yaml").write_text(WORKLOAD.format(folder=folder))
    mpirun = Path(sys.executable).parent / "mpirun"
    flags = "--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np 2"
    command = [mpirun, *flags.split(), sys.executable, "-m", "penstock.loader.dlio"]
    command += [f"--config-dir={conf.parent}", "workload=tiny", f"hydra.run.dir={folder}"]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def ids_of(entries: list[LedgerEntry]) -> list[int]:
    return [i for entry in entries for i in entry.ids]


def test_two_ranks_of_a_run_read_each_sample_once_in_each_epoch(tmp_path: Path) -> None:
    run_dlio(tmp_path)
    sizes = [p.stat().st_size for p in sorted((tmp_path / "data" / "train").glob("*.npz"))]
    assert len(set(sizes)) > 1
    entries = read_ledgers(tmp_path, "loader_train")
    for epoch in range(1, NUM_EPOCHS + 1):
        of_epoch = [entry for entry in entries if entry.epoch == epoch]
        assert len(of_epoch) == 2
        assert sorted(ids_of(of_epoch)) == list(range(NUM_FILES))
        for entry in of_epoch:
            assert entry.sizes_bytes == [sizes[i] for i in entry.ids]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metric"]["train_au_mean_percentage"] > 0


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[Any]:
    """DLIO's own arguments of a rank alone, with a data set of npz files."""
    from dlio_benchmark.common.enumerations import DataLoaderSampler, FormatType, Shuffle
    from dlio_benchmark.utils.config import ConfigArguments
    from dlio_benchmark.utils.utility import DLIOMPI

    train = tmp_path / "train"
    train.mkdir()
    draw = np.random.default_rng(3)
    for number in range(NUM_FILES):
        pixels = draw.integers(255, size=(100 + number, 90, 1), dtype=np.uint8)
        np.savez(train / f"img_{number:02}.npz", x=pixels, y=[0])
    DLIOMPI.reset()
    ConfigArguments.reset()
    DLIOMPI.get_instance().set_parent_values(0, 1)
    args = ConfigArguments.get_instance()
    args.format, args.sample_shuffle = FormatType.NPZ, Shuffle.SEED
    args.data_loader_sampler = DataLoaderSampler.INDEX
    args.data_folder = args.output_folder = str(tmp_path)
    args.batch_size, args.epochs, args.read_threads = BATCH_SIZE, NUM_EPOCHS, 0
    args.record_length, args.record_length_resize = 9000, 4096
    args.derive_configurations([str(p) for p in sorted(train.iterdir())], [])
    args.reconfigure(1)
    yield args
    DLIOMPI.reset()
    ConfigArguments.reset()


def loader_of(args: Any) -> Any:
    from dlio_benchmark.common.enumerations import DatasetType

    from penstock.loader.dlio.loader import PenstockDataLoader

    return PenstockDataLoader(args.format, DatasetType.TRAIN, 1)


def epochs_of(loader: Any) -> list[np.ndarray]:
    """Return all batches, taken as DLIO takes them."""
    loader.read()
    batches = []
    for _ in range(NUM_EPOCHS):
        batches += [np.asarray(batch) for batch in loader.next()]
        loader.finalize()
    return batches


def test_the_order_and_the_batches_are_those_of_dlios_torch_loader(
    arguments: Any, tmp_path: Path
) -> None:
    from dlio_benchmark.common.enumerations import DatasetType
    from dlio_benchmark.data_loader.torch_data_loader import TorchDataLoader

    from penstock.loader.dlio.reader import PenstockReader

    ours = epochs_of(loader_of(arguments))
    arguments.reader_class = PenstockReader
    theirs = epochs_of(TorchDataLoader(arguments.format, DatasetType.TRAIN, 1))
    # Without workers the reader's ledger is in the order in which DLIO's loader asks.
    ids = ids_of(read_ledgers(tmp_path, "loader_train"))
    assert ids == ids_of(read_ledgers(tmp_path, "reader_train"))
    assert ids != sorted(ids)
    assert np.array_equal(ours, theirs)


def test_a_batch_holds_the_bytes_of_its_own_samples(arguments: Any, tmp_path: Path) -> None:
    batches = epochs_of(loader_of(arguments))
    assert len(batches) == NUM_EPOCHS * NUM_FILES // BATCH_SIZE
    ids = ids_of(read_ledgers(tmp_path, "loader_train"))
    files = sorted((tmp_path / "train").iterdir())
    expected = [fitted(array_of(files[i].read_bytes(), "npz"), 64) for i in ids]
    assert np.array_equal(np.concatenate(batches), expected)


def test_data_that_dlio_has_generated_again_is_indexed_again(
    arguments: Any, tmp_path: Path
) -> None:
    loader_of(arguments).read()
    changed = tmp_path / "train" / "img_00.npz"
    np.savez(changed, x=np.zeros((64, 200, 1), np.uint8), y=[0])
    loader = loader_of(arguments)
    loader.read()
    list(loader.next())
    loader.finalize()
    (entry,) = read_ledgers(tmp_path, "loader_train")
    assert dict(zip(entry.ids, entry.sizes_bytes, strict=True))[0] == changed.stat().st_size


def test_what_the_plug_in_does_not_emulate_is_refused(arguments: Any) -> None:
    arguments.preprocess_time = 0.1
    with pytest.raises(OptionError, match=r"preprocess_time is 0\.1"):
        loader_of(arguments).read()
    arguments.preprocess_time, arguments.batch_size = 0.0, NUM_FILES + 1
    with pytest.raises(OptionError, match="no whole step"):
        loader_of(arguments).read()


@pytest.mark.parametrize("prefetch_size", [0, 2, 9])
def test_batches_ahead_are_those_that_dlios_torch_loader_has_in_flight(
    arguments: Any, prefetch_size: int
) -> None:
    from dlio_benchmark.common.enumerations import DatasetType
    from dlio_benchmark.data_loader.torch_data_loader import TorchDataLoader

    arguments.read_threads, arguments.prefetch_size = 2, prefetch_size
    arguments.multiprocessing_context = "fork"
    theirs = TorchDataLoader(arguments.format, DatasetType.TRAIN, 1)
    theirs.read()  # makes torch's loader; its workers would start with the first batch
    expected = theirs._dataset.num_workers * theirs._dataset.prefetch_factor
    assert loader_of(arguments)._batches_ahead() == expected


def test_the_first_step_waits_for_the_batches_ahead_and_later_steps_for_none() -> None:
    from penstock.loader.dlio.loader import _filled_first

    source = iter(range(6))
    steps = _filled_first(source, 4)  # type: ignore[arg-type]
    taken = [next(steps)]
    left = source.__length_hint__()  # type: ignore[attr-defined]
    assert left == 2
    taken += [next(steps) for _ in range(3)]
    assert source.__length_hint__() == left  # type: ignore[attr-defined]
    assert taken + list(steps) == list(range(6))
