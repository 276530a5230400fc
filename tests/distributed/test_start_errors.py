"""What stops a run before its first step, on every rank, and lopsided cases that must not stop it."""

import pytest
import torch.distributed as dist

import megatron_dobb
import testbed

testbed.enable()
megatron_dobb.install()

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402  (imported after the patches)

from megatron_dobb.errors import BlockError, ConfigError, LayoutError  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402
from megatron_dobb.methods.dobb.settings import DobbConfig  # noqa: E402
from testbed import gpt, processes  # noqa: E402


def start(settings, ddp=None, **sizes):
    """Build the test bed's GPT and its optimizer."""
    gpt.initialize(**sizes)
    patches.configure(settings)
    model = gpt.build(ddp)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, adam_eps=1e-3, use_distributed_optimizer=True)
    config.dobb = settings
    optimizer = get_megatron_optimizer(config, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def error_of_every_rank(world, error, settings, **sizes):
    """The messages with which `start` fails, after checking that it does so on every rank."""

    def fail():
        with pytest.raises(error) as raised:
            start(settings, **sizes)
        dist.barrier()  # nobody is left waiting in a collective
        return str(raised.value)

    return processes.run(world, fail)


def test_a_model_without_a_managed_matrix_is_an_error_that_says_where_all_went():
    for message in error_of_every_rank(2, ConfigError, DobbConfig(blocks=4, exclude=("*",))):
        assert message.startswith("--optimizer dobb manages no matrix of this model: ")
        for reason in ("2 parameters: embedding or output layer", "8 parameters: excluded by --dobb-exclude"):
            assert reason in message
        assert message.endswith("Use --optimizer adam, or fewer --dobb-exclude patterns")


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"exclude": ("*.linear_fc3",)}, r"--dobb-exclude '\*.linear_fc3' matches no weight"),
        ({"blocks_for": {"*.linear_fc3": 2}}, r"--dobb-blocks-for '\*.linear_fc3' matches no weight"),
        ({"exclude": ("embedding.*",)}, r"--dobb-exclude 'embedding.\*' matches no weight"),
    ],
    ids=["exclude", "blocks-for", "only-an-embedding"],
)
def test_a_pattern_that_names_nothing_is_an_error(settings, pattern):
    for message in error_of_every_rank(2, ConfigError, DobbConfig(blocks=4, **settings)):
        with pytest.raises(ConfigError, match=pattern):
            raise ConfigError(message)


@pytest.mark.parametrize("settings", [{"blocks": 5}, {"block_width": 5}], ids=["count", "width"])
def test_blocks_that_do_not_divide_a_weight_are_an_error_with_what_would(settings):
    ((name, value),) = settings.items()
    for message in error_of_every_rank(2, BlockError, DobbConfig(**settings)):
        assert f"--dobb-{name.replace('_', '-')} {value} does not divide its 32 input features; use one of " in message
        assert message.startswith("decoder.layers.0.")


def test_blocks_that_would_span_two_tensor_parallel_ranks_are_an_error_with_what_would_work():
    messages = error_of_every_rank(2, BlockError, DobbConfig(blocks=1), tensor_model_parallel_size=2)
    for message in messages:
        assert "linear_proj.weight: --dobb-blocks 1 makes 1 blocks, which is not a multiple of the 2" in message
        assert "use one of 2, 4" in message


def test_ranks_with_different_settings_are_told_so():
    def fail():
        blocks = 4 if dist.get_rank() == 0 else {"*": 4, "*.linear_fc2": 16}
        with pytest.raises(LayoutError, match=r"manage different weights .*the same --dobb-"):
            start(DobbConfig(blocks=blocks))
        return True

    assert processes.run(2, fail) == [True, True]


ALL_BUT_ONE = ("decoder.layers.1.*", "*.linear_fc?", "*.linear_qkv")
"""Leaves the 32 x 32 output projection of layer 0."""


def test_ranks_whose_shard_holds_nothing_of_dobb_take_part():
    def train():
        model, optimizer = start(DobbConfig(blocks=1, refresh_interval=2, exclude=ALL_BUT_ONE))
        losses = [gpt.train_step(model, optimizer, gpt.global_batch(step, 8)) for step in range(4)]
        (group,) = optimizer.chained_optimizers[0].refresh_groups
        total = [losses]
        if dist.get_world_size() > 1:
            total = [None] * dist.get_world_size()
            dist.all_gather_object(total, losses)
        means = [sum(step) / len(total) for step in zip(*total, strict=True)]
        return means, len(group.held), len(group.owned)

    ((alone, *_),) = processes.run(1, train)
    ranks = processes.run(4, train)
    assert sorted(held for _, held, _ in ranks)[0] == 0
    assert sum(owned for *_, owned in ranks) == 1
    for means, *_ in ranks:
        assert means == pytest.approx(alone, rel=1e-4)
