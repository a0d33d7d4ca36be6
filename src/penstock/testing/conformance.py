"""What every store must do, as tests.

Derive from `StoreConformance` and give it a `store` fixture; for a store that cannot be written,
derive from `ReadConformance` and give it a `filled` fixture that holds `OBJECTS`:

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import ChangedError, ExistsError, NotFoundError
from penstock.storage.base import Store
from penstock.testing.forks import in_child
from penstock.testing.read_conformance import OBJECTS, ReadConformance, some_bytes

__all__ = ["OBJECTS", "ReadConformance", "StoreConformance", "fill", "some_bytes"]


def fill(store: Store) -> Store:
    """Write `OBJECTS` into a store and return it."""
    for key, data in OBJECTS.items():
        store.write(key, data)
    return store


class StoreConformance(ReadConformance):
    """What holds for a store that can be written and listed."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Give an empty store."""
        raise NotImplementedError("override the fixture `store`")

    @pytest.fixture
    def filled(self, store: Store) -> Store:
        """Fill the store with `OBJECTS`."""
        return fill(store)

    def test_a_listing_is_complete_and_sorted(self, filled: Store) -> None:
        """By the characters of the whole key, so `-` comes before `/`."""
        listed = list(filled.list())
        assert [info.key for info in listed] == sorted(OBJECTS)
        assert all(info.size_bytes == len(OBJECTS[info.key]) for info in listed)

    @pytest.mark.parametrize(
        "prefix", ["folder", "folder/", "folder/in", "with", "a.bin", "x", "x/"]
    )
    def test_a_prefix_is_a_beginning_of_the_key(self, filled: Store, prefix: str) -> None:
        """Not a whole part of it."""
        listed = [info.key for info in filled.list(prefix)]
        assert listed == sorted(key for key in OBJECTS if key.startswith(prefix))

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """And that is no error."""
        assert list(store.list()) == []

    def test_write_returns_what_info_says(self, store: Store) -> None:
        """The same size and, where there is one, the same mark."""
        written = store.write("x/y", b"hello")
        found = store.info("x/y")
        assert (written.key, written.size_bytes) == (found.key, found.size_bytes) == ("x/y", 5)
        assert written.etag == found.etag

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_all_kinds_of_buffers_can_be_written(self, store: Store, kind: type) -> None:
        """Anything that exposes its bytes."""
        store.write("x", kind(b"hello"))
        assert bytes(store.read("x")) == b"hello"

    def test_a_second_write_replaces_the_first(self, store: Store) -> None:
        """Also for ranges, also when a file was open."""
        store.write("x", b"first, longer")
        assert bytes(store.read_range(store.info("x"), 0, 5)) == b"first"
        store.write("x", b"second")
        assert bytes(store.read("x")) == b"second"
        assert bytes(store.read_range(store.info("x"), 0, 6)) == b"second"

    @pytest.mark.parametrize("data", [b"other", b"longer than before", b"four"])
    def test_an_object_that_was_replaced_is_not_read_in_part(
        self, store: Store, data: bytes
    ) -> None:
        """Whatever its size is now, and from the first byte on."""
        store.write("x", b"first")
        known = store.info("x")
        assert bytes(store.read_range(known, 1, 2)) == b"ir"
        store.write("x", data)
        for length in (0, 2, 5):
            with pytest.raises(ChangedError, match="x is not the object that was indexed"):
                store.read_range(known, 0, length)
        target = bytearray(2)
        with pytest.raises(ChangedError, match=f"5 bytes.*then, {len(data)} bytes.*now.*rebuild"):
            store.read_into(known, 3, memoryview(target))
        assert bytes(store.read_range(store.info("x"), 0, 4)) == data[:4]

    def test_what_write_returns_can_be_read(self, store: Store) -> None:
        """Its marks are those of the object."""
        assert bytes(store.read_range(store.write("x", b"hello"), 1, 3)) == b"ell"

    def test_what_a_listing_returns_can_be_read(self, store: Store) -> None:
        """Its marks are those of the object."""
        store.write("x/y", b"hello")
        (listed,) = store.list("x/")
        assert bytes(store.read_range(listed, 1, 3)) == b"ell"

    def test_a_forked_child_sees_that_an_object_was_replaced(self, store: Store) -> None:
        """Also where its calls travel through another process."""
        store.write("x", b"first")
        known = store.info("x")
        store.write("x", b"other")

        def child() -> str:
            with pytest.raises(ChangedError) as caught:
                store.read_range(known, 0, 5)
            return str(caught.value)

        assert "x is not the object that was indexed" in in_child(child)

    def test_a_deleted_object_is_gone(self, store: Store) -> None:
        """And deleting it again is no error."""
        store.write("x", b"1")
        store.delete("x")
        store.delete("x")
        with pytest.raises(NotFoundError):
            store.read("x")
        assert list(store.list()) == []

    def test_only_if_absent_refuses_what_exists(self, store: Store) -> None:
        """The object stays as it was."""
        store.write("x", b"old", only_if_absent=True)
        with pytest.raises(ExistsError):
            store.write("x", b"new", only_if_absent=True)
        assert bytes(store.read("x")) == b"old"

    def test_of_eight_writers_exactly_one_wins(self, store: Store) -> None:
        """And readers find the winner's bytes."""
        start = threading.Barrier(8)

        def write(number: int) -> int | None:
            start.wait()
            try:
                store.write("race", some_bytes(100_000, str(number)), only_if_absent=True)
            except ExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as threads:
            winners = [number for number in threads.map(write, range(8)) if number is not None]
        assert len(winners) == 1
        assert store.read("race") == some_bytes(100_000, str(winners[0]))

    def test_readers_never_see_a_mix_of_two_writes(self, store: Store) -> None:
        """Large enough to go up in parts."""
        versions = [bytes([number]) * 9_000_000 for number in range(3)]
        store.write("x", versions[0])
        is_done = threading.Event()

        def read() -> set[bytes]:
            seen = set()
            while not is_done.is_set():
                data = bytes(store.read("x"))
                assert len(data) == 9_000_000
                assert data.count(data[:1]) == len(data)
                seen.add(data[:1])
            return seen

        with ThreadPoolExecutor(2) as threads:
            reading = [threads.submit(read) for _ in range(2)]
            try:
                for number in range(6):
                    store.write("x", versions[number % 3])
            finally:
                is_done.set()
            assert set.union(*(each.result() for each in reading)) <= {b"\0", b"\1", b"\2"}

    def test_a_forked_child_can_be_the_first_to_use_a_store(self, store: Store) -> None:
        """And the parent may use it afterwards."""

        def child() -> bytes:
            store.write("x", b"from the child")
            return bytes(store.read("x"))

        assert in_child(child) == b"from the child"
        store.write("y", b"from the parent")
        assert bytes(store.read("y")) == b"from the parent"
