"""Save optimizer state to Megatron's distributed checkpoints and load it on any parallel layout.

The path of a save:

1. Megatron calls `ShardOptimizer.sharded_state_dict(metadata=...)`, which lets Megatron describe masters and momentum.
2. `save_load.MethodCheckpoint.add` adds the method's own tensors (`ExtraState.to_save`) and its run metadata, which it
   puts into `metadata` and, for programs that save another dictionary, into the state.
3. The patched `dist_checkpointing.save` puts the run metadata into the checkpoint: `save_load.content_metadata_for`.

The path of a load:

1. Megatron calls `sharded_state_dict(is_loading=True)` with the stored content metadata. `MethodCheckpoint.find_run`
   reads the run metadata (`metadata`), or decides whether another optimizer's state can be continued (`foreign`).
2. `MethodCheckpoint.request` adds what the method wants to read (`ExtraState.to_load`).
3. The patched `dist_checkpointing.load` checks that the files hold all that is wanted (`validate`) and reads it.
4. `ShardOptimizer.load_state_dict` lets Megatron take masters and momentum; `MethodCheckpoint.resume` the rest.
"""
