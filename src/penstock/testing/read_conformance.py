"""What every store must do that can only be read, as tests; see `conformance`."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from penstock.errors import ChangedError, NotFoundError, OptionError, RangeError
from penstock.storage.base import ObjectInfo, Store
from penstock.testing.forks import in_child


def some_bytes(length: int, seed: str = "") -> bytes:
    """Return bytes that look random and are the same each time."""
    return hashlib.shake_128(seed.encode()).digest(length)


OBJECTS = {
    "a.bin": some_bytes(1000, "a"),
    "empty": b"",
    "folder/b.bin": some_bytes(70_000, "b"),
    "folder/inner/c.bin": some_bytes(3, "c"),
    "folder-not/d.bin": b"sorts before folder/",
    "with space.txt": b"space",
    "100% + more & ünï/cödé#1.txt": b"strange",
    "large.bin": some_bytes(20_000_000, "large"),
}
"""Objects that `filled` holds."""


class ReadConformance:
    """What holds for a store that can only be read."""

    @pytest.fixture
    def filled(self) -> Iterator[Store]:
        """Give the store, holding `OBJECTS`."""
        raise NotImplementedError("override the fixture `filled`")

    @pytest.mark.parametrize("key", sorted(OBJECTS))
    def test_read_returns_all_bytes(self, filled: Store, key: str) -> None:
        """Whole objects, whatever their names."""
        assert filled.read(key) == OBJECTS[key]

    @pytest.mark.parametrize("key", sorted(OBJECTS))
    def test_info_knows_the_size(self, filled: Store, key: str) -> None:
        """Size and key."""
        info = filled.info(key)
        assert (info.key, info.size_bytes) == (key, len(OBJECTS[key]))

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 1), (0, 1000), (999, 1), (17, 500), (0, 0), (1000, 0), (5, 0)]
    )
    def test_a_range_is_exactly_what_was_asked(
        self, filled: Store, offset: int, length: int
    ) -> None:
        """Also empty ones, also at the very end."""
        data = filled.read_range(filled.info("a.bin"), offset, length)
        assert isinstance(data, memoryview)
        assert data == OBJECTS["a.bin"][offset : offset + length]

    def test_read_into_fills_the_target_and_nothing_else(self, filled: Store) -> None:
        """Bytes around the target stay."""
        room = bytearray(b"\xaa" * 5000)
        large = filled.info("large.bin")
        filled.read_into(large, 12_345_678, memoryview(room)[1000:4000])
        assert room[1000:4000] == OBJECTS["large.bin"][12_345_678:12_348_678]
        assert room[:1000] == room[4000:] == b"\xaa" * 1000

    @pytest.mark.parametrize(("offset", "length"), [(1000, 1), (999, 2), (5000, 10), (1001, 0)])
    def test_a_range_past_the_end_is_an_error(
        self, filled: Store, offset: int, length: int
    ) -> None:
        """And names the size, never a shorter answer."""
        with pytest.raises(RangeError, match="1000"):
            filled.read_range(filled.info("a.bin"), offset, length)
        with pytest.raises(RangeError):
            filled.read_into(filled.info("a.bin"), offset, memoryview(bytearray(length)))

    @pytest.mark.parametrize("size_bytes", [999, 1001, 5000])
    def test_a_part_of_an_object_of_another_size_is_not_read(
        self, filled: Store, size_bytes: int
    ) -> None:
        """Whoever knows another size means another object; both sizes are named."""
        known = replace(filled.info("a.bin"), size_bytes=size_bytes)
        for length in (0, 10):
            with pytest.raises(ChangedError, match=rf"a\.bin.*{size_bytes} bytes.*1000 bytes"):
                filled.read_range(known, 5, length)
            with pytest.raises(ChangedError):
                filled.read_into(known, 5, memoryview(bytearray(length)))

    def test_an_object_without_marks_is_read_by_its_size_alone(self, filled: Store) -> None:
        """As by an index that was made elsewhere."""
        bare = ObjectInfo(key="a.bin", size_bytes=1000)
        assert filled.read_range(bare, 10, 20) == OBJECTS["a.bin"][10:30]

    def test_a_range_of_an_empty_object_is_an_error(self, filled: Store) -> None:
        """There is no byte 0."""
        with pytest.raises(RangeError):
            filled.read_range(filled.info("empty"), 0, 1)

    def test_a_missing_object_is_not_found(self, filled: Store) -> None:
        """By every way of asking, and the error names it."""
        missing = ObjectInfo(key="no/such", size_bytes=1)
        for ask in (
            lambda: filled.info("no/such"),
            lambda: filled.read("no/such"),
            lambda: filled.read_range(missing, 0, 1),
            lambda: filled.read_into(missing, 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(NotFoundError, match="no/such"):
                ask()

    @pytest.mark.parametrize("key", ["", "/a.bin", "../a.bin", "folder/../a.bin", "a//b", "a/"])
    def test_names_that_are_no_keys_are_refused(self, filled: Store, key: str) -> None:
        """Nothing outside the root can be reached."""
        with pytest.raises(OptionError):
            filled.read(key)

    def test_negative_ranges_are_refused(self, filled: Store) -> None:
        """Python's own meaning of negative indexes must not leak in."""
        with pytest.raises(OptionError):
            filled.read_range(filled.info("a.bin"), -1, 1)

    def test_many_threads_at_once_get_their_own_bytes(self, filled: Store) -> None:
        """Sixteen threads, two hundred ranges."""
        large = filled.info("large.bin")

        def check(number: int) -> bool:
            offset = number * 90_000
            data = filled.read_range(large, offset, 1000)
            return data == OBJECTS["large.bin"][offset : offset + 1000]

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(check, range(200)))

    def test_a_forked_child_reads_after_the_parent_has_read(self, filled: Store) -> None:
        """The parent's clients and locks must not matter."""
        assert filled.read("a.bin") == OBJECTS["a.bin"]
        assert in_child(lambda: bytes(filled.read("a.bin"))) == OBJECTS["a.bin"]
        assert filled.read("a.bin") == OBJECTS["a.bin"]

    def test_the_store_can_be_used_again_after_close(self, filled: Store) -> None:
        """Close lets go; it does not end."""
        filled.read("a.bin")
        filled.close()
        assert filled.read("a.bin") == OBJECTS["a.bin"]

    def test_a_pickled_store_reads_the_same(self, filled: Store) -> None:
        """A store is a value."""
        copy: Store = pickle.loads(pickle.dumps(filled))
        assert copy.uri == filled.uri
        assert copy.read("a.bin") == OBJECTS["a.bin"]

    def test_a_store_describes_itself(self, filled: Store) -> None:
        """As the protocol says."""
        assert isinstance(filled, Store)
        assert filled.uri.endswith("/")
        assert filled.source in {"memory", "folder", "s3", "gs", "az", "http"}
