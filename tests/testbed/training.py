"""Patches of megatron.training."""

import functools


def patch() -> None:
    """Import megatron.training and patch it for this process."""
    from megatron.core.datasets import utils
    from megatron.training import training

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # The wheel brings the data helpers compiled and without the Makefile that pretrain() would run.
    utils.compile_helpers = lambda: None
