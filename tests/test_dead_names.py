"""The source has no names and no modules that only tests use, but for lists that shrink."""

from __future__ import annotations

from testkit.dead_names import dead_names
from testkit.unreached_modules import unreached_modules

CALLED_BY_OTHERS = {
    "loader/dlio/reader.py:get_sample",
    "loader/dlio/reader.py:is_index_based",
    "loader/dlio/reader.py:is_iterator_based",
    "engine/process.py:emit",
    "engine/web.py:do_HEAD",
    "engine/web.py:log_message",
    "engine/web.py:server_bind",
    "step/attached/attach.py:join_hook",
    "step/trainers/accelerate.py:no_sync",
    "step/trainers/lightning.py:block_backward_sync",
    "step/trainers/lightning.py:configure_ddp",
    "loader/torch/observe.py:compute_loss",
}
"""Methods that DLIO, torch, trainers, and the http server and the log of Python call."""
FOR_USERS = {
    "report/live/otel.py:instrument",
    "report/live/tensorboard.py:LoaderScalars",
    "step/captured/capture.py:num_weights",
    "step/tuner/watch.py:retune",
}
"""Guides tell of them."""
TESTS_AND_BENCHMARKS_ONLY = {
    "dataset/parse_process.py:num_parser_deaths",
    "engine/peers/members.py:announce",
    "report/model/run_model.py:doubts",
}
"""No more of these: move them to where they are used, and take them off the list."""


def test_every_name_of_the_source_is_used_in_it() -> None:
    assert set(dead_names()) == CALLED_BY_OTHERS | FOR_USERS | TESTS_AND_BENCHMARKS_ONLY


MODULES_OF_GUIDES = [
    "penstock.simulate.importance",
    "penstock.step.program.blocks",
    "penstock.step.program.picture",
]
"""Users import them as guides tell; nothing of the source does."""


def test_every_module_of_the_source_is_reached_from_what_users_start() -> None:
    assert unreached_modules() == MODULES_OF_GUIDES
