"""The least that a run can read from its store, in the bytes that `Stats` counts.

Tiers keep whole units. A unit of small samples is fetched with one request, so it also holds the
bytes between them, such as headers and padding of a tar file. So of S bytes of samples, tiers keep
K bytes of units, and L bytes of samples are left to the store:

    store bytes ≥ K + L + (E - 1) · L

K + L is at least S, and equal to S if samples are large, lie without gaps, or come in blocks. In a
uniform shuffle a sample without a place is read alone, and L counts its own bytes. If the order
goes block by block and there is no tier, runs are read whole, and L counts the bytes between
samples as well. A run of which a tier holds a part is not read whole; there L counts samples again.
"""

from __future__ import annotations

from penstock.dataset.dataset import Dataset
from penstock.flow.layout.placement import KeptUnits, kept_by, layout_of
from penstock.flow.layout.units import Units
from penstock.order import BlocksOrder, ColdOrder, Order


def least_bytes(
    dataset: Dataset,
    order: Order,
    kept: KeptUnits | None,
    *,
    warm_bytes: int,
    stage_bytes: int,
    is_alone: bool,
) -> tuple[int, int]:
    """Return the least that the first epoch reads, and each later one, all ranks together.

    `warm_bytes` were on the nodes before the run. Blocks stay in `stage_bytes` of memory while
    there is room. Only a rank that `is_alone` on its node reads runs whole in any case.
    """
    in_blocks = isinstance(order, BlocksOrder)
    kept_bytes = 0 if kept is None else kept.unit_bytes
    first = later = dataset.size_bytes if kept is None else kept.loose_bytes
    if is_alone and not kept_bytes and (in_blocks or isinstance(order, ColdOrder)):
        first = _run_bytes(dataset) if kept is None else kept.loose_run_bytes
        later = first if in_blocks else later
    stays = in_blocks or any(bound.by_block for bound in dataset.bound)
    later = max(0, later - stage_bytes) if stays else later
    return max(0, kept_bytes + first - warm_bytes), later


def _run_bytes(dataset: Dataset) -> int:
    units = Units.of(dataset)
    return kept_by(units, layout_of(units), 0).loose_run_bytes
