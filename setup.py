"""Build of megatron_dobb. Metadata is in pyproject.toml; here is what setuptools cannot be told there.

The extension, `megatron_dobb._C`, is planned in build_support/extension.py. Where it cannot be built, the package is
installed without it, and `megatron_dobb/_not_built.txt` says why.

`megatron_dobb_autoload.pth` has to lie beside the package in site-packages, in a wheel as well as in an editable
install, so that `MEGATRON_DOBB_AUTOLOAD=1` reaches an unmodified `pretrain_gpt.py`.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_support import extension

AUTOLOAD = Path(__file__).parent / "megatron_dobb_autoload.pth"
PLAN = extension.plan() if {"bdist_wheel", "editable_wheel", "build_ext"} & {*sys.argv} else extension.Plan()


class BuildWithAutoload(build_py):
    """Copy the .pth file beside the package, and note why there is no extension if there is none."""

    def run(self) -> None:
        super().run()
        extension.say(PLAN.notes)
        root = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        extension.write_note(root, PLAN.notes)
        if self.editable_mode and not PLAN.extensions:
            for earlier in (root / "megatron_dobb").glob("_C*.so"):
                earlier.unlink()
        if not self.editable_mode:
            self.copy_file(str(AUTOLOAD), str(Path(self.build_lib) / AUTOLOAD.name))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        own = [] if self.editable_mode else [str(Path(self.build_lib) / AUTOLOAD.name)]
        return [*super().get_outputs(include_bytecode), *own]


class EditableWithAutoload(editable_wheel):
    """Add the .pth file to the wheel that links back to the source tree."""

    def _select_strategy(self, *args, **kwargs):
        link = super()._select_strategy(*args, **kwargs)
        return _WithAutoload(link)


class _WithAutoload:
    def __init__(self, link) -> None:
        self._link = link

    def __enter__(self):
        self._link.__enter__()
        return self

    def __exit__(self, *exception):
        return self._link.__exit__(*exception)

    def __call__(self, wheel, files, mapping) -> None:
        self._link(wheel, files, mapping)
        wheel.writestr(AUTOLOAD.name, AUTOLOAD.read_bytes())


setup(
    cmdclass=PLAN.commands | {"build_py": BuildWithAutoload, "editable_wheel": EditableWithAutoload},
    ext_modules=PLAN.extensions,
)
