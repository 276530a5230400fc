"""Unmodified Megatron on machines without a GPU: "cuda" is the CPU, and gloo carries the collectives.

    import testbed
    testbed.enable()                  # megatron.core; call it before, or right after, importing Megatron
    testbed.enable(training=True)     # megatron.training.pretrain as well

Everything is patched for the whole process and stays patched. A `TorchFunctionMode` would be tidier and does
not work: it is off inside every torch function that calls back into Python, so all of `backward()` escapes it.

What differs from a GPU:
  * `.cuda()` and `.cpu()` return the tensor itself, so code that relies on getting a copy would see an alias.
  * The CPU's random generator also serves "cuda": tensor-parallel ranks draw different numbers and runs repeat,
    but a resumed run with dropout does not continue bit for bit.
  * `tensor.is_cuda` is False, `tensor.device` is the CPU, streams and events do nothing.
  * Megatron's functions fused by torch.compile run uncompiled.
"""

import os

import torch

from . import device, megatron

ASK_FOR_TESTBED = "MEGATRON_DOBB_TESTBED"

_enabled: set[str] = set()


def enable(*, training: bool = False) -> None:
    """Make Megatron run on the CPU of this process; calling it again does nothing.

    Args:
        training: also patch `megatron.training`, so that its `pretrain` runs.

    Raises:
        RuntimeError: if torch sees a GPU and the environment does not ask for the test bed.
    """
    if "core" not in _enabled:
        _refuse_a_gpu()
        device.patch()
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it with tensor parallelism
        megatron.patch()
        _enabled.add("core")
    if training and "training" not in _enabled:
        from . import training as training_patches

        training_patches.patch()
        _enabled.add("training")


def _refuse_a_gpu() -> None:
    if torch.cuda.is_available() and os.environ.get(ASK_FOR_TESTBED) != "1":
        raise RuntimeError(
            f"the test bed makes every 'cuda' device the CPU, and torch sees {torch.cuda.device_count()} GPU(s) "
            'here, which it would take away from this process; hide them with CUDA_VISIBLE_DEVICES="", or ask '
            f"for the test bed with {ASK_FOR_TESTBED}=1"
        )
