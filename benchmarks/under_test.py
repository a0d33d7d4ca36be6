"""Words of the Loader under test, old or new.

A comparison of two commits runs the same script on both. Commits from before the engine had
processes of its own know "thread" and "process"; their stats lack the later fields.
"""

import inspect

import penstock

HAS_ENGINE = inspect.signature(penstock.Loader).parameters["workers"].default == "auto"
"""Whether `Loader(workers=...)` knows "auto", "here", "processes" and a number."""
TOLD = ("stall_s", "hand_over_s", "cpu_here_s")


def workers(where: str | int) -> dict[str, object]:
    """Return the keywords that make a Loader work there: "auto", "here", "processes" or a number.

    Before the engine, "auto" was threads in the training process.
    """
    if HAS_ENGINE:
        return {"workers": where}
    if where in ("auto", "here"):
        return {"workers": "thread"}
    return {"workers": "process", "threads": where if isinstance(where, int) else None}


def told(stats: penstock.Stats) -> dict[str, float | None]:
    """Return where the loop's time went by the loader's own account; None where it does not say."""
    return {name: getattr(stats, name, None) for name in TOLD}
