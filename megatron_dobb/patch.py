"""Add `--optimizer dobb` to Megatron: `import megatron_dobb.patch` in the first line of a training script."""

from .megatron import install

install()
