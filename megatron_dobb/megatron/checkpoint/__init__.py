"""Save optimizer state to Megatron's distributed checkpoints and load it on any parallel layout.

`metadata` describes the run that saved, `validate` checks the files, `foreign` knows other optimizers' checkpoints.
"""
