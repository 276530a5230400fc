"""Run a function on a module right after its first import, or now if it is already imported.

Megatron is heavy and reads its environment at import time, so the patches wait until the training script imports it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


class PostImportFinder(importlib.abc.MetaPathFinder):
    """Finder that delegates to the other finders and patches a module once it has been executed."""

    def __init__(self) -> None:
        self.patches: dict[str, Patch] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module with a pending patch; None for any other module.

        A program may look up a spec only to see whether the module exists, and a failed import may be retried, so the
        patch stays pending until the module has been executed.
        """
        if name not in self.patches:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader, self.patches)
                return spec
        return None


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, patches: dict[str, Patch]) -> None:
        self._loader = loader
        self._patches = patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        patch = self._patches.get(module.__name__)
        if patch is not None:
            patch(module)
            del self._patches[module.__name__]


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
