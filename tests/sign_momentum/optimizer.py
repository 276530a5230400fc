"""Sign momentum on the shards of Megatron's distributed optimizer."""

from collections.abc import Sequence

from torch import Tensor

from megatron_dobb.megatron.console import say
from megatron_dobb.megatron.model.chunk_state import ManagedWeight
from megatron_dobb.megatron.shard_optimizer import FlatSegment, ShardOptimizer


class SignMomentumOptimizer(ShardOptimizer[ManagedWeight, FlatSegment]):
    """ZeRO-1 with sign momentum. Each rank updates its shard by itself."""

    method = "signmomentum"

    def _update(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        for group, segments, of_group in zip(self.optimizer.param_groups, self.segments, gradients, strict=True):
            for segment, gradient in zip(segments, of_group, strict=True):
                segment.momentum.lerp_(gradient.float(), 1 - self.settings.momentum)
                segment.weight.mul_(1 - group["lr"] * group["weight_decay"])
                segment.weight.add_(segment.momentum.sign(), alpha=-group["lr"] * self.settings.update_scale)


def log_start(optimizer: SignMomentumOptimizer) -> None:
    """Say what this rank updates."""
    say(f"signmomentum: {len(optimizer.managed)} matrices")
