"""Where an attached model lives, and what follows from it: lanes, order and updates.

On the host lanes are threads, and a waiting thread blocks. On a GPU they are streams. What hosts
have to know themselves, as which parameters have gradients, is exchanged between hosts in both
cases: asking a device for it would have the host wait for all that the device has been asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.errors import OptionError
from penstock.step.attached.flow import BucketFlow, FlowBucket, FlowPlan, Lanes
from penstock.step.attached.reshard import Rounds
from penstock.step.attached.share import Share
from penstock.step.attached.slices import Stepper
from penstock.step.attached.stream_rounds import StreamRounds
from penstock.step.attached.stream_updates import StreamUpdates
from penstock.step.attached.streams import StreamFlow
from penstock.step.attached.update import Updates
from penstock.step.comms.comm import Comm
from penstock.step.comms.gloo import GlooComm
from penstock.step.comms.nccl import NcclComm
from penstock.step.comms.peer import PeerComm
from penstock.step.groups import Groups
from penstock.step.program.mesh import Mesh

__all__ = [
    "device_of",
    "flow_of",
    "groups_on",
    "hosts_of",
    "keep_memory",
    "lanes_on",
]


def device_of(params: Sequence[torch.Tensor]) -> torch.device:
    """Return where all parameters are, or refuse several places."""
    devices = list(dict.fromkeys(param.device for param in params))
    if len(devices) > 1 or devices[0].type not in ("cpu", "cuda"):
        raise OptionError(
            f"parameters are on {', '.join(map(str, devices))}; attach knows models on the CPU or "
            "on one GPU"
        )
    (device,) = devices
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise OptionError(
            f"the model is on {device}, the current GPU is {torch.cuda.current_device()}; call "
            f"torch.cuda.set_device({device.index}) first"
        )
    return device


def groups_on(device: torch.device, mesh: Mesh) -> Groups:
    """Return groups for tensors of a device."""
    return Groups(mesh, backend="nccl" if device.type == "cuda" else "gloo")


def hosts_of(groups: Groups, device: torch.device) -> Groups:
    """Return groups of the same ranks for numbers of the host."""
    return groups.for_hosts() if device.type == "cuda" else groups


def lanes_on(device: torch.device, groups: Groups, hosts: Groups, axis: str) -> Lanes:
    """Open the lanes of an axis."""
    lanes = Lanes(
        scatter=groups.comm(axis, "scatter"),
        gather=groups.comm(axis, "gather"),
        control=hosts.comm(axis, "control"),
    )
    if device.type == "cuda" and isinstance(lanes.gather, GlooComm):
        raise OptionError(
            f"the model is on {device} and its groups are over gloo; make them with "
            'Groups(..., backend="nccl"), or "peer" where GPUs reach each other\'s memory'
        )
    return lanes


def flow_of(
    plan: FlowPlan,
    shares: Mapping[FlowBucket, Share],
    *,
    clip: float | None,
    joint: Stepper | None,
    pace: Callable[[], Comm] | None = None,
) -> tuple[BucketFlow, Updates]:
    """Return the flow of all buckets, and how they are updated, where they live.

    With weights in slices, `pace` opens one more lane between hosts.
    """
    if plan.buckets[0].whole.device.type != "cuda":
        flow = BucketFlow(plan) if pace is None else Rounds(plan)
        return flow, Updates(flow, shares, plan.lanes.control, clip=clip, joint=joint)
    if pace is None:
        streams = StreamFlow(plan)
    else:
        keep_memory(plan.lanes, False)
        streams = StreamRounds(plan, pace())
    # In the order of the scatter lane norms come after all that they are norms of.
    scatter, count = plan.lanes.scatter, plan.num_params
    return streams, StreamUpdates(
        streams, shares, scatter, clip=clip, num_params=count, joint=joint
    )


def keep_memory(lanes: Lanes, is_kept: bool) -> None:
    """Say whether lanes keep memory of a GPU until they are done with it."""
    for lane in (lanes.scatter, lanes.gather):
        if isinstance(lane, NcclComm | PeerComm):
            lane.keeps_memory = is_kept
