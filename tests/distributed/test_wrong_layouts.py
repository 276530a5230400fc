"""Settings and layouts that cannot work are refused on every rank, by name, before training starts."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from layout_runs import Layout, Run, global_batch, start
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_dobb import DobbConfig
from megatron_dobb.errors import BlockError, ConfigError, LayoutError, UnsupportedError
from megatron_dobb.megatron.dobb.process_groups import timeout_of
from megatron_dobb.megatron.seam import patches
from testbed import gpt, processes

ONE, TENSOR_PARALLEL = Layout(micro_batch=24), Layout(2, tensor=2, micro_batch=24)
PROJECTION = "decoder.layers.0.self_attention.linear_proj.weight"


def errors_of(layout, config, **optimizer):
    """What every rank raises while the optimizer is built. A rank that raises nothing would be an error here."""

    def build():
        start(layout)
        mine = config(dist.get_rank()) if callable(config) else config
        try:
            Run(layout, mine, **optimizer)
        except Exception as error:
            return error
        raise AssertionError("built without an error")

    return processes.run(layout.world, build, timeout=60)


def assert_raised(errors, kind, *parts):
    for error in errors:
        assert type(error) is kind, error
        for part in parts:
            assert part in str(error)


def test_blocks_that_would_span_two_tensor_parallel_ranks_are_refused_with_the_counts_that_work():
    errors = errors_of(TENSOR_PARALLEL, DobbConfig(blocks=1))
    assert_raised(errors, BlockError, PROJECTION, "--dobb-blocks 1 makes 1 blocks", "2 tensor-parallel ranks")
    assert_raised(errors, BlockError, "use one of 2, 4, 8, 16, 32,")


def test_block_width_that_would_span_two_tensor_parallel_ranks_is_refused():
    errors = errors_of(TENSOR_PARALLEL, DobbConfig(block_width=32))
    assert_raised(errors, BlockError, PROJECTION, "--dobb-block-width 32 makes 1 blocks", "use one of 1, 2, 4, 8, 16,")


def test_the_advice_for_row_parallel_weights_works():
    def train():
        start(TENSOR_PARALLEL)
        run = Run(TENSOR_PARALLEL, DobbConfig(blocks=1, blocks_for={"*.linear_proj": 2, "*.linear_fc2": 4}))
        gpt.train_step(run.model, run.optimizer, global_batch(0), 24)
        return {group.width for group in run.dobb.refresh_groups}

    assert processes.run(2, train) == [{64, 16}] * 2


def test_block_count_that_does_not_divide_the_columns_is_refused():
    errors = errors_of(ONE, DobbConfig(blocks=5))
    assert_raised(
        errors, BlockError, "--dobb-blocks 5 does not divide its 32 input features", "use one of", "--dobb-exclude"
    )


def test_model_without_a_managed_weight_is_refused_with_the_reasons():
    errors = errors_of(ONE, DobbConfig(blocks=4, exclude="*"))
    assert_raised(
        errors, ConfigError, "manages no matrix", "8 parameters: excluded by --dobb-exclude", "--optimizer adam"
    )


def test_pattern_that_names_no_weight_is_refused_on_every_rank():
    errors = errors_of(Layout(2, micro_batch=12), DobbConfig(blocks=4, exclude="*.linear_fc3"))
    assert_raised(errors, ConfigError, "--dobb-exclude '*.linear_fc3' matches no weight")


def test_ranks_with_different_settings_are_refused_instead_of_hanging():
    errors = errors_of(
        Layout(2, micro_batch=12),
        lambda rank: DobbConfig(blocks=4, blocks_for={"*.0.mlp.linear_fc2": 4 if rank == 0 else 8}),
    )
    assert_raised(errors, LayoutError, "manage different weights", "layers.0.mlp.linear_fc2", "same --dobb-* flags")


def test_optimizer_without_the_distributed_optimizer_is_refused():
    errors = errors_of(ONE, DobbConfig(blocks=4), use_distributed_optimizer=False)
    assert_raised(errors, UnsupportedError, "use_distributed_optimizer=True")


def test_dobb_gets_no_model_that_was_wrapped_without_it():
    def build():
        start(ONE)
        patches.configure(None)
        model = gpt.build()
        config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        config.dobb = DobbConfig(blocks=4)
        with pytest.raises(UnsupportedError, match=r"wrapped .* without Dobb"):
            get_megatron_optimizer(config, [model])
        return True

    assert processes.run(1, build) == [True]


def test_collectives_of_moments_have_the_timeout_that_megatron_was_given():
    def timeouts():
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=3)
        return {timeout_of(group.group) for group in Run(Layout(2, micro_batch=12), DobbConfig(blocks=4)).groups}

    assert processes.run(2, timeouts) == [{timedelta(minutes=3)}] * 2
