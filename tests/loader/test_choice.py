"""Where batches are made, as a function of facts."""

from typing import Any

import pytest

import penstock
from penstock.engine.options import LoaderOptions
from penstock.errors import OptionError
from penstock.loader.choice import WorkerFacts, choose_workers, facts_of


@pytest.mark.parametrize(
    ("facts", "apart", "why"),
    [
        ({}, False, "small"),
        ({"has_functions": True}, True, "transform"),
        ({"data_bytes": 1 << 30}, True, "large"),
        ({"has_functions": True, "is_watched": True}, False, "debugger"),
        ({"has_functions": True, "is_free_threaded": True}, False, "side by side"),
        ({"has_functions": True, "is_worker": True}, False, "worker process already"),
        ({"has_functions": True, "is_in_memory": True}, False, "memory of this process"),
        ({"has_functions": True, "is_linux": False}, False, "Linux"),
        ({"has_functions": True, "unpicklable": "no"}, False, "no"),
        ({"asked": "here", "has_functions": True}, False, "here"),
        ({"asked": "processes"}, True, "processes"),
        ({"asked": 7, "is_watched": True}, True, "7"),
    ],
)
def test_the_choice_is_a_function_of_facts(facts: dict[str, Any], apart: bool, why: str) -> None:
    choice = choose_workers(WorkerFacts(**{"asked": "auto", **facts}))
    assert choice.uses_engine_process is apart
    assert why in choice.why
    assert choice.num_workers == (7 if facts.get("asked") == 7 else None)


def test_a_wish_that_cannot_be_met_is_an_error() -> None:
    with pytest.raises(OptionError, match="workers='processes' is not possible: the data lies in"):
        choose_workers(WorkerFacts(asked="processes", is_in_memory=True))


def test_facts_of_functions_that_cannot_be_sent_say_why(blobs: penstock.Dataset) -> None:
    class Refuses:
        def __call__(self, sample: Any) -> Any:
            return sample

        def __reduce__(self) -> Any:
            raise TypeError("it holds a lock")

    options = LoaderOptions(dataset=blobs, batch_size=10, transform=Refuses())
    facts, payload = facts_of(options)
    assert facts.has_functions
    assert "it holds a lock" in facts.unpicklable
    assert payload == b""


def test_no_payload_is_made_for_a_loader_of_this_process(blobs: penstock.Dataset) -> None:
    facts, payload = facts_of(LoaderOptions(dataset=blobs, batch_size=10, workers="here"))
    assert (facts.asked, payload) == ("here", b"")
