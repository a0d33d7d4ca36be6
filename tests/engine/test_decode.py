"""Transforms: their random numbers, and the fields of what they return."""

import random
from typing import Any

import numpy as np
import pytest

from penstock.engine.decode import as_mapping, generator_for, seed_generators, wants_generator


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (None, False),
        (lambda sample: sample, False),
        (lambda sample, generator: sample, True),
        (lambda sample, size=3: sample, False),
        (lambda sample, generator, size=3: sample, True),
        (lambda sample, *, generator: sample, False),
        (dict, False),  # It has no signature.
    ],
)
def test_a_generator_goes_to_transforms_with_two_arguments(transform: Any, expected: bool) -> None:
    assert wants_generator(transform) is expected


def test_random_numbers_depend_on_seed_epoch_sample_and_use() -> None:
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    drawn = [int(generator_for(*key).integers(2**62)) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [int(generator_for(*key).integers(2**62)) for key in keys]


def test_seeding_reaches_the_generators_that_all_code_shares() -> None:
    seed_generators(2**63 + 7)
    first = random.random(), np.random.random()
    seed_generators(2**63 + 7)
    assert (random.random(), np.random.random()) == first


@pytest.mark.parametrize(
    ("sample", "expected"),
    [({"a": 1}, {"a": 1}), ((1, 2), {"0": 1, "1": 2}), ([3], {"0": 3}), (4, {"data": 4})],
)
def test_whatever_a_transform_returns_has_fields(sample: Any, expected: dict[str, Any]) -> None:
    assert as_mapping(sample) == expected
