"""Run a function on a module right after its first import, or now if it is imported already.

Megatron is heavy and reads its environment while it is imported, so the patches wait until the training script
imports it by itself.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


class PostImportFinder(importlib.abc.MetaPathFinder):
    """A finder that lets the others find a module and then patches it when it has been executed."""

    def __init__(self) -> None:
        self.patches: dict[str, Patch] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that waits for a patch; None for every other one."""
        if name not in self.patches:
            return None
        patch = self.patches.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)


_finder = PostImportFinder()


def after_import(name: str, patch: Patch) -> None:
    """Apply `patch` to the module `name`, now or as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.patches[name] = patch
