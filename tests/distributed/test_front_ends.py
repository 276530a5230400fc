"""Programs that build Megatron's configs, models and optimizers themselves, without Megatron's command line.

Each test makes the calls of one kind of program in its order; docs/front-ends.md shows the same lines.
"""

import contextlib
import dataclasses
import gc
import io
import os
import sys
import types
import weakref

import pytest
import torch
import torch._dynamo  # here, not in every rank: its import takes a second

import megatron_dobb
import testbed

testbed.enable()
megatron_dobb.install()

import megatron.core.models.mimo  # noqa: E402, F401  (or the optimizer factory imports it in every rank)
from megatron.core import dist_checkpointing  # noqa: E402  (Megatron is imported after the patches)
from megatron.core.optimizer import (  # noqa: E402
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)

from megatron_dobb import DobbConfig  # noqa: E402
from megatron_dobb.errors import CheckpointError, ConfigError, UnsupportedError  # noqa: E402
from megatron_dobb.megatron import configure  # noqa: E402
from megatron_dobb.megatron.checkpoint.save_load import RUN, STATE, content_metadata_for  # noqa: E402
from testbed import gpt, processes  # noqa: E402

SETTINGS = DobbConfig(blocks=4, refresh_interval=3)
STEPS = 5


@pytest.fixture(autouse=True)
def _no_settings_left_behind():
    yield
    configure(None)


def train(model, optimizer, before_step=lambda: None):
    """Losses of `STEPS` steps on one batch, and this rank's weights after them."""
    model.config.grad_scale_func = optimizer.scale_loss
    losses = []
    for _ in range(STEPS):
        before_step()
        losses.append(gpt.train_step(model, optimizer, gpt.global_batch(0, 4)))
    return losses, [p.detach().clone() for p in model.parameters()]


def config(**changes):
    return OptimizerConfig(**({"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3} | changes))


def with_install(**optimizer):
    """The two lines of the documentation, in the order of verl and of NeMo: install, wrap, build."""
    gpt.initialize()
    megatron_dobb.install(SETTINGS)
    model = gpt.build()
    built = get_megatron_optimizer(config(use_distributed_optimizer=True, **optimizer), [model])
    return train(model, built), built.chained_optimizers[0].attempted_steps


def with_both_places():
    """As before `install` took a config."""
    gpt.initialize()
    configure(SETTINGS)
    model = gpt.build()
    settings = config(use_distributed_optimizer=True)
    settings.dobb = SETTINGS
    return train(model, get_megatron_optimizer(settings, [model])), STEPS


def assert_same(found, expected):
    for ((losses, weights), steps), ((other_losses, other_weights), other_steps) in zip(found, expected, strict=True):
        assert steps == other_steps == STEPS
        assert losses == other_losses
        assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


@pytest.fixture(scope="module")
def expected():
    """What every way to Dobb must compute."""
    return processes.run(2, with_both_places)


def test_one_call_of_install_before_the_model_is_wrapped_is_enough(expected):
    assert expected[0][0][0][-1] < expected[0][0][0][0]
    assert_same(processes.run(2, with_install), expected)


# Megatron-Bridge.


def bridge_stand_in():
    """Of `megatron.bridge`, the config class that ours derives from: its fields are Megatron's, checked when finalized.

    The real one needs dozens of packages, some of which import on machines with a GPU only.
    """

    @dataclasses.dataclass
    class BridgeOptimizerConfig(OptimizerConfig):
        def __post_init__(self):
            pass

        def finalize(self):
            super().__post_init__()

    config, instantiate = "megatron.bridge.training.config", "megatron.bridge.utils.instantiate_utils"
    names = ["megatron.bridge", "megatron.bridge.training", config, "megatron.bridge.utils", instantiate]
    modules = {name: types.ModuleType(name) for name in names}
    modules[config].OptimizerConfig = BridgeOptimizerConfig
    modules[instantiate].allowed = []
    modules[instantiate].register_allowed_target_prefix = modules[instantiate].allowed.append
    return modules


def with_bridge(finalize=True):
    """Bridge's order: configs are finalized, the model is wrapped, `setup_optimizer` asks the config to provide."""
    stand_in = bridge_stand_in()
    sys.modules.update(stand_in)
    from megatron_dobb.megatron.bridge import DobbOptimizerConfig

    allowed = stand_in["megatron.bridge.utils.instantiate_utils"].allowed
    for kind in (DobbOptimizerConfig, DobbConfig):  # or no checkpoint of Bridge's could be read again
        assert any(f"{kind.__module__}.{kind.__qualname__}".startswith(prefix) for prefix in allowed)
    gpt.initialize()
    settings = DobbOptimizerConfig(lr=1e-2, adam_eps=1e-3, dobb=SETTINGS)
    if finalize:
        settings.finalize()
    model = gpt.build()
    assert hasattr(settings, "provide"), "the attribute that Bridge looks for"
    built = settings.provide(
        model_chunks=[model],
        config_overrides=get_standard_config_overrides(config=settings),
        use_gloo_process_groups=False,
        pg_collection=None,
    )
    return train(model, built), built.chained_optimizers[0].attempted_steps


def test_bridges_provider_is_the_same_optimizer(expected):
    assert_same(processes.run(2, with_bridge), expected)


def test_a_bridge_config_that_was_never_finalized_is_refused():
    def build():
        with pytest.raises(UnsupportedError, match=r"wrapped .* without Dobb.*call megatron_dobb\.install\(config\)"):
            with_bridge(finalize=False)
        return True

    assert processes.run(1, build) == [True]


def test_a_bridge_config_without_settings_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in bridge_stand_in().items():
            patch.setitem(sys.modules, name, module)
        from megatron_dobb.megatron.bridge import DobbOptimizerConfig

        with pytest.raises(ConfigError, match=r"DobbOptimizerConfig\.dobb is None: give it a DobbConfig"):
            DobbOptimizerConfig(lr=1e-2, dobb=None).finalize()


# verl.


def offload_and_return(optimizer):
    """What verl does with an optimizer between its phases, on a machine where that makes copies."""
    for group in optimizer.shard_fp32_from_float16_groups:
        for shard in group:
            shard.data = shard.data.clone()
    for state in optimizer.optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})


def test_state_that_a_program_moved_away_and_back_goes_on_training():
    def bf16(offloads):
        gpt.initialize()
        megatron_dobb.install(SETTINGS)
        model = gpt.build(bf16=True, params_dtype=torch.bfloat16)
        settings = config(use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16)
        built = get_megatron_optimizer(settings, [model])
        one = built.chained_optimizers[0]
        result = train(model, built, (lambda: offload_and_return(one)) if offloads else lambda: None)
        shards = [shard for of_group in one.shards for shard in of_group]
        assert all(one.optimizer.state[shard]["exp_avg"].abs().sum() > 0 for shard in shards)
        return result, one.attempted_steps

    assert_same(processes.run(2, bf16, True), processes.run(2, bf16, False))


def test_masters_and_momenta_that_are_moved_away_leave_no_copy_behind():
    def kept(move, *kinds):
        gpt.initialize()
        megatron_dobb.install(SETTINGS)
        model = gpt.build(bf16=True, params_dtype=torch.bfloat16)
        settings = config(use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16)
        one = get_megatron_optimizer(settings, [model]).chained_optimizers[0]
        shards = [shard for of_group in one.shards for shard in of_group]
        old = {"masters": shards, "momenta": [one.optimizer.state[shard]["exp_avg"] for shard in shards]}
        found = [ref for kind in kinds for ref in map(weakref.ref, [tensor.untyped_storage() for tensor in old[kind]])]
        del old
        move(one)
        gc.collect()
        return len(found), sum(ref() is not None for ref in found)

    def offload(one):
        """Megatron's, on a machine where it makes copies."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MegatronOptimizer, "offload_to_cpu", offload_and_return)
            one.offload_to_cpu()

    assert processes.run(1, kept, offload_and_return, "masters") == [(8, 0)]
    assert processes.run(1, kept, offload, "masters", "momenta") == [(16, 0)]


@pytest.mark.parametrize("with_old_facts", [False, True], ids=["made-anew", "of-an-older-save"])
def test_a_program_that_saves_other_metadata_than_it_gave_the_optimizer_resumes(tmp_path, with_old_facts):
    """As verl saves: the metadata are made anew for `save`. It loads with those that are stored."""

    def run():
        old = {}

        def build():
            model = gpt.build()
            built = get_megatron_optimizer(config(use_distributed_optimizer=True), [model])
            model.config.grad_scale_func = built.scale_loss
            return model, built

        gpt.initialize()
        megatron_dobb.install(SETTINGS)
        model, built = build()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
        weights = model.module.sharded_state_dict()
        if with_old_facts:  # the program goes on with metadata that it once had from us, or loaded
            old.update(metadata)
            built.sharded_state_dict(weights, metadata=old)
        train(model, built)
        state = {"model": weights, "optimizer": built.sharded_state_dict(weights, metadata=dict(metadata))}
        dist_checkpointing.save(state, str(tmp_path), content_metadata=metadata | old)
        assert "dobb" not in metadata
        other, resumed = build()
        metadata = dist_checkpointing.load_content_metadata(checkpoint_dir=str(tmp_path))
        weights = other.module.sharded_state_dict()
        state = {"model": weights, "optimizer": resumed.sharded_state_dict(weights, is_loading=True, metadata=metadata)}
        loaded = dist_checkpointing.load(state, str(tmp_path))
        other.module.load_state_dict(loaded["model"])
        resumed.load_state_dict(loaded["optimizer"])
        return train(model, built), train(other, resumed)

    for undisturbed, resumed in processes.run(2, run):
        assert undisturbed[0] == resumed[0]


def test_a_damaged_checkpoint_changes_nothing_even_if_dobb_was_turned_off_for_another_model(tmp_path):
    def run():
        gpt.initialize()
        megatron_dobb.install(SETTINGS)
        model = gpt.build()
        built = get_megatron_optimizer(config(use_distributed_optimizer=True), [model])
        metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
        weights = model.module.sharded_state_dict()
        state = {"model": weights, "optimizer": built.sharded_state_dict(weights, metadata=metadata)}
        dist_checkpointing.save(state, str(tmp_path), content_metadata=metadata)
        train(model, built)
        configure(None)
        for file in tmp_path.glob("*.distcp"):
            os.truncate(file, file.stat().st_size // 2)
        before = [p.detach().clone() for p in model.parameters()]
        metadata = dist_checkpointing.load_content_metadata(checkpoint_dir=str(tmp_path))
        weights = model.module.sharded_state_dict()
        state = {"model": weights, "optimizer": built.sharded_state_dict(weights, is_loading=True, metadata=metadata)}
        with pytest.raises(CheckpointError, match="is cut off"):
            dist_checkpointing.load(state, str(tmp_path))
        return all(torch.equal(p, other) for p, other in zip(model.parameters(), before, strict=True))

    assert processes.run(1, run) == [True]


def test_a_save_of_something_else_keeps_its_metadata():
    for state in ({"a": 1}, {"optimizer": {STATE: {RUN: 1}}}, {"list": [{STATE: {RUN: 1}}]}):
        for metadata in (None, {"mine": 1}):
            assert content_metadata_for(state, metadata) is metadata


# What is refused.


def error_of(settings, transformer=None, given=None, ddp=True):
    def build():
        gpt.initialize()
        configure(SETTINGS)
        model = gpt.build(ddp={"use_distributed_optimizer": ddp})
        for name, value in (transformer or {}).items():  # some of them do not build a model on a CPU
            setattr(model.config, name, value)
        asked = config(**({"use_distributed_optimizer": True} | settings))
        if given is not None:
            asked.dobb = given
        try:
            get_megatron_optimizer(asked, [model])
        except (ConfigError, UnsupportedError) as error:
            return str(error)
        return "built"

    return processes.run(1, build)[0]


@pytest.mark.parametrize(
    ("settings", "transformer", "said"),
    [
        ({"optimizer": "sgd"}, {}, "OptimizerConfig.optimizer is 'sgd': set it to 'adam'"),
        ({"overlap_param_gather_with_optimizer_step": True}, {}, "with overlap_param_gather_with_optimizer_step"),
        ({}, {"use_mup": True}, "Dobb does not work with use_mup"),
        ({}, {"cuda_graph_impl": "local"}, "use cuda_graph_impl='none'"),
    ],
    ids=["sgd", "of-the-optimizer", "of-the-model", "with-a-value"],
)
def test_what_the_command_line_refuses_is_refused_in_a_config_object(settings, transformer, said):
    assert said in error_of(settings, transformer=transformer)


def test_two_different_configs_for_one_model_are_refused_by_what_differs():
    other = dataclasses.replace(SETTINGS, refresh_interval=5, momentum=0.9)
    assert "they differ in refresh_interval, momentum" in error_of({}, given=other)
    assert error_of({}, given=dataclasses.replace(SETTINGS)) == "built"
    assert (
        "OptimizerConfig.dobb must be the same DobbConfig that megatron_dobb.install was given, and is {'blocks': 4}"
        in error_of({}, given={"blocks": 4})
    )


def test_a_model_wrapped_without_the_distributed_optimizer_is_refused():
    assert "set it in DistributedDataParallelConfig" in error_of({}, ddp=False)


def test_an_optimizer_that_is_not_dobbs_while_dobb_is_on_says_so():
    def build(settings):
        gpt.initialize()
        model = gpt.build()
        if settings is not None:
            megatron_dobb.install(settings)  # too late
        with contextlib.redirect_stdout(io.StringIO()) as said:
            get_megatron_optimizer(config(use_distributed_optimizer=True), [model])
        return "adam updates all of this model: it was wrapped before" in said.getvalue()

    assert processes.run(1, build, SETTINGS) == [True]
    assert processes.run(1, build, None) == [False]


def test_chunks_wrapped_with_different_settings_are_refused():
    def build():
        gpt.initialize()
        chunks = []
        for settings in (SETTINGS, None):
            configure(settings)
            chunks.append(gpt.build())
        with pytest.raises(UnsupportedError, match=r"2 chunks of a model were wrapped .* different settings"):
            get_megatron_optimizer(config(use_distributed_optimizer=True), chunks)
        return True

    assert processes.run(1, build) == [True]


def test_install_takes_a_config_and_nothing_else():
    with pytest.raises(ConfigError, match=r"install takes a DobbConfig, and was given \{'blocks': 4\}"):
        megatron_dobb.install({"blocks": 4})
