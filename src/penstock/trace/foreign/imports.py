"""Which hook belongs to which module of the job."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from penstock.trace.foreign import collectives, dataloader, fetching, saving
from penstock.trace.foreign.process import complain

_HOOKS: dict[str, Any] = {
    "torch.utils.data.dataloader": dataloader.hook_loader,
    "torchdata.stateful_dataloader.stateful_dataloader": dataloader.hook_stateful_loader,
    "torch.utils.data._utils.fetch": fetching.hook_fetchers,
    "torch.utils.data._utils.worker": fetching.hook_worker,
    "torchdata.stateful_dataloader.worker": fetching.hook_worker,
    "torch.utils.data._utils.pin_memory": fetching.hook_pinning,
    "torch.serialization": saving.hook_save,
    "torch.distributed.checkpoint.state_dict_saver": saving.hook_distributed_save,
    "torch.optim.optimizer": dataloader.hook_optimizer,
    "torch.distributed.distributed_c10d": collectives.hook_collectives,
    "torch.autograd": collectives.hook_backward,
    "torch.nn.parallel.distributed": collectives.hook_data_parallel,
}


def hook(name: str, module: ModuleType) -> None:
    """Hook into a module that the job has just imported; a failure costs the hook, not the job."""
    try:
        _HOOKS[name](module)
    except Exception as error:
        complain(f"no hooks for {name}: {type(error).__name__}: {error}")
