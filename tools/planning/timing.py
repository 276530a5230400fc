"""Estimate the time of an optimizer call from bandwidth and arithmetic alone: bounds, not measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dobb.methods.dobb.footprint import RankCosts
from megatron_dobb.methods.dobb.settings import DobbConfig

DOBB_BYTES = 20
"""Per element of a fused update: fp32 gradient, momentum and master read, the latter two written."""

ADAMW_BYTES = 28
"""Bytes per element of AdamW's update, whose second moment is read and written as well."""

TURN_BYTES = 8
"""Per element of a tensor that is transposed, read and written: on the output side gradient, momentum and master, and
the latter two back again."""

PLAIN_BYTES = 74
"""Bytes per element of an update without a basis, which has no kernel: PyTorch's operations read and write each time.
The average of the momentum is 12 of them, decay 8, a test for non-finite numbers 25, signs or scales 8, choosing 9, and
adding the step 12."""

AVERAGE_BYTES = 12
"""Bytes per element of one average with the gradient: the coming momentum, and Nesterov's."""

SQUARES_BYTES = 12
"""Bytes per element of squares and their sum over each column (Dobb-l2), in PyTorch."""

PROJECTION_BYTES = 8
"""Bytes per element of coefficients that are not kept on the chip: the momentum read, they written."""

COPY_BYTES = 2
"""A bf16 copy of the weight, written beside its master."""

REFRESH_FLOPS = {"householder": 2 + 8 / 3, "cholesky": 2 + 3 * (2 + 1 / 3 + 1) + 2, "eigh": 26.0}
"""Multiples of `b^3` for one block: `A Q`; then Householder's QR and its Q, or three passes of a Gram matrix, Cholesky
and a triangular solve, and the check. For an eigendecomposition the usual count of a full symmetric one."""


@dataclass(frozen=True)
class Rates:
    """Rates that a rank's machine is supposed to reach.

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
        norms: the sums of column norms over ranks that every step waits for (Dobb-l2).
        update: the optimizer call of an ordinary step: of each width the longer of memory and products, AdamW's part,
            and the norms.
        refresh: products of a refresh.
        exchange: what a refresh hands to the network.
        refresh_step: the optimizer call of a refresh step if nothing of the refresh overlaps anything.
        amortised: its mean over all steps.
        adamw: the optimizer call if everything were on AdamW.
    """

    memory: float
    products: float
    norms: float
    update: float
    refresh: float
    exchange: float
    refresh_step: float
    amortised: float
    adamw: float


def update_flops(width: int, config: DobbConfig) -> int:
    """For one element: two products with a basis; in exact mode the first in two or more bf16 parts."""
    if config.source == "none":
        return 0
    if config.precision == "bf16":
        return 4 * width
    return 6 * width if config.basis_dtype == "bf16" else 10 * width


def update_bytes(config: DobbConfig) -> int:
    """For one element of an update: the kernel's one pass, or what stands in its place, and transposing."""
    turned = 5 * TURN_BYTES if config.side == "output" else 0
    if config.source == "none":
        return turned + PLAIN_BYTES + config.nesterov * AVERAGE_BYTES
    return turned + DOBB_BYTES


def norm_bytes(config: DobbConfig) -> int:
    """For one element of the column norms that go before an update, on this rank; 0 without `--dobb-norm l2`."""
    if config.norm == "sign":
        return 0
    averages = (1 + config.nesterov) * AVERAGE_BYTES
    turned = 2 * TURN_BYTES if config.side == "output" else 0
    return turned + averages + SQUARES_BYTES + (PROJECTION_BYTES if config.source != "none" else 0)


def norm_flops(width: int, config: DobbConfig) -> int:
    """For one element of the column norms: a product with a basis, in fp32."""
    return 2 * width if config.norm == "l2" and config.source != "none" else 0


def times(
    managed: Mapping[int, int],
    adamw: int,
    refreshes: Sequence[tuple[RankCosts, Mapping[int, int]]],
    column_norms: int,
    config: DobbConfig,
    rates: Rates,
    bf16: bool,
) -> Times:
    """Bounds of a rank's optimizer call.

    Args:
        managed: elements on Dobb, by width.
        adamw: elements on AdamW.
        refreshes: what each refresh of an interval sends, and how many blocks of each width it renews.
        column_norms: bytes that it all-reduces on every step.
        config: settings.
        rates: of the machine.
        bf16: whether weights are bf16 copies of fp32 masters.
    """
    copy = COPY_BYTES if bf16 else 0
    others = adamw * (ADAMW_BYTES + copy) / rates.memory_bandwidth
    memory = products = update = 0.0
    for width, numel in managed.items():
        parts = (
            (update_bytes(config) + copy, update_flops(width, config) / rates.flops),
            (norm_bytes(config), norm_flops(width, config) / rates.fp32_flops),
        )
        for passed, multiplying in parts:
            memory += numel * passed / rates.memory_bandwidth
            products += numel * multiplying
            update += numel * max(passed / rates.memory_bandwidth, multiplying)
    norms = 2 * column_norms / rates.network_bandwidth  # a sum, then its result to all
    update += others + norms
    found = [(_renewing(owned, config, rates), _network(costs) / rates.network_bandwidth) for costs, owned in refreshes]
    longest = max(found, key=sum, default=(0.0, 0.0))
    return Times(
        memory=memory + others,
        products=products,
        norms=norms,
        update=update,
        refresh=longest[0],
        exchange=longest[1],
        refresh_step=update + sum(longest),
        amortised=update + sum(map(sum, found)) / config.refresh_interval,
        adamw=(sum(managed.values()) + adamw) * (ADAMW_BYTES + copy) / rates.memory_bandwidth,
    )


def _renewing(owned: Mapping[int, int], config: DobbConfig, rates: Rates) -> float:
    """Seconds for the products of a refresh."""
    blocks = sum(count * width**3 for width, count in owned.items()) * config.iterations
    return blocks * REFRESH_FLOPS[config.qr] / rates.fp32_flops


def _network(costs: RankCosts) -> int:
    """Bytes that a refresh hands to the network, the larger side of each exchange."""
    handed = costs.reduced + costs.counts
    return handed + max(costs.to_owners, costs.from_others) + max(costs.to_holders, costs.from_owners)
