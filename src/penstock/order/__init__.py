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
from penstock.order.cursor import Cursor as Cursor
from penstock.order.interleave import interleave_of as interleave_of
from penstock.order.interleave import shares_of as shares_of
from penstock.order.keys import Ids as Ids
from penstock.order.keys import key_of as key_of
from penstock.order.mixture import MixtureOrder
from penstock.order.orders import GlobalOrder, SequentialOrder
from penstock.order.orders import Order as Order
from penstock.order.orders import order_hash as order_hash
from penstock.order.permutation import Permutation as Permutation
from penstock.order.quality import Quality as Quality
from penstock.order.quality import quality_of
from penstock.order.steps import Steps
from penstock.order.stream_hash import StreamHash

# The names for users. Those that are imported "as" themselves are for other rooms.
__all__ = [
    "BlocksOrder",
    "ColdOrder",
    "GlobalOrder",
    "MixtureOrder",
    "SequentialOrder",
    "Steps",
    "StreamHash",
    "quality_of",
]
