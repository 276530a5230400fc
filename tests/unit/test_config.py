"""Settings: the paper's defaults, what is refused and how, and name patterns."""

import dataclasses
import math

import pytest

from megatron_dobb import DobbConfig
from megatron_dobb.errors import ConfigError, flag
from megatron_dobb.settings.patterns import matches

PRINCIPAL_CONFIGURATION = {
    "blocks": 16,
    "block_width": None,
    "blocks_for": {},
    "refresh_interval": 9,
    "iterations": 1,
    "momentum": 0.95,
    "moment_beta": 0.95,
    "nesterov": False,
    "qr": "householder",
    "capture": "first",
    "capture_sequences": None,
    "exclude": (),
    "update_scale": 0.2,
    "norm": "sign",
    "side": "input",
    "source": "activation",
    "moment_dtype": "fp32",
    "basis_dtype": "bf16",
    "moment_transport": "fp32",
    "backend": "auto",
    "precision": "exact",
    "load_other_optimizer": False,
    "overlap_refresh": True,
    "stagger": False,
    "log_diagnostics_interval": 0,
    "log_diagnostics_weights": (),
}
"""The paper's headline run; momentum, moment beta and what the paper does not name are this
project's choices."""

COUNTS = [0, -1, 2.0, "4", True]
DECAYS = [1, 1.0, -0.1, math.nan, math.inf, "0.9", None, True]
CHOICES = ["", "QR", None, 3, ["first"]]

BAD_VALUES = {
    "blocks": (COUNTS, "whole number of at least 1"),
    "block_width": (COUNTS, "whole number of at least 1"),
    "blocks_for": ([{"*.fc2": 0}, {"*.fc2": 1.5}, {"": 4}, {3: 4}, "*.fc2=4", None], r"at least 1|pattern"),
    "refresh_interval": ([*COUNTS, None], "whole number of at least 1"),
    "iterations": ([*COUNTS, None], "whole number of at least 1"),
    "momentum": (DECAYS, "at least 0 and below 1"),
    "moment_beta": (DECAYS, "at least 0 and below 1"),
    "nesterov": (["yes", 1, None], "True or False"),
    "qr": (CHOICES, "householder, cholesky, eigh"),
    "capture": (CHOICES, "first, all"),
    "capture_sequences": (COUNTS, "whole number of at least 1"),
    "exclude": ([3, (3,), ("",), None], "pattern"),
    "update_scale": ([0, -0.2, math.nan, math.inf, "0.2", None, True], "positive"),
    "norm": (CHOICES, "sign, l2"),
    "side": (CHOICES, "input, output"),
    "source": (["", "QR", 3, ["gram"]], "activation, output-gradient, gram, none"),
    "moment_dtype": (["fp16", *CHOICES], "fp32, bf16"),
    "basis_dtype": (["fp16", *CHOICES], "fp32, bf16"),
    "moment_transport": (["fp16", *CHOICES], "fp32, bf16"),
    "backend": (["cuda", *CHOICES], "auto, extension, reference"),
    "precision": (["fp32", *CHOICES], "exact, bf16"),
    "load_other_optimizer": (["yes", 1, None], "True or False"),
    "overlap_refresh": (["yes", 1, None], "True or False"),
    "stagger": (["yes", 1, None], "True or False"),
    "log_diagnostics_interval": ([-1, 2.0, "4", True, None], "whole number.*0 for none"),
    "log_diagnostics_weights": ([3, (3,), ("",), None], "pattern"),
}
"""For each setting, values that are refused and the part of the message that says what works."""

GOOD_VALUES = {
    "blocks": [1, 64, {"*": 8, "*.fc2": 4}],
    "block_width": [1, 4096],
    "blocks_for": [{}, {"*.fc2": 4}],
    "refresh_interval": [1, 100],
    "iterations": [1, 3],
    "momentum": [0, 0.0, 0.999],
    "moment_beta": [0.0, 0.99],
    "nesterov": [True, False],
    "qr": ["householder", "cholesky", "eigh"],
    "capture": ["first", "all"],
    "capture_sequences": [1, 512],
    "exclude": [(), ("*.fc2",), ["a", "b"], "*.fc2"],
    "update_scale": [0.2, 1],
    "norm": ["sign", "l2"],
    "side": ["input", "output"],
    "source": ["activation", "gram", "none"],
    "moment_dtype": ["fp32", "bf16"],
    "basis_dtype": ["fp32", "bf16"],
    "moment_transport": ["fp32", "bf16"],
    "backend": ["auto", "extension", "reference"],
    "precision": ["exact", "bf16"],
    "load_other_optimizer": [True, False],
    "overlap_refresh": [True, False],
    "stagger": [True, False],
    "log_diagnostics_interval": [0, 1, 100],
    "log_diagnostics_weights": [(), []],
}


def test_defaults_are_the_papers_principal_configuration():
    assert dataclasses.asdict(DobbConfig()) == PRINCIPAL_CONFIGURATION


def test_every_setting_has_good_and_bad_values_here():
    names = {field.name for field in dataclasses.fields(DobbConfig)}
    assert names == BAD_VALUES.keys() == GOOD_VALUES.keys() == PRINCIPAL_CONFIGURATION.keys()


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        pytest.param(name, value, works, id=f"{name}={value!r}")
        for name, (values, works) in BAD_VALUES.items()
        for value in values
    ],
)
def test_bad_value_is_refused_with_its_flag_the_value_and_what_works(name, value, works):
    with pytest.raises(ConfigError, match=works) as refusal:
        DobbConfig(**{name: value})
    message = str(refusal.value)
    assert flag("dobb", name) in message
    shown = [value, *value, *value.values()] if isinstance(value, dict) else [value]
    shown += value if isinstance(value, tuple | list) else []
    assert any(text in message for text in map(repr, shown)) or str(value) in message


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD_VALUES.items() for value in values])
def test_good_value_is_kept(name, value):
    stored = getattr(DobbConfig(**{name: value}), name)
    if name == "blocks" and isinstance(value, dict):
        value = value["*"]
    elif name in ("exclude", "log_diagnostics_weights"):
        value = (value,) if isinstance(value, str) else tuple(value)
    assert stored == value


def test_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="block_size"):
        DobbConfig(block_size=16)


def test_settings_cannot_change_after_birth():
    config = DobbConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocks = 4


def test_blocks_and_block_width_exclude_each_other():
    with pytest.raises(ConfigError, match=r"--dobb-blocks 4 and --dobb-block-width 32 exclude each other; give one"):
        DobbConfig(blocks=4, block_width=32)
    with pytest.raises(ConfigError, match="exclude each other"):
        DobbConfig(blocks={"*": 4, "*.fc2": 8}, block_width=32)


def test_a_sequence_count_has_no_meaning_when_all_are_captured():
    with pytest.raises(
        ConfigError, match=r"--dobb-capture-sequences 8 is incompatible with --dobb-capture all; remove"
    ):
        DobbConfig(capture="all", capture_sequences=8)


def test_blocks_may_be_a_mapping_whose_star_is_the_default():
    config = DobbConfig(blocks={"*.fc2": 64, "*": 4, "decoder.layers.0.*": 2})
    assert config.blocks_of("decoder.layers.1.mlp.fc2.weight") == {"blocks": 64}
    assert config.blocks_of("decoder.layers.0.mlp.fc1.weight") == {"blocks": 2}
    assert config.blocks_of("decoder.layers.1.mlp.fc1.weight") == {"blocks": 4}


def test_without_a_star_other_weights_take_the_usual_default_or_width():
    assert DobbConfig(blocks={"*.fc2": 64}).blocks_of("fc1.weight") == {"blocks": 16}
    mixed = DobbConfig(blocks={"*.fc2": 64}, block_width=32)
    assert mixed.blocks_of("fc1.weight") == {"width": 32}
    assert mixed.blocks_of("mlp.fc2.weight") == {"blocks": 64}


def test_first_matching_pattern_wins():
    name = "decoder.layers.0.mlp.fc2.weight"
    assert DobbConfig(blocks_for={"*.fc2": 4, "decoder.*": 2}).blocks_of(name) == {"blocks": 4}
    assert DobbConfig(blocks_for={"decoder.*": 2, "*.fc2": 4}).blocks_of(name) == {"blocks": 2}


def test_patterns_name_a_weight_or_the_module_that_owns_it():
    name = "decoder.layers.10.mlp.fc2.weight"
    for pattern in (name, "decoder.layers.10.mlp.fc2", "*.fc2", "*.fc2.weight", "decoder.layers.1?.*", "*"):
        assert matches(pattern, name), pattern
    for pattern in ("fc2", "*.mlp", "decoder.layers.1.*", "*.FC2", "layers.10.mlp.fc2"):
        assert not matches(pattern, name), pattern
    assert matches("weight", "weight")


def test_excluded_weights_are_those_that_a_pattern_names():
    config = DobbConfig(exclude=("*.fc2", "decoder.layers.0.*"))
    assert config.excluded("decoder.layers.3.mlp.fc2.weight")
    assert config.excluded("decoder.layers.0.mlp.fc1.weight")
    assert not config.excluded("decoder.layers.3.mlp.fc1.weight")


def test_weights_to_log_are_named_by_patterns_and_all_without_any():
    config = DobbConfig(log_diagnostics_interval=5, log_diagnostics_weights="*.fc2", exclude="decoder.layers.0.*")
    assert config.log_diagnostics_weights == ("*.fc2",)
    assert config.diagnosed("decoder.layers.3.mlp.fc2.weight")
    assert not config.diagnosed("decoder.layers.3.mlp.fc1.weight")
    assert DobbConfig(log_diagnostics_interval=5).diagnosed("decoder.layers.3.mlp.fc1.weight")
    # Of a weight that AdamW updates there is nothing to log.
    assert config.patterns_matching("decoder.layers.0.mlp.fc2.weight") == {"decoder.layers.0.*"}


@pytest.mark.parametrize("name", ["exclude", "blocks_for", "log_diagnostics_weights"])
def test_a_pattern_that_names_no_weight_is_an_error(name):
    weights = ["decoder.layers.0.mlp.fc1.weight", "decoder.layers.0.mlp.fc2.weight"]
    patterns = ["*.fc2", "*.fc3"]
    others = {"log_diagnostics_interval": 5} if name == "log_diagnostics_weights" else {}
    config = DobbConfig(**{name: dict.fromkeys(patterns, 4) if name == "blocks_for" else patterns}, **others)
    used = set().union(*(config.patterns_matching(weight) for weight in weights))
    assert used == {"*.fc2"}
    with pytest.raises(ConfigError, match=rf"{flag('dobb', name)} '\*\.fc3' matches no weight"):
        config.check_patterns_used(used)
    config.check_patterns_used({*used, "*.fc3"})  # another rank has such a weight


def test_a_pattern_hidden_by_an_earlier_one_counts_as_used():
    config = DobbConfig(blocks_for={"*": 4, "*.fc2": 8})
    config.check_patterns_used(config.patterns_matching("mlp.fc2.weight"))
