"""Dobb in Megatron-Bridge: an optimizer config for its `ConfigContainer`. Only this file imports `megatron.bridge`.

Bridge finalizes its configs, then wraps the model, then asks the optimizer config to provide the optimizer.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.optimizer import get_megatron_optimizer

from ..errors import ConfigError
from ..methods.dobb.settings import DobbConfig
from .options.config_objects import INNER
from .seam.patches import configure, install

# Bridge writes its configs beside each checkpoint, by the names of their classes, and makes only those again that it
# knows by the beginning of their names.
register_allowed_target_prefix(f"{__name__.partition('.')[0]}.")


@dataclass
class DobbOptimizerConfig(OptimizerConfig):
    """Bridge's `OptimizerConfig` with Dobb for the matrices of layers and AdamW for everything else.

    Attributes:
        dobb: the settings of Dobb. Learning rate, weight decay, clipping and AdamW's settings are the config's own.
    """

    optimizer: str = INNER
    use_distributed_optimizer: bool = True
    dobb: DobbConfig = field(default_factory=DobbConfig)

    def finalize(self) -> None:
        """Have the models that Bridge wraps from now on laid out for Dobb.

        Raises:
            ConfigError: if `dobb` is no `DobbConfig`.
        """
        install()
        if self.dobb is None:
            raise ConfigError(
                "DobbOptimizerConfig.dobb is None: give it a DobbConfig, such as DobbConfig(blocks=16), or "
                "use Bridge's OptimizerConfig for a training without Dobb"
            )
        configure(self.dobb)
        super().finalize()

    def provide(
        self,
        model_chunks: Any,
        config_overrides: Any = None,
        use_gloo_process_groups: bool = False,
        pg_collection: Any = None,
    ) -> Any:
        """Build the optimizer of a wrapped model; Bridge calls this.

        Raises:
            UnsupportedError: if the model was wrapped before `finalize`, or a config asks for what cannot work.
        """
        return get_megatron_optimizer(
            config=self,
            model_chunks=model_chunks if isinstance(model_chunks, list) else [model_chunks],
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )
