"""Policies of `penstock.simulate` that are only compared with: ten beside the six of the product.

`POLICIES` has all sixteen by name. `simulate.run(scenario, POLICIES[name])` runs any of them.
"""

from benchmarks.policies.belady import Belady
from benchmarks.policies.coordl import Coordl
from benchmarks.policies.deepio import DeepioOpportunistic, DeepioOrdered
from benchmarks.policies.lbann import LbannDynamic, LbannPreloading
from benchmarks.policies.locality import LocalityAware
from benchmarks.policies.nopfs_released import NopfsReleased
from benchmarks.policies.plain import Naive, Perfect
from penstock.simulate.policies import POLICIES as PRODUCT
from penstock.simulate.policies import Policy

POLICIES: dict[str, type[Policy]] = {
    "naive": Naive,
    "deepio-ordered": DeepioOrdered,
    "deepio-opportunistic": DeepioOpportunistic,
    "lbann-dynamic": LbannDynamic,
    "lbann-preloading": LbannPreloading,
    "locality-aware": LocalityAware,
    "coordl": Coordl,
    "nopfs-released": NopfsReleased,
    "belady": Belady,
    "perfect": Perfect,
    **PRODUCT,
}
