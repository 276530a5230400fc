"""Dobb inside Megatron's distributed optimizer.

`optimizer` steps the shards, `scheduler` and `stages` run the refreshes, `sharded_blocks` saves moments and bases.
"""
