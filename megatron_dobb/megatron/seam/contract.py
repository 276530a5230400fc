"""List every name of Megatron that this package replaces, overrides or reads, and check that Megatron has them.

A name is looked up in the imported module, never in source text. Instance attributes exist only on objects, so for
those the compiled functions of the class are asked which attributes they assign to `self`. `install` checks the names
of each module right after its import, and the doctor reports each that is missing. `tests/unit/test_contract.py`
derives the list from the syntax trees of this package and says which rows to add or to delete.
"""

import dis
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Literal

from ...errors import UnsupportedError
from .versions import SUPPORTED, megatron_version

Kind = Literal["replaced", "overridden", "read"]


@dataclass(frozen=True)
class Name:
    """A name of Megatron.

    Attributes:
        owner: the module, or `module:Class`, that has it.
        name: the name in it.
        kind: what this package does with it.
        parameters: those that it must accept, for a function.
        set_by: the class or function that sets the attribute, where that is not the owner's own code.
    """

    owner: str
    name: str
    kind: Kind
    parameters: tuple[str, ...] = ()
    set_by: str = ""

    @property
    def module(self) -> str:
        """The module whose import makes the name known."""
        return (self.set_by or self.owner).partition(":")[0]

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


def _each(kind: Kind, owner: str, names: str, set_by: str = "") -> list[Name]:
    """Rows for names without parameters, given in one string."""
    return [Name(owner, name, kind, set_by=set_by) for name in names.split()]


_CHECKPOINTING = "megatron.core.dist_checkpointing"
_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_LAYOUT = "megatron.core.optimizer.param_layout"
_LAYERS = "megatron.core.tensor_parallel.layers"
_TE = "megatron.core.extensions.transformer_engine"
_MOE = "megatron.core.transformer.moe.moe_layer:BaseMoELayer"
_PARAMETER = "torch.nn:Parameter"

_STORE_ATTRIBUTE = dis.opmap["STORE_ATTR"]
_LOADS_TWO = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
"""Instructions of Python 3.13 and later whose argument holds two local variables, the second in its low four bits."""

NAMES: tuple[Name, ...] = (
    # Command line and training.
    Name("megatron.training.arguments", "add_megatron_arguments", "replaced", ("parser",)),
    Name("megatron.training.arguments", "parse_args", "replaced", ("extra_args_provider", "ignore_unknown_args")),
    Name("megatron.training.arguments", "validate_args", "replaced", ("args",)),
    Name("megatron.training.training", "get_megatron_optimizer_config", "replaced", ("args",)),
    Name("argparse:Namespace", "curr_iteration", "read", set_by="megatron.training.training:train"),
    *_each("read", "megatron.training.global_vars", "_GLOBAL_ARGS get_tensorboard_writer get_wandb_writer"),
    *_each("read", "megatron.core.num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"),
    *_each("read", "megatron.core.num_microbatches_calculator:NumMicroBatchesCalculator", "get"),
    *_each("read", "megatron.core.package_info", "__version__"),
    # Models and their buffers.
    *_each("read", "megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    Name(_DDP, "__init__", "replaced", ("config", "ddp_config", "module", "full_param_layout")),
    *_each("read", _DDP, "config ddp_config full_param_layout"),
    *_each("read", _DDP, "dp_group dp_cp_group intra_dp_cp_group expt_dp_group intra_expt_dp_group"),
    *_each("read", _DDP, "tp_group pp_group ep_group"),
    *_each(
        "read",
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        "use_distributed_optimizer pad_buckets_for_high_nccl_busbw",
    ),
    *_each(
        "read",
        "megatron.core.transformer.transformer_config:TransformerConfig",
        "calculate_per_token_loss expert_model_parallel_size fp4 fp8 num_moe_experts sequence_parallel",
    ),
    *_each("read", f"{_BUFFERS}:_ParamAndGradBuffer", "buckets param_index_map"),
    *_each("read", f"{_BUFFERS}:_ParamAndGradBucket", "grad_data numel_unpadded"),
    Name(_LAYOUT, "bucket_end_divisor", "read", ("data_parallel_world_size", "pad_for_high_nccl_busbw")),
    *_each(
        "read",
        f"{_LAYOUT}:PerBufferParamLayout",
        "bucket_indices num_optimizer_shards param_index_map param_indices per_bucket_numel_unpadded",
    ),
    *_each("read", f"{_LAYOUT}:FullParamLayout", "layouts"),
    *_each("read", f"{_LAYOUT}:BufferKey", "is_expert_parallel"),
    # The optimizer.
    Name(_OPTIMIZER, "_get_param_groups", "replaced", ("model_chunks", "config", "config_overrides")),
    Name(
        _OPTIMIZER,
        "_get_megatron_optimizer_based_on_param_groups",
        "replaced",
        ("config", "model_chunks", "param_groups"),
    ),
    Name(_OPTIMIZER, "DistributedOptimizer", "replaced"),
    Name(
        _OPTIMIZER,
        "get_megatron_optimizer",
        "read",
        ("config", "model_chunks", "config_overrides", "use_gloo_process_groups", "pg_collection"),
    ),
    *_each("read", "megatron.core.optimizer.optimizer", "param_group_identifier_keys"),
    *_each("read", "megatron.core.optimizer.optimizer_config:OptimizerConfig", "optimizer use_distributed_optimizer"),
    Name("megatron.core.optimizer.optimizer_config", "ParamKey", "read", ("predicate",)),
    Name("megatron.core.optimizer.optimizer_config", "ParamPredicate", "read", ("name", "fn")),
    *_each("read", "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer HAVE_APEX_OR_TE"),
    Name(
        _DISTRIBUTED,
        "_compute_per_buffer_param_layout",
        "replaced",
        ("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
    ),
    Name(
        _DISTRIBUTED,
        "sharded_state_dict",
        "replaced",
        ("model_sharded_state_dict", "is_loading", "sharding_type", "metadata"),
    ),
    Name(
        _DISTRIBUTED,
        "__init__",
        "overridden",
        ("optimizer", "config", "grad_scaler", "init_state_fn", "model_chunks"),
    ),
    Name(_DISTRIBUTED, "_get_main_param_and_optimizer_states", "overridden", ("model_param",)),
    Name(_DISTRIBUTED, "_set_main_param_and_optimizer_states", "overridden", ("model_param", "tensors")),
    Name(_DISTRIBUTED, "load_parameter_state_from_dp_reshardable", "overridden", ("state_dict",)),
    Name(_DISTRIBUTED, "load_parameter_state_from_fully_reshardable", "overridden", ("state_dict",)),
    Name(_DISTRIBUTED, "load_state_dict", "overridden", ("state_dict",)),
    Name(
        _DISTRIBUTED,
        "sharded_param_state_fully_reshardable",
        "overridden",
        ("model_sharded_state_dict", "is_loading", "metadata"),
    ),
    Name(_DISTRIBUTED, "zero_grad", "overridden", ("set_to_none",)),
    *_each(
        "overridden",
        _DISTRIBUTED,
        "get_parameter_state_dp_reshardable offload_to_cpu prepare_grads restore_from_cpu "
        "sharded_param_state_dp_reshardable state_dict step_with_ready_grads",
    ),
    *_each(
        "read",
        _DISTRIBUTED,
        "_get_model_param_range_map _is_distopt_quantized_param buffers config data_parallel_group grad_scaler "
        "init_state_fn is_stub_optimizer model_chunks model_float16_groups model_fp32_groups model_param_gbuf_map "
        "optimizer optimizer_state_keys shard_fp32_from_float16_groups shard_fp32_groups",
    ),
    *_each(
        "read",
        _DISTRIBUTED,
        "expert_tp_group tp_group",
        set_by=f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups",
    ),
    # Layers.
    Name(f"{_LAYERS}:ColumnParallelLinear", "forward", "read", ("input_",)),
    *_each(
        "read",
        f"{_LAYERS}:ColumnParallelLinear",
        "config explicit_expert_comm gather_output input_size is_expert output_size sequence_parallel tp_group",
    ),
    Name(f"{_LAYERS}:RowParallelLinear", "forward", "read", ("input_",)),
    *_each(
        "read",
        f"{_LAYERS}:RowParallelLinear",
        "config explicit_expert_comm input_is_parallel input_size input_size_per_partition is_expert output_size "
        "sequence_parallel tp_group",
    ),
    *_each("read", _LAYERS, "ColumnParallelLinear RowParallelLinear"),
    Name(_PARAMETER, "allreduce", "read", set_by=f"{_LAYERS}:ColumnParallelLinear"),
    *_each(
        "read",
        _PARAMETER,
        "is_embedding_or_output_parameter shared_embedding",
        set_by="megatron.core.models.common.language_module.language_module:LanguageModule",
    ),
    *_each("read", "megatron.core.transformer.moe.moe_layer", "BaseMoELayer"),
    *_each("read", _MOE, "ep_group experts num_local_experts"),
    *_each("read", "megatron.core.transformer.transformer_layer:TransformerLayer", "layer_number"),
    Name(f"{_TE}:TELinear", "forward", "read", ("x",)),
    Name(f"{_TE}:TELayerNormColumnParallelLinear", "forward", "read", ("x",)),
    Name(f"{_TE}:TEColumnParallelGroupedLinear", "forward", "read", ("x", "m_splits")),
    *_each(
        "read",
        _TE,
        "TEColumnParallelGroupedLinear TEColumnParallelLinear TELayerNormColumnParallelLinear TELinear "
        "TERowParallelGroupedLinear TERowParallelLinear",
    ),
    *(
        Name(f"{_TE}:{layer}", name, "read")
        for layer in ("TELinear", "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear")
        for name in ("_tp_group", "config")
    ),
    # Checkpoints.
    Name(_CHECKPOINTING, "save", "replaced", ("sharded_state_dict", "checkpoint_dir", "content_metadata")),
    Name(
        _CHECKPOINTING,
        "load",
        "replaced",
        ("sharded_state_dict", "checkpoint_dir", "process_group", "validate_access_integrity", "strict"),
    ),
    Name(_CHECKPOINTING, "load_common_state_dict", "replaced", ("checkpoint_dir",)),
    *_each("read", f"{_CHECKPOINTING}.dict_utils", "nested_values"),
    Name(f"{_CHECKPOINTING}.mapping", "LocalNonpersistentObject", "read", ("obj",)),
    *_each("read", f"{_CHECKPOINTING}.mapping:LocalNonpersistentObject", "unwrap"),
    *_each("read", f"{_CHECKPOINTING}.mapping", "ShardedTensor"),
    *_each(
        "read",
        f"{_CHECKPOINTING}.mapping:ShardedTensor",
        "allow_shape_mismatch data dtype from_rank_offsets global_shape key local_shape replica_id",
    ),
    *_each("read", f"{_CHECKPOINTING}.validation", "parse_strict_flag"),
    # Megatron-Bridge, for bridge.py alone.
    *_each("read", "megatron.bridge.training.config", "OptimizerConfig"),
    *_each("overridden", "megatron.bridge.training.config:OptimizerConfig", "finalize"),
    Name(
        "megatron.bridge.training.config:OptimizerConfig",
        "provide",
        "overridden",
        ("model_chunks", "config_overrides", "use_gloo_process_groups", "pg_collection"),
    ),
    *_each("read", "megatron.bridge.utils.instantiate_utils", "register_allowed_target_prefix"),
)


def modules() -> list[str]:
    """The modules whose import makes names known, in the table's order."""
    return list(dict.fromkeys(name.module for name in NAMES))


def check(module: ModuleType) -> None:
    """Check the names that an imported module makes known.

    Raises:
        UnsupportedError: lists every name that is missing or takes other parameters.
    """
    found = list(problems(module))
    if found:
        raise UnsupportedError(
            f"{'; '.join(found)} in megatron-core {megatron_version()}, so megatron_dobb cannot attach to it; "
            f"supported are versions {SUPPORTED}. If this version is inside the range, please report it"
        )


def problems(module: ModuleType) -> Iterator[str]:
    """Describe each name of an imported module that Megatron lacks, or whose parameters have changed."""
    for name in NAMES:
        if name.module == module.__name__:
            problem = _problem(name, module)
            if problem is not None:
                yield problem


def _problem(name: Name, module: ModuleType) -> str | None:
    source = (name.set_by or name.owner).partition(":")[2]
    owner = getattr(module, source, None) if source else module
    if name.module == _TE and source and not inspect.isclass(owner):
        return None  # without Transformer Engine, a mock is in its place, or None; no model contains such a layer
    if owner is None:
        return f"{module.__name__}.{source} does not exist"
    if name.set_by:
        known = any(_assigns(code, name.name, to_self=False) for code in _functions(owner))
        return None if known else f"{name} does not exist ({name.set_by} does not set it)"
    found: Any = getattr(owner, name.name, None)
    if found is None and name.name not in vars(owner) and not (inspect.isclass(owner) and _has(owner, name.name)):
        return f"{name} does not exist"
    if name.parameters:
        signature = inspect.signature(found)
        missing = [parameter for parameter in name.parameters if parameter not in signature.parameters]
        if missing:
            return f"{name}{signature} has no parameter {', '.join(missing)}"
    return None


def _has(owner: type, name: str) -> bool:
    """Whether objects of a class have an attribute: it is a dataclass field, or a method assigns it to `self`."""
    if name in getattr(owner, "__dataclass_fields__", ()):
        return True
    return any(_assigns(code, name, to_self=True) for code in _functions(owner))


def _functions(owner: Any) -> Iterator[CodeType]:
    """The compiled functions of a class and its bases, or of one function, with those that they contain."""
    values = [owner]
    if inspect.isclass(owner):
        values = [value for base in owner.__mro__ for value in vars(base).values()]
    for value in values:
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None:
            yield from _with_inner(code)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _assigns(code: CodeType, name: str, *, to_self: bool) -> bool:
    """Whether a function assigns an attribute.

    Args:
        code: the function, compiled.
        name: the attribute.
        to_self: count only `self.name = ...`; otherwise any object's, and a name given to `setattr`.
    """
    if not to_self and "setattr" in code.co_names and name in code.co_consts:
        return True
    return name in code.co_names and any(
        stored == name and (of_self or not to_self) for stored, of_self in _assignments(code)
    )


@functools.cache
def _assignments(code: CodeType) -> frozenset[tuple[str, bool]]:
    """The attributes that a function assigns, each with whether it is its first argument's.

    `dis.get_instructions` takes 30 times as long, and the program waits for this while it imports Megatron.
    """
    found = set()
    before, argument = (0, 0), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | low
        if operation == dis.EXTENDED_ARG:
            continue
        if operation == _STORE_ATTRIBUTE:
            loaded, local = before
            if dis.opname[loaded] in _LOADS_TWO:
                local &= 15
            elif not dis.opname[loaded].startswith(("LOAD_FAST", "LOAD_DEREF")):
                local = -1
            found.add((code.co_names[argument], local == 0 and code.co_argcount > 0))
        before, argument = (operation, argument), 0
    return frozenset(found)
