"""Start of every Python process of a traced job: hooks wait for the modules that they belong to.

Python imports `sitecustomize` by itself. This one stands before the user's own, if there is one,
and imports that afterwards. It imports nothing of Penstock until the job imports torch, so other
programs of the job start as fast as ever.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # The module typing takes a while to import.
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_WANTED = frozenset(
    {
        "torch.utils.data.dataloader",
        "torch.utils.data._utils.fetch",
        "torch.utils.data._utils.pin_memory",
        "torch.utils.data._utils.worker",
        "torchdata.stateful_dataloader.stateful_dataloader",
        "torchdata.stateful_dataloader.worker",
        "torch.serialization",
        "torch.optim.optimizer",
        "torch.distributed.distributed_c10d",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.nn.parallel.distributed",
        "torch.autograd",
    }
)


class _HookFinder:
    """Finds the wanted modules where they are found anyway, and runs a hook after each."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a wanted module, with a loader that calls the hook."""
        if name not in _WANTED:
            return None
        for finder in sys.meta_path:
            if finder is _HookFinder or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _hook_after(spec)
                return spec
        return None


def _hook_after(spec: Any) -> None:
    execute = getattr(spec.loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        execute(module)
        try:
            from penstock.trace.foreign.imports import hook
        except Exception as error:
            _complain(f"no hooks for {spec.name}: {type(error).__name__}: {error}")
        else:
            hook(spec.name, module)

    try:
        spec.loader.exec_module = exec_module
    except AttributeError as error:  # A loader of another kind.
        _complain(f"no hooks for {spec.name}: {error}")


def _complain(text: str) -> None:
    """Write to the run's folder what failed; the launcher reads it. The job goes on."""
    try:
        with open(os.path.join(os.environ["PENSTOCK_TRACE"], "problems.txt"), "a") as out:
            out.write(f"{text}\n")
    except OSError:
        pass


def _import_shadowed() -> None:
    """Import the `sitecustomize` that this one stands before."""
    import importlib.machinery
    import importlib.util

    paths = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("PENSTOCK_TRACE"):
    sys.meta_path.insert(0, _HookFinder)
    if os.environ.get("PENSTOCK_TRACE_WITH") == "python":
        try:
            from penstock.trace.foreign.opens import record_opens

            record_opens()
        except Exception as error:
            _complain(f"opened files are not seen: {type(error).__name__}: {error}")
_import_shadowed()
