"""Ranks that have loaded Accelerate, transformers and Lightning: in seconds, once for all of them.

A process loads the packages, and ranks are forked from it for one test after another.
"""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import runpy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from tests.step.ranks import PRELOADED, run_ranks

__all__ = ["Run", "as_under_torchrun", "example", "worlds"]

EXAMPLES = Path(__file__).parents[3] / "examples"
Run = Callable[..., list[Any]]
"""`run_ranks`, with the packages loaded."""


@contextmanager
def worlds() -> Iterator[Run]:
    """Give what runs a function on ranks with trainers."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context, initializer=_load) as pool:
        yield lambda fn, size, *args: pool.submit(_run, fn, size, args).result()


def _load() -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    import accelerate  # noqa: F401
    import lightning  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401

    # Trainers collect garbage: not among all that is loaded, which ranks would have to copy.
    gc.freeze()


def _run(fn: Callable[..., Any], size: int, args: tuple[Any, ...]) -> list[Any]:
    return run_ranks(fn, size, *args, start="fork")


def as_under_torchrun(rank: int, size: int) -> None:
    """Set what torchrun sets, and be quiet."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    more = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    more |= {"TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in (names | more).items()})
    for name in ("accelerate", "transformers", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def example(rank: int, size: int, name: str, options: dict[str, Any]) -> str:
    """Run an example's `main` on one rank, and return what it prints."""
    as_under_torchrun(rank, size)
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    with redirect_stdout(io.StringIO()) as printed:
        main(**options)
    return printed.getvalue()
