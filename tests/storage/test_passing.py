"""Bytes that passed: what is taken is what was kept, once, and never more than that."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.storage.base import ObjectInfo
from penstock.storage.passing import PassedBytes

SIZE = 200
DATA = bytes(i % 251 for i in range(SIZE))
RANGES = st.tuples(st.integers(0, SIZE - 1), st.integers(1, 40)).map(
    lambda r: (r[0], min(r[1], SIZE - r[0]))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.tuples(st.booleans(), RANGES), max_size=30))
def test_a_byte_is_given_out_if_it_was_kept_and_not_taken_since(
    tmp_path: Path, steps: list[tuple[bool, tuple[int, int]]]
) -> None:
    infos = [ObjectInfo(key=key, size_bytes=SIZE) for key in ("a", "b")]
    passed = PassedBytes(str(tmp_path), infos, 2 * SIZE)
    here: set[int] = set()
    for keeps, (offset, length) in steps:
        wanted = set(range(offset, offset + length))
        if keeps:
            passed.keep("b", offset, memoryview(DATA)[offset : offset + length])
            here |= wanted
            continue
        found = passed.take("b", offset, length)
        assert (found is not None) == (wanted <= here)
        if found is not None:
            assert found == DATA[offset : offset + length]
            here -= wanted
    assert passed.held_bytes == len(here)
    assert passed.take("a", 0, 1) is None
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_the_first_objects_that_fit_are_kept(tmp_path: Path) -> None:
    infos = [ObjectInfo(key=key, size_bytes=SIZE) for key in "abc"]
    passed = PassedBytes(str(tmp_path), infos, 2 * SIZE + 10)
    assert [passed.keeps(key) for key in "abcd"] == [True, True, False, False]
    passed.keep("c", 0, memoryview(DATA))
    assert passed.held_bytes == 0
