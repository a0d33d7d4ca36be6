"""The same ten samples in six formats, opened by the same call and read by the same loader.

python examples/read_your_data.py
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path

import numpy as np

import penstock

TEXTS = [f"sample number {number}" for number in range(10)]


def write_files(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)


def write_tar(folder: Path) -> None:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def write_lines(folder: Path) -> None:
    (folder / "part.jsonl").write_text("\n".join(json.dumps({"txt": text}) for text in TEXTS))


def write_npy(folder: Path) -> None:
    np.save(folder / "part.npy", np.array(TEXTS, [("txt", "U24")]))


def write_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"txt": TEXTS})
    pyarrow.parquet.write_table(table, folder / "part.parquet", row_group_size=4)


def write_shards(folder: Path) -> None:
    with penstock.Writer(folder) as writer:
        for text in TEXTS:
            writer.write({"txt": text})


def main() -> None:
    order = [4, 0, 9]
    with tempfile.TemporaryDirectory() as name:
        for write in (write_files, write_tar, write_lines, write_npy, write_parquet, write_shards):
            folder = Path(name, write.__name__.removeprefix("write_"))
            folder.mkdir()
            write(folder)
            dataset = penstock.open(folder)
            (batch,) = penstock.Loader(dataset.select(order), batch_size=3, shuffle=None)
            found = [str(text) for text in batch["txt"]]
            assert found == [TEXTS[i] for i in order]
            how = dataset.parts[0].tables[0].addressing
            print(f"{folder.name:<8} {dataset.format:<8} by {how:<8} {found[0]!r}, …")


if __name__ == "__main__":
    main()
