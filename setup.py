"""Build of megatron_dobb. Metadata is in pyproject.toml; here is what setuptools cannot be told there.

`megatron_dobb_autoload.pth` has to lie beside the package in site-packages, in a wheel as well as in an editable
install, so that `MEGATRON_DOBB_AUTOLOAD=1` reaches an unmodified `pretrain_gpt.py`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

AUTOLOAD = Path(__file__).parent / "megatron_dobb_autoload.pth"


class BuildWithAutoload(build_py):
    """Copy the .pth file beside the package."""

    def run(self) -> None:
        super().run()
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


setup(cmdclass={"build_py": BuildWithAutoload, "editable_wheel": EditableWithAutoload})
