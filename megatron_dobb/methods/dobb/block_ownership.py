"""Assign Dobb's blocks to ranks, by the work of refreshing a block and the traffic to its owner and holders."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

from ...sharding.flat_redistribution import FlatRedistribution
from ...sharding.load_balancing import Block
from ...sharding.ownership import Holdings, Ownership, assign

REFRESH_FLOPS = 14
"""Operations per `b^3` to refresh one block with Cholesky QR: 2 for `A Q`; in each of three passes 2 for the Gram
matrix, 1/3 for the factor and 1 for the triangular solve; 2 for the check. Householder QR takes 9, at a lower rate."""

FLOPS_PER_SECOND = 13 * 10**12
"""Assumed, not measured: a fifth of the 67 TFLOP/s in fp32 on NVIDIA's data sheet for the H100 and H200."""

BASIS_BYTES_PER_ELEMENT = 2
"""A basis in bf16."""

BYTES_PER_SECOND = 50 * 10**9
"""Between nodes, per GPU: one 400 Gb/s link."""


def work(width: int) -> int:
    """Relative cost of refreshing one block: products and orthogonalisation of `b x b` matrices, O(b^3)."""
    return width**3


def is_worth_moving(width: int) -> bool:
    """Return whether refreshing a block takes longer than sending its basis once more: from width 38 on.

    An owner that holds its block sends the basis to all other holders; a moved block costs one more message. The moment
    only goes to a different rank, at no extra cost.
    """
    refreshing = Fraction(REFRESH_FLOPS * work(width), FLOPS_PER_SECOND)
    sending = Fraction(BASIS_BYTES_PER_ELEMENT * width**2, BYTES_PER_SECOND)
    return refreshing > sending


def triangle(width: int) -> int:
    """Number of elements communicated for a symmetric block."""
    return width * (width + 1) // 2


@dataclass(frozen=True)
class BlockOwnership(Ownership):
    """Owners, which store moments and refresh bases, and holders, which need the bases.

    Attributes:
        widths: block width of every key.
    """

    widths: Mapping[str, int]

    @classmethod
    def share_out(cls, holdings: Holdings, widths: Mapping[str, int]) -> Self:
        """Choose owners by the work of a refresh; blocks that are worth moving may leave their holders.

        Args:
            holdings: blocks held by every rank.
            widths: block width of every key.

        Raises:
            LayoutError: if a block is held by no rank though a later one of its weight is.
        """
        costs = {key: work(width) for key, width in widths.items()}
        movable = {key for key, width in widths.items() if is_worth_moving(width)}
        return cls(holdings, costs, assign(holdings, costs, movable=movable), widths)

    def elements(self, blocks: Collection[Block]) -> int:
        """Count elements in the `b x b` matrices of some blocks: moments if owned, bases if held."""
        return sum(self.widths[key] ** 2 for key, _ in blocks)

    def moment_route(self, count_terms: int = 1) -> FlatRedistribution:
        """Route the sums of all ranks: each block's triangle, each weight's token count as `count_terms` numbers."""
        if count_terms not in self._moment_routes:
            triangles = {key: triangle(width) for key, width in self.widths.items()}
            self._moment_routes[count_terms] = self.to_owners(triangles, count_terms)
        return self._moment_routes[count_terms]

    @cached_property
    def _moment_routes(self) -> dict[int, FlatRedistribution]:
        return {}
