"""Prepares every rank whose PYTHONPATH has this folder, before the unmodified training script starts.

"cuda" means the CPU, and Megatron's compiled dataset helpers are also looked for in MEGATRON_DATASET_HELPERS.
`real_pretrain_gpt.py` uses it.
"""

import os

if "RANK" in os.environ:
    import testbed

    testbed.enable(training=True)

    import megatron.core.datasets

    megatron.core.datasets.__path__.append(os.environ["MEGATRON_DATASET_HELPERS"])
