"""The source has no names that only tests use, but for a list that shrinks."""

from __future__ import annotations

from testkit.dead_names import dead_names

CALLED_BY_OTHERS = {
    "loader/dlio/reader.py:get_sample",
    "loader/dlio/reader.py:is_index_based",
    "loader/dlio/reader.py:is_iterator_based",
    "engine/web.py:do_HEAD",
    "engine/web.py:log_message",
    "engine/web.py:server_bind",
    "step/attached/attach.py:join_hook",
    "step/trainers/accelerate.py:no_sync",
    "step/trainers/lightning.py:block_backward_sync",
    "step/trainers/lightning.py:configure_ddp",
    "loader/torch/observe.py:compute_loss",
}
"""Methods that DLIO, the http server of Python, torch and trainers call."""
FOR_USERS = {
    "report/live/otel.py:instrument",
    "report/live/tensorboard.py:LoaderScalars",
    "step/captured/capture.py:num_weights",
    "step/tuner/watch.py:retune",
}
"""Guides tell of them."""
TESTS_AND_BENCHMARKS_ONLY = {
    "dataset/parse_process.py:num_parser_deaths",
    "dataset/part.py:merge_parts",
    "report/model/run_model.py:doubts",
    "simulate/cluster.py:replay_line",
    "simulate/importance/shade_released.py:published_hit_share",
    "simulate/page.py:LATER_EPOCH",
    "simulate/result.py:least_ratio",
}
"""No more of these: move them to where they are used, and take them off the list."""


def test_every_name_of_the_source_is_used_in_it() -> None:
    assert set(dead_names()) == CALLED_BY_OTHERS | FOR_USERS | TESTS_AND_BENCHMARKS_ONLY
