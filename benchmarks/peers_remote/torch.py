"""PyTorch's DataLoader: an object for each sample, fetched over connections that stay open."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from torch.utils.data import DataLoader

from benchmarks.formats import file_of
from benchmarks.peers.torch import pack, unpack
from benchmarks.peers_remote import Opened
from benchmarks.remote import WORK

THREADS = 8


class Objects:
    """Samples by number; connections and threads are made in the worker that uses them."""

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc
        self.folder = PurePosixPath(urlsplit(url).path)
        self.mine = None

    def __len__(self) -> int:
        return WORK.num_samples

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        if self.mine is None:
            self.mine = threading.local()
        if not hasattr(self.mine, "connection"):
            self.mine.connection = HTTPConnection(self.host)
        self.mine.connection.request("GET", str(file_of(WORK, self.folder, i)))
        answer = self.mine.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise OSError(f"sample {i}: status {answer.status}")
        return data, i


class Threaded(Objects):
    """The same, a whole batch at a time."""

    pool = None

    def __getitems__(self, ids: list[int]) -> list[tuple[bytes, int]]:
        if self.pool is None:
            self.mine = threading.local()
            self.pool = ThreadPoolExecutor(THREADS)
        return list(self.pool.map(self.__getitem__, ids))


def open_loader(task: dict) -> Opened:
    workers, _, how = task["variant"].partition("-")
    loader = DataLoader(
        (Threaded if how else Objects)(task["url"]),
        WORK.batch_size,
        shuffle=True,
        collate_fn=pack,
        num_workers=int(workers[1:]),
        persistent_workers=True,
    )
    return Opened(start=lambda _: map(unpack, loader))
