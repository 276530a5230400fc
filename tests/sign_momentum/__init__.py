"""Sign momentum, the smallest method: `W <- (1 - lr wd) W - lr tau sign(M)`. It shows how to add an optimizer."""

from megatron_dobb.methods import registry

registry.register(
    registry.Method(
        "signmomentum",
        settings="sign_momentum.settings:SignMomentumConfig",
        select_weights="sign_momentum.select_weights:select_weights",
        optimizer="sign_momentum.optimizer:SignMomentumOptimizer",
        refusals="sign_momentum.settings:REFUSALS",
        startup_report="sign_momentum.optimizer:log_start",
    )
)
