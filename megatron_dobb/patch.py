"""`import megatron_dobb.patch` as the first line of a training script teaches Megatron `--optimizer dobb`."""

from .megatron import install

install()
