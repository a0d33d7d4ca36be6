"""Hypothesis here judges results and never time: the machine may be busy."""

from hypothesis import settings

settings.register_profile("order", deadline=None)
settings.load_profile("order")
