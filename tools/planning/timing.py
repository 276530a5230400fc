"""How long an optimizer call should take, from bandwidth and arithmetic alone: bounds, not measurements."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dobb.config import DobbConfig
from megatron_dobb.costs import RankCosts

DOBB_BYTES = 20
"""Per element of a fused update: fp32 gradient, momentum and master read, the latter two written."""

ADAMW_BYTES = 28
"""The same of AdamW, whose second moment is read and written as well."""

COPY_BYTES = 2
"""A bf16 copy of the weight, written beside its master."""

REFRESH_FLOPS = {"householder": 2 + 8 / 3, "cholesky": 2 + 3 * (2 + 1 / 3 + 1) + 2, "eigh": 26.0}
"""Multiples of `b^3` for one block: `A Q`; then Householder's QR and its Q, or three passes of a Gram matrix, Cholesky
and a triangular solve, and the check. For an eigendecomposition the usual count of a full symmetric one."""


@dataclass(frozen=True)
class Rates:
    """What a rank's machine is supposed to reach.

    The defaults are derived from data sheets of an H200 (four fifths to nine tenths of 989 TFLOP/s in bf16, 67 in fp32
    and 4.8 TB/s) and of a 400 Gb/s network adapter for each GPU. None of them was measured.

    Attributes:
        memory_bandwidth: bytes per second of device memory.
        flops: of bf16 products.
        fp32_flops: of fp32 products, with which bases are refreshed.
        network_bandwidth: bytes per second that a rank sends.
    """

    memory_bandwidth: float = 4.3e12
    flops: float = 790e12
    fp32_flops: float = 54e12
    network_bandwidth: float = 50e9


@dataclass(frozen=True)
class Times:
    """Seconds on one rank.

    Attributes:
        memory: the update's traffic with device memory, Dobb's and AdamW's part of it.
        products: the update's products, Dobb's part alone.
        update: the optimizer call of an ordinary step: of each width the longer of both, and AdamW's part.
        refresh: products of a refresh.
        exchange: what a refresh hands to the network.
        adamw: the optimizer call if everything were on AdamW.
    """

    memory: float
    products: float
    update: float
    refresh: float
    exchange: float
    adamw: float

    @property
    def refresh_step(self) -> float:
        """The optimizer call of a refresh step if nothing of the refresh overlaps anything."""
        return self.update + self.refresh + self.exchange


def update_flops(width: int, config: DobbConfig) -> int:
    """For one element: two products with a basis; in exact mode the first in two or more bf16 parts."""
    if config.precision == "bf16":
        return 4 * width
    return 6 * width if config.basis_dtype == "bf16" else 10 * width


def times(
    managed: Mapping[int, int],
    adamw: int,
    owned: Mapping[int, int],
    costs: RankCosts,
    config: DobbConfig,
    rates: Rates,
    bf16: bool,
) -> Times:
    """Bounds of a rank's optimizer call.

    Args:
        managed: elements on Dobb, by width.
        adamw: elements on AdamW.
        owned: blocks that the rank refreshes, by width.
        costs: its bytes.
        config: settings.
        rates: of the machine.
        bf16: whether weights are bf16 copies of fp32 masters.
    """
    copy = COPY_BYTES if bf16 else 0
    others = adamw * (ADAMW_BYTES + copy) / rates.memory_bandwidth
    memory = {width: numel * (DOBB_BYTES + copy) / rates.memory_bandwidth for width, numel in managed.items()}
    products = {width: numel * update_flops(width, config) / rates.flops for width, numel in managed.items()}
    refresh = sum(blocks * width**3 for width, blocks in owned.items()) * config.iterations
    network = costs.reduced + costs.counts
    network += max(costs.to_owners, costs.from_others) + max(costs.to_holders, costs.from_owners)
    return Times(
        memory=sum(memory.values()) + others,
        products=sum(products.values()),
        update=sum(max(memory[width], products[width]) for width in managed) + others,
        refresh=refresh * REFRESH_FLOPS[config.qr] / rates.fp32_flops,
        exchange=network / rates.network_bandwidth,
        adamw=(sum(managed.values()) + adamw) * (ADAMW_BYTES + copy) / rates.memory_bandwidth,
    )
