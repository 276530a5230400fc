"""Public import path of `model.adapters`, for adapters of other packages.

`Geometry` is the earlier name of `GlobalShape`.
"""

from .model.adapters import REGISTRY, SEQUENCE_DIM, Adapter, GlobalShape, register

Geometry = GlobalShape

__all__ = ["REGISTRY", "SEQUENCE_DIM", "Adapter", "Geometry", "GlobalShape", "register"]
