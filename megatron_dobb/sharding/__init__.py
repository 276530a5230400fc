"""Place parameters in flat buffers and share them out over ranks.

Integer arithmetic on layouts, shards and owners, with views on flat tensors; no process group and no Megatron.
"""
