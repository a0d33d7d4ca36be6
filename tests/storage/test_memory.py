from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from penstock.storage import MemoryStore, Store
from penstock.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = MemoryStore(uuid.uuid4().hex)
        yield store
        store.clear()


def test_stores_of_one_name_are_one_store() -> None:
    MemoryStore("same").write("x", b"1")
    assert MemoryStore("same").read("x") == b"1"
    MemoryStore("same").clear()
    assert list(MemoryStore("same").list()) == []


def test_a_written_buffer_can_be_used_again() -> None:
    store, buffer = MemoryStore("copy"), bytearray(b"before")
    store.write("x", buffer)
    buffer[:] = b"after!"
    assert store.read("x") == b"before"
    store.clear()
