"""Second moments of every kind that training can produce, and what a basis is measured by."""

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_basis(width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator(seed))).Q


def moments(width: int) -> Tensor:
    """13 kinds of `A`, as fp32 `[13, width, width]`."""
    random, rank = generator(width), torch.arange(1, width + 1, dtype=torch.float64)

    def of_tokens(tokens: int, scale: Tensor | float = 1.0, mean: Tensor | float = 0.0) -> Tensor:
        x = torch.randn(tokens, width, dtype=torch.float64, generator=random) * scale + mean
        return x.T @ x / tokens

    vectors = random_basis(width, seed=width)
    kinds = [(vectors * rank**-power) @ vectors.T for power in (1, 2, 3, 4, 6)]
    kinds.append(of_tokens(max(1, width // 3)))  # fewer tokens than features
    kinds.append(of_tokens(1))
    kinds.append(of_tokens(4 * width, scale=(rank <= width - width // 4).double()))  # a quarter is dead
    kinds.append(of_tokens(9, scale=(rank == width // 2 + 1).double()))  # one live feature
    kinds.append(torch.zeros(width, width, dtype=torch.float64))
    kinds.append(1e-30 * of_tokens(4 * width, scale=rank**-0.5))
    kinds.append(1e30 * of_tokens(4 * width, scale=rank**-0.5))
    kinds.append(of_tokens(4 * width, mean=30 * torch.randn(width, dtype=torch.float64, generator=random)))
    stacked = torch.stack(kinds).float()
    return (stacked + stacked.mT) / 2


def cases(width: int) -> tuple[Tensor, Tensor]:
    """All 13 moments with 3 starting bases each: `A` and `Q`, `[39, width, width]`."""
    every = moments(width)
    identity = torch.eye(width).expand_as(every)
    rounded = random_basis(width).bfloat16().float().expand_as(every)
    converged = torch.linalg.eigh(every.double()).eigenvectors.bfloat16().float()
    return every.repeat(3, 1, 1), torch.cat([identity, rounded, converged])


def float64_error(basis: Tensor) -> float:
    basis = basis.double()
    return float((basis.mT @ basis - torch.eye(basis.shape[-1])).abs().max())


def normalised(moment: Tensor) -> Tensor:
    """`A / max(diag A)` in float64; the identity for a zero `A`, which says nothing about its basis."""
    largest = moment.double().diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
    return torch.where(largest > 0, moment.double() / largest, torch.eye(moment.shape[-1]).double())


def equal_features(width: int) -> Tensor:
    """The moment of tokens whose features are all equal."""
    return torch.ones(width, width)
