"""Which Megatron is accepted, what is said about any other, and that installing twice or not asking changes nothing."""

import logging
import tomllib
import types
from pathlib import Path

import pytest
import torch

import megatron_dobb
import testbed

testbed.enable(training=True)
megatron_dobb.install()

from megatron.core import optimizer as optimizer_module  # noqa: E402  (Megatron is imported after the patches)
from megatron.core import package_info  # noqa: E402
from megatron.core.distributed import distributed_data_parallel  # noqa: E402
from megatron.core.optimizer import distrib_optimizer  # noqa: E402
from megatron.training import arguments, training  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from packaging.specifiers import SpecifierSet  # noqa: E402

from megatron_dobb import DobbConfig, doctor  # noqa: E402
from megatron_dobb.errors import UnsupportedError  # noqa: E402
from megatron_dobb.megatron.model.chunk_state import state_of, tag_of  # noqa: E402
from megatron_dobb.megatron.seam import patches, versions  # noqa: E402
from testbed import gpt, processes  # noqa: E402

INSTALLED = package_info.__version__

PATCHED = [
    (arguments, "add_megatron_arguments"),
    (arguments, "parse_args"),
    (arguments, "validate_args"),
    (training, "get_megatron_optimizer_config"),
    (distributed_data_parallel.DistributedDataParallel, "__init__"),
    (distrib_optimizer.DistributedOptimizer, "_compute_per_buffer_param_layout"),
    (optimizer_module, "_get_param_groups"),
    (optimizer_module, "_get_megatron_optimizer_based_on_param_groups"),
]


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.2+abc1234", "0.20.0rc1", "0.20.0", "0.20.9", INSTALLED])
def test_versions_in_the_range_are_accepted(version):
    versions.check_version(version)


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.18.99", "0.21.0", "0.21.0rc1", "1.0", "core_r0.19"])
def test_a_version_outside_the_range_is_refused_with_the_range_and_the_remedy(version):
    with pytest.raises(UnsupportedError) as refused:
        versions.check_version(version)
    message = str(refused.value)
    assert f"megatron-core {version} is not supported" in message
    assert ">=0.19" in message
    assert "<0.21" in message
    assert "pip install 'megatron-core>=0.19,<0.21'" in message


@pytest.mark.parametrize(
    ("patch", "module"),
    [(patches._patch_arguments, arguments), (patches._patch_ddp, distributed_data_parallel), (None, package_info)],
    ids=["training", "core", "not patched"],
)
def test_the_version_is_looked_at_before_anything_is_patched(monkeypatch, patch, module):
    monkeypatch.setattr(package_info, "__version__", "0.18.2")
    clone = clone_of(module)
    before = dict(vars(clone))
    with pytest.raises(UnsupportedError, match=r"megatron-core 0\.18\.2 is not supported"):
        patches.attach(patch, clone)
    assert vars(clone) == before


def test_installer_doctor_and_documentation_state_the_range_that_is_checked():
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (required,) = (Requirement(r) for r in extras["megatron"] if r.startswith("megatron-core"))
    assert required.specifier == SpecifierSet(versions.RANGE)
    install = f"pip install 'megatron-core{versions.RANGE}'"
    assert install in doctor.INSTALL
    assert install in (root / "docs/troubleshooting.md").read_text()
    for release in ("0.19", "0.20"):
        assert f"{release}.0" in versions.SUPPORTED
        assert release in (root / "docs/compatibility.md").read_text()


def clone_of(module):
    """A module with the stock contents of `module`, to patch at will."""
    clone = types.ModuleType(module.__name__)
    vars(clone).update({name: getattr(value, "__wrapped__", value) for name, value in vars(module).items()})
    return clone


def test_every_patch_is_in_place_once():
    for owner, name in PATCHED:
        patched = getattr(owner, name)
        assert patched.__module__ != patches.__name__, "functools.wraps keeps Megatron's own module name"
        assert patched.__globals__["__name__"] == patches.__name__
        assert not hasattr(patched.__wrapped__, "__wrapped__"), f"{name} is patched twice"


def test_installing_again_changes_nothing():
    before = [getattr(owner, name) for owner, name in PATCHED]
    megatron_dobb.install()
    megatron_dobb.install()
    assert [getattr(owner, name) for owner, name in PATCHED] == before


def test_without_dobb_layout_optimizer_and_weights_are_megatrons_own():
    def train(patched):
        if not patched:
            for owner, name in PATCHED:
                stock = getattr(owner, name).__wrapped__
                static = name == "_compute_per_buffer_param_layout"
                setattr(owner, name, staticmethod(stock) if static else stock)
        gpt.initialize()
        model = gpt.build({"bucket_size": 5000, "overlap_grad_reduce": True})
        optimizer = gpt.build_optimizer(model)
        for step in range(2):
            gpt.train_step(model, optimizer, gpt.global_batch(step, 4))
        names = {param: name for name, param in model.module.named_parameters()}
        places = {names[param]: place for param, place in model.buffers[0].param_index_map.items()}
        kinds = {type(one).__module__ + "." + type(one).__qualname__ for one in optimizer.chained_optimizers}
        keys = [sorted(group) for one in optimizer.chained_optimizers for group in one.optimizer.param_groups]
        weights = {name: param.detach().clone() for name, param in model.module.named_parameters()}
        return (places, [b.grad_data.numel() for b in model.buffers[0].buckets], kinds, keys), weights

    (stock, stock_weights), (ours, our_weights) = (processes.run(2, train, patched)[0] for patched in (False, True))
    assert ours == stock
    assert ours[2] == {"megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"}
    assert our_weights.keys() == stock_weights.keys()
    assert all(torch.equal(our_weights[name], stock_weights[name]) for name in stock_weights)


def optimizer_of(settings, model, *, distributed=True):
    config = optimizer_module.OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=distributed)
    if settings is not None:
        config.dobb = settings
    return optimizer_module.get_megatron_optimizer(config, [model])


def test_dobb_and_adam_follow_each_other_in_one_process():
    def build():
        gpt.initialize()
        found = []
        for settings in (None, DobbConfig(block_width=32), None):
            patches.configure(settings)
            model = gpt.build()
            kind = type(optimizer_of(settings, model).chained_optimizers[0]).__name__
            tagged = sum(tag_of(p) is not None for p in model.parameters())
            found.append((kind, tagged, state_of(model) is not None))
        return found

    adam, dobb, again = processes.run(1, build)[0]
    assert adam == again == ("DistributedOptimizer", 0, False)
    assert dobb == ("DobbDistributedOptimizer", 8, True)


def test_dobb_without_the_distributed_optimizer_is_refused():
    def build():
        gpt.initialize()
        patches.configure(DobbConfig(block_width=32))
        model = gpt.build({"use_distributed_optimizer": False})
        with pytest.raises(UnsupportedError, match=r"use_distributed_optimizer=True"):
            optimizer_of(patches.active(), model, distributed=False)
        return True

    assert processes.run(1, build) == [True]


def test_megatrons_note_about_a_missing_layout_is_dropped_and_others_are_not(caplog):
    logger = logging.getLogger("megatron.test")
    with caplog.at_level(logging.INFO), patches._quiet(logger, "full_param_layout not provided"):
        logger.info("full_param_layout not provided; computing it")
        logger.info("something else")
    logger.info("full_param_layout not provided")
    assert [record.getMessage() for record in caplog.records][:1] == ["something else"]
