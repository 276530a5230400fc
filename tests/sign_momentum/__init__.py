"""Sign momentum, the smallest method: `W <- (1 - lr wd) W - lr tau sign(M)`. It shows how to add an optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dobb.methods import registry

METHOD = registry.Method(
    "signmomentum",
    settings="sign_momentum.settings:SignMomentumConfig",
    select_weights="sign_momentum.select_weights:select_weights",
    optimizer="sign_momentum.optimizer:SignMomentumOptimizer",
    refusals="sign_momentum.settings:REFUSALS",
    startup_report="sign_momentum.optimizer:log_start",
)


@contextmanager
def registered() -> Iterator[None]:
    """Register the method for a while: `registry.register(METHOD)` is all that a package would do."""
    registry.register(METHOD)
    try:
        yield
    finally:
        registry.unregister(METHOD)
