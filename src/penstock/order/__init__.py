"""Orders: which sample is used when.

Pure: an order is a function from (epoch, position) to a sample id, and back. It is computed from a
seed, never stored, so any place can be sought, any rank agrees with any other, and "when is this
sample used next?" is arithmetic. Reading the samples is `dataset` and `storage`; carrying them to
their step is `loader`.

* `permutation` – the keyed bijection that all shuffling comes from
* `orders`, `blocks`, `cold`, `mixture` – `GlobalOrder`, `SequentialOrder`, `BlocksOrder`,
  `ColdOrder`, `MixtureOrder`
* `steps`, `cursor` – from positions to steps and ranks; where a run is, to save and to resume
* `stream_hash`, `quality` – was the right stream delivered, and how well was it shuffled

>>> order = GlobalOrder(num_samples=1_281_167, seed=7)
>>> order.ids(3, 1_000_000, 1_000_004)
array([565078, 382559,  18501, 135342])
>>> order.positions(3, order.ids(3, 1_000_000, 1_000_004))
array([1000000, 1000001, 1000002, 1000003])
"""

from penstock.order.blocks import BlocksOrder
from penstock.order.cold import ColdOrder
from penstock.order.cursor import Cursor
from penstock.order.interleave import Interleave, interleave_of, shares_of
from penstock.order.keys import Ids, key_of
from penstock.order.mixture import MixtureOrder
from penstock.order.orders import Description, GlobalOrder, Order, SequentialOrder, order_hash
from penstock.order.permutation import Permutation, PermutationFamily
from penstock.order.quality import Quality, mixing, quality_of
from penstock.order.steps import Steps
from penstock.order.stream_hash import StreamHash

__all__ = [
    "BlocksOrder",
    "ColdOrder",
    "Cursor",
    "Description",
    "GlobalOrder",
    "Ids",
    "Interleave",
    "MixtureOrder",
    "Order",
    "Permutation",
    "PermutationFamily",
    "Quality",
    "SequentialOrder",
    "Steps",
    "StreamHash",
    "interleave_of",
    "key_of",
    "mixing",
    "order_hash",
    "quality_of",
    "shares_of",
]
