"""Dion's update in a few lines, to measure it; training runs use Microsoft's own."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Dion:
    """Low-rank orthonormalised updates with error feedback (arXiv 2504.05295, Algorithm 1), for one matrix.

    Args:
        shape: rows m and columns n.
        rank: r.
        seed: of the random start of the right factor.
        decay: of the momentum.
    """

    def __init__(self, shape: Sequence[int], rank: int, seed: int, decay: float = 0.95) -> None:
        rows, columns = shape
        self.decay = decay
        self.buffer = torch.zeros(rows, columns)
        self.right = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))

    def update(self, gradient: Tensor) -> Tensor:
        """The raw update `O = P Q^T`, with `P [m, r]` orthonormal and the columns of `Q [n, r]` of norm 1."""
        self.buffer += gradient
        left = torch.linalg.qr(self.buffer @ self.right).Q
        image = self.buffer.T @ left
        self.buffer -= (1 - self.decay) * left @ image.T
        self.right = torch.nn.functional.normalize(image, dim=0)
        return left @ self.right.T
