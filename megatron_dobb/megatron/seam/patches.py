"""Patch Megatron so that `--optimizer` accepts the registered methods. `install` is safe to call more than once.

While a run uses none of them, every patched function passes its arguments through unchanged. What a method does is
found in `methods/registry.py`; nothing here names one.
"""

import functools
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from ...errors import CheckpointError, ConfigError, UnsupportedError
from ...methods import registry
from ...post_import import Patch, after_import
from ...sharding import buffer_layout
from ..model.chunk_state import WeightTag, attach_state, note_alignment, tag_of
from ..options import config_objects
from ..options.flags import add_arguments, config_from_args
from ..options.unsupported import refuse_unsupported
from . import contract, versions

STRICT = ("assume_ok_unexpected", "raise_unexpected", "raise_all")
"""Of `--dist-ckpt-strictness`, the values with which a checkpoint must contain what is asked of it."""

_active: Any = None
_given_by_program = False
_installed = False


def install(config: Any = None) -> None:
    """Patch Megatron now, as far as it is imported, and the rest as soon as it is.

    Args:
        config: settings of a registered method, for programs without Megatron's command line: all models that this
            process wraps in Megatron's `DistributedDataParallel` from now on use it. Without it, `--optimizer` and
            `configure` decide.

    Raises:
        UnsupportedError: now or at Megatron's import, if its version is outside the supported range or a name in
            `contract.NAMES` is missing; then nothing is patched.
    """
    global _installed
    if config is not None:
        configure(config)
    if _installed:
        return
    for name in contract.modules():  # all that are imported, before any is patched
        if name in sys.modules:
            check(sys.modules[name])
    _installed = True
    for name, attachment in attachments().items():
        after_import(name, attachment)


def attachments() -> dict[str, Patch]:
    """For each module of Megatron that the contract names, the function that checks it and then patches it."""
    return {name: functools.partial(attach, patches().get(name)) for name in contract.modules()}


def attach(patch: Patch | None, module: ModuleType) -> None:
    """Check an imported module of Megatron, then patch it.

    Raises:
        UnsupportedError: see `check`.
    """
    check(module)
    if patch is not None:
        patch(module)


def check(module: ModuleType) -> None:
    """Check the version of Megatron and the names of one of its modules.

    Raises:
        UnsupportedError: names the version found and those supported, or each name that is missing.
    """
    versions.check_version(versions.megatron_version())
    contract.check(module)


def patches() -> dict[str, Patch]:
    """For each patched module of Megatron, the function that replaces parts of it."""
    return {
        "megatron.core.optimizer.distrib_optimizer": _patch_layout,
        "megatron.core.optimizer": _patch_optimizer_factory,
        "megatron.core.dist_checkpointing": _patch_checkpoints,
        "megatron.core.distributed.distributed_data_parallel": _patch_ddp,
        "megatron.training.arguments": _patch_arguments,
        "megatron.training.training": _patch_training,
    }


def configure(config: Any) -> None:
    """Use these settings for the models that are wrapped from now on; None returns to Megatron's own optimizers.

    Args:
        config: settings of any registered method, or None.

    Raises:
        ConfigError: if it is neither.
    """
    global _given_by_program
    if config is not None and registry.method_of(config) is None:
        kinds = " or ".join(method.load("settings").__name__ for method in registry.methods())
        raise ConfigError(
            f"megatron_dobb.install takes a {kinds}, and was given {config!r}: give it one, such as "
            "DobbConfig(blocks=16)"
        )
    _use(config)
    _given_by_program = config is not None


def _method_of(settings: Any) -> registry.Method:
    method = registry.method_of(settings)
    assert method is not None, settings
    return method


def _use(config: Any) -> None:
    global _active
    _active = config


def active() -> Any:
    """The settings in use, of whichever method; None where Megatron's own optimizers are."""
    return _active


# megatron.training.


def _patch_arguments(arguments: ModuleType) -> None:
    add, parse, validate = arguments.add_megatron_arguments, arguments.parse_args, arguments.validate_args

    @functools.wraps(add)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(add(parser))

    @functools.wraps(parse)
    def parse_args(*given: Any, **kwargs: Any) -> Any:
        args = parse(*given, **kwargs)
        # Arguments from a file never reach validate_args.
        if getattr(args, "optimizer", None) in registry.names() and getattr(args, "yaml_cfg", None) is not None:
            refuse_unsupported(args)
        return args

    @functools.wraps(validate)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if _given_by_program:
            method = _method_of(_active).name
            raise ConfigError(
                f"the program called megatron_dobb.install(config), and its command line says --optimizer "
                f"{args.optimizer}: give --optimizer {method} and --{method}-* flags after install() without a config"
            )
        name = args.optimizer
        if name not in registry.names():
            _use(None)
            return validate(args, *rest, **kwargs)
        config = config_from_args(args)
        refuse_unsupported(args)
        # Megatron sends every optimizer that it does not know down its layer-wise path; ours are sharded as Adam is.
        args.optimizer = config_objects.INNER
        try:
            validated = validate(args, *rest, **kwargs)
        finally:
            args.optimizer = name
        refuse_unsupported(args)
        _use(config)
        return validated

    arguments.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]
    arguments.parse_args = parse_args  # type: ignore[attr-defined]
    arguments.validate_args = validate_args  # type: ignore[attr-defined]


def _patch_training(training: ModuleType) -> None:
    original = training.get_megatron_optimizer_config

    @functools.wraps(original)
    def get_megatron_optimizer_config(args: Any) -> Any:
        name = args.optimizer
        if name not in registry.names():
            return original(args)
        if active() is None:
            raise UnsupportedError(
                f"--optimizer {name} was set after Megatron's arguments were validated, so the --{name}-* settings "
                "were never read: give it on the command line"
            )
        args.optimizer = config_objects.INNER
        try:
            config, overrides = original(args)
        finally:
            args.optimizer = name
        setattr(config, name, active())
        return config, overrides

    training.get_megatron_optimizer_config = get_megatron_optimizer_config  # type: ignore[attr-defined]


# megatron.core.


def _patch_ddp(module: ModuleType) -> None:
    ddp = module.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        settings = active()
        if settings is None:
            original(self, config, ddp_config, module, *args, **kwargs)
            return
        selection = _method_of(settings).load("select_weights")(module, settings)
        # The caller computed a layout before the weights were tagged; DDP computes one itself if it gets none.
        kwargs.pop("full_param_layout", None)
        with _quiet(logging.getLogger(ddp.__module__), "full_param_layout not provided"):
            original(self, config, ddp_config, module, *args, **kwargs)
        attach_state(self, selection)

    ddp.__init__ = __init__


def _patch_layout(module: ModuleType) -> None:
    from megatron.core.optimizer.param_layout import bucket_end_divisor

    base = module.DistributedOptimizer
    original = base._compute_per_buffer_param_layout

    @functools.wraps(original)
    def _compute_per_buffer_param_layout(
        params: list[Any],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> Any:
        stock = original(params, bucket_size, data_parallel_world_size, ddp_config, param_indices)
        if not any((tag := tag_of(p)) is not None and tag.alignment for p in params):
            return stock
        placed = params[::-1]
        items = [_item(p) for p in placed]
        divisor = bucket_end_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
        aligned = buffer_layout.align(items, bucket_size, data_parallel_world_size, divisor)
        buffer_layout.check_row_blocks(aligned, stock.bucket_indices[-1][1])
        ours = type(stock)(
            param_index_map={
                p: (start, end, bucket)
                for p, start, end, bucket in zip(placed, aligned.starts, aligned.ends, aligned.bucket_ids, strict=True)
            },
            bucket_indices=list(aligned.buckets),
            per_bucket_numel_unpadded=list(aligned.unpadded),
            param_indices=stock.param_indices,
            num_optimizer_shards=data_parallel_world_size,
        )
        note_alignment(ours, stock.bucket_indices[-1][1])
        return ours

    base._compute_per_buffer_param_layout = staticmethod(_compute_per_buffer_param_layout)
    _keep_from_other_optimizers(base)


def _item(parameter: Any) -> buffer_layout.Item:
    tag = tag_of(parameter) or WeightTag("")
    return buffer_layout.Item(
        parameter.numel(),
        tag.alignment,
        getattr(parameter, "shared_embedding", False),
        tag.name,
        columns=tag.columns,
        column_shards=tag.column_shards,
        whole_rows=tag.whole_rows,
    )


def _keep_from_other_optimizers(base: Any) -> None:
    """Let Megatron's own optimizers refuse a method's checkpoints, whose param groups and state they would mistake."""
    original = base.sharded_state_dict
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        content = given.get("metadata") or {}
        writer = next((name for name in registry.names() if content.get(name) is not None), None)
        if given.get("is_loading") and writer and not isinstance(self, registry.method(writer).load("optimizer")):
            raise CheckpointError(
                f"the checkpoint's optimizer state is {writer.capitalize()}'s: continue it with --optimizer {writer}, "
                f"or start --optimizer {self.config.optimizer} from its weights alone with --no-load-optim"
            )
        return original(self, *args, **kwargs)

    base.sharded_state_dict = sharded_state_dict


def _patch_checkpoints(module: ModuleType) -> None:
    from megatron.core.dist_checkpointing.validation import parse_strict_flag
    from torch.distributed.checkpoint.api import CheckpointException  # not derived from Exception

    load, load_common, save = module.load, module.load_common_state_dict, module.save
    signature, signature_of_save = inspect.signature(load), inspect.signature(save)

    @functools.wraps(save)
    def save_with_run_metadata(*args: Any, **kwargs: Any) -> Any:
        from ..checkpoint.save_load import content_metadata_for

        given = signature_of_save.bind(*args, **kwargs)
        state, metadata = given.arguments["sharded_state_dict"], given.arguments.get("content_metadata")
        given.arguments["content_metadata"] = content_metadata_for(state, metadata)
        return save(*given.args, **given.kwargs)

    @functools.wraps(load)
    def checked_load(*args: Any, **kwargs: Any) -> Any:
        from ..checkpoint.save_load import is_requested

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        # A program may have turned Dobb off since, for another model.
        if active() is not None or is_requested(given["sharded_state_dict"]):
            from ..checkpoint.validate import check

            check(
                given["sharded_state_dict"],
                str(given["checkpoint_dir"]),
                given["process_group"],
                together=given["validate_access_integrity"],  # only then is the load itself collective
                strict=parse_strict_flag(given["strict"]).value in STRICT,
            )
        return load(*args, **kwargs)

    @functools.wraps(load_common)
    def load_common_state_dict(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            common = load_common(checkpoint_dir, *args, **kwargs)
        except (Exception, CheckpointException) as error:
            from ..checkpoint.validate import diagnosis

            reason = diagnosis(str(checkpoint_dir)) if active() is not None else None
            if reason is None:
                raise
            raise CheckpointError(reason) from error
        if active() is not None:
            from ..checkpoint.foreign import note_writer

            note_writer(common)
        return common

    module.save = save_with_run_metadata  # type: ignore[attr-defined]
    module.load = checked_load  # type: ignore[attr-defined]
    module.load_common_state_dict = load_common_state_dict  # type: ignore[attr-defined]


def _patch_optimizer_factory(module: ModuleType) -> None:
    groups, build = module._get_param_groups, module._get_megatron_optimizer_based_on_param_groups
    signature = inspect.signature(build)

    @functools.wraps(groups)
    def _get_param_groups(model_chunks: Any, config: Any, config_overrides: Any) -> Any:
        settings = config_objects.check(model_chunks, config)
        if settings is None:
            if _given_by_program:
                _say_that_it_is_not_used(_method_of(_active).name, config.optimizer)
            return groups(model_chunks, config, config_overrides)
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

        method = _method_of(settings).name
        managed = ParamPredicate(name=method, fn=lambda p: tag_of(p) is not None)
        overrides = {**(config_overrides or {}), ParamKey(predicate=managed): {"optimizer": method}}
        return groups(model_chunks, config, overrides)

    @functools.wraps(build)
    def _get_megatron_optimizer_based_on_param_groups(*args: Any, **kwargs: Any) -> Any:
        chunks = signature.bind(*args, **kwargs).arguments["model_chunks"]
        settings = config_objects.settings_of(chunks)
        if settings is None:
            return build(*args, **kwargs)
        method = _method_of(settings)
        # Other modules import this name for isinstance checks, so it is replaced for the call alone.
        stock = module.DistributedOptimizer
        module.DistributedOptimizer = method.load("optimizer")  # type: ignore[attr-defined]
        try:
            built = build(*args, **kwargs)
        finally:
            module.DistributedOptimizer = stock  # type: ignore[attr-defined]
        method.load("startup_report")(built)
        return built

    module._get_param_groups = _get_param_groups  # type: ignore[attr-defined]
    module._get_megatron_optimizer_based_on_param_groups = (  # type: ignore[attr-defined]
        _get_megatron_optimizer_based_on_param_groups
    )


@functools.cache
def _say_that_it_is_not_used(method: str, optimizer: str) -> None:
    """A model may be left out on purpose, by `configure(None)` before it is wrapped, so this is no error."""
    from ..console import say

    say(
        f"{method}: megatron_dobb.install(config) was called, but {optimizer} updates all of this model: it was "
        "wrapped before, or by another class than Megatron's DistributedDataParallel"
    )


class _quiet:
    """Drop log records that contain a text, within a `with` block."""

    def __init__(self, logger: logging.Logger, text: str) -> None:
        self._logger = logger
        self._text = text

    def _keep(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()

    def __enter__(self) -> None:
        self._logger.addFilter(self._keep)

    def __exit__(self, *exception: object) -> None:
        self._logger.removeFilter(self._keep)
