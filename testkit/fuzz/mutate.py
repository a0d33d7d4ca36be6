"""Damage to bytes: what disks and networks do, what other writers do, what an attacker tries.

Every function takes a `random.Random`, so an input is known by its seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

Mutation = Callable[[Random, bytearray], None]

_BYTES = (0x00, 0x01, 0x20, 0x2F, 0x30, 0x7F, 0x80, 0xFE, 0xFF)
_WORDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS = (
    *(b"0", b"-1", b"1", b"-2048", b"7", b"255", b"65536", b"2147483648", b"4294967295"),
    *(b"9223372036854775807", b"18446744073709551616", b"1e308", b"1.5", b"abc", b""),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**80, 1e308, "", "x", "../../x", "/etc/passwd"),
    *(
        "a" * 5000,
        "\x00",
        "ä",
        [],
        {},
        [[]],
        [None],
        {"x": {}},
        [1] * 1000,
        "|O8",
        "O",
        "ndarray:O:2",
    ),
)
_DIGITS = re.compile(rb"-?\d+")
_DEPTH_OF_NEST = 5000


def mutated(random: Random, data: bytes) -> bytes:
    """Return damaged bytes; sometimes structured, mostly not."""
    out = bytearray(data)
    if data[:1] in (b"{", b"[") and random.random() < 0.6:
        out = bytearray(mutated_json(random, bytes(data)))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_MUTATIONS)(random, out)
    return bytes(out)


def mutated_json(random: Random, data: bytes) -> bytes:
    """Return JSON with one value replaced, removed, doubled or nested; other bytes as they are."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(value))
    if not places:
        return data
    holder, key = random.choice(places)
    draw = random.random()
    if draw < 0.6:
        holder[key] = random.choice(_JUNK)
    elif draw < 0.75:
        del holder[key]
    elif draw < 0.9 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif draw < 0.97 and isinstance(holder[key], int):
        holder[key] += random.choice((-1, 1, 2**16, -(2**40)))
    else:
        marker = "\ue000"
        holder[key] = marker
        nest = b"[" * _DEPTH_OF_NEST + b"]" * _DEPTH_OF_NEST
        return json.dumps(value, ensure_ascii=False).encode().replace(f'"{marker}"'.encode(), nest)
    return json.dumps(value).encode()


def _places(value: Any) -> Any:
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for number in range(len(value)):
            yield value, number
            yield from _places(value[number])


def _at(random: Random, data: bytearray) -> int:
    """Return a place; heads and ends of files hold what is parsed, so they are drawn more often."""
    if not data:
        return 0
    edge = min(len(data), 512)
    draw = random.random()
    if draw < 0.3:
        return random.randrange(edge)
    if draw < 0.55:
        return len(data) - 1 - random.randrange(edge)
    return random.randrange(len(data))


def _flip_bit(random: Random, data: bytearray) -> None:
    if data:
        data[_at(random, data)] ^= 1 << random.randrange(8)


def _set_byte(random: Random, data: bytearray) -> None:
    if data:
        data[_at(random, data)] = random.choice(_BYTES)


def _set_word(random: Random, data: bytearray) -> None:
    """Write a number of 4 or 8 bytes where lengths and offsets use to lie."""
    size = random.choice((4, 8))
    at = _at(random, data) // 4 * 4
    if at + size <= len(data):
        word = random.choice(_WORDS) % 2 ** (8 * size)
        data[at : at + size] = word.to_bytes(size, "little")


def _set_digits(random: Random, data: bytearray) -> None:
    """Replace a number that is written in digits, as in tar headers and JSON."""
    near = _at(random, data)
    found = _DIGITS.search(data, max(0, near - 64))
    if found is None:
        return _flip_bit(random, data)
    old, new = found.group(), random.choice(_NUMBERS)
    # Headers of fixed width keep their width in half of the cases.
    new = new.ljust(len(old))[: len(old)] if random.random() < 0.5 else new
    data[found.start() : found.end()] = new
    return None


def _truncate(random: Random, data: bytearray) -> None:
    del data[_at(random, data) :]


def _remove(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    del data[at : at + random.choice((1, 4, 64, 512))]


def _insert(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    data[at:at] = random.randbytes(random.choice((1, 4, 64, 512)))


def _double(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    data[at:at] = data[at : at + random.choice((8, 512, 4096))]


def _zero(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    count = min(random.choice((8, 512, 4096)), len(data) - at)
    data[at : at + count] = bytes(count)


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip_bit, _flip_bit, _flip_bit, _set_byte, _set_word, _set_word, _set_digits, _set_digits),
    *(_truncate, _remove, _insert, _double, _zero),
)


def overwritten(random: Random, data: bytes) -> bytes:
    """Return damaged bytes of the same length, as a disk gives them."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        random.choice((_flip_bit, _set_byte, _set_word, _zero))(random, out)
    return bytes(out)
