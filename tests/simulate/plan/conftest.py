"""The data sets that layouts are tested with."""

from tests.flow.layout.conftest import datasets

__all__ = ["datasets"]
