"""The `--dobb-*` flags and the refusals, on the command line of the real Megatron."""

import argparse
import dataclasses
import re
import shlex
import types

import pytest

import megatron_dobb
import testbed

testbed.enable(training=True)
megatron_dobb.install()

from megatron.training import arguments, training, yaml_arguments  # noqa: E402  (imported after the patches)

from megatron_dobb import DobbConfig  # noqa: E402
from megatron_dobb.errors import ConfigError, UnsupportedError, flag  # noqa: E402
from megatron_dobb.megatron.options.unsupported import refusals, refuse_unsupported  # noqa: E402
from megatron_dobb.megatron.seam import patches  # noqa: E402

WITHOUT_OPTIMIZER = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 127 --mock-data "
    "--tokenizer-type NullTokenizer --distributed-backend gloo --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm"
)
DISTRIBUTED = [*WITHOUT_OPTIMIZER, "--use-distributed-optimizer"]
DOBB = [*DISTRIBUTED, "--optimizer", "dobb"]

FLAGS = {
    "blocks": (["4"], 4),
    "block_width": (["32"], 32),
    "blocks_for": (["*.linear_fc2=64", "decoder.layers.0.*=2"], {"*.linear_fc2": 64, "decoder.layers.0.*": 2}),
    "refresh_interval": (["5"], 5),
    "iterations": (["2"], 2),
    "momentum": (["0.9"], 0.9),
    "moment_beta": (["0.8"], 0.8),
    "nesterov": ([], True),
    "qr": (["cholesky"], "cholesky"),
    "capture": (["all"], "all"),
    "capture_sequences": (["12"], 12),
    "exclude": (["*.linear_fc1", "*.linear_qkv"], ("*.linear_fc1", "*.linear_qkv")),
    "update_scale": (["0.3"], 0.3),
    "moment_dtype": (["bf16"], "bf16"),
    "basis_dtype": (["fp32"], "fp32"),
    "norm": (["l2"], "l2"),
    "side": (["output"], "output"),
    "source": (["gram"], "gram"),
    "backend": (["reference"], "reference"),
    "precision": (["bf16"], "bf16"),
    "overlap_refresh": ([], False),
    "stagger": ([], True),
    "moment_transport": (["bf16"], "bf16"),
    "load_other_optimizer": ([], True),
    "log_diagnostics_interval": (["50"], 50),
    "log_diagnostics_weights": (["*.linear_fc1", "--dobb-log-diagnostics-interval", "5"], ("*.linear_fc1",)),
}
"""For each setting, words of a command line and the value that they mean."""

REFUSED = {
    "with --yaml-cfg": ["--yaml-cfg", "settings.yaml"],
    "without --use-distributed-optimizer": [],
    "with --use-megatron-fsdp": ["--use-megatron-fsdp"],
    "with --use-torch-fsdp2": ["--use-torch-fsdp2"],
    "with --optimizer-cpu-offload": ["--optimizer-cpu-offload"],
    "with --use-precision-aware-optimizer": ["--use-precision-aware-optimizer"],
    "with --fp4-param-gather": ["--fp4-param-gather"],
    "with --reuse-grad-buf-for-mxfp8-param-ag": ["--reuse-grad-buf-for-mxfp8-param-ag"],
    "with --overlap-param-gather-with-optimizer-step": ["--overlap-param-gather-with-optimizer-step"],
    "with --overlap-moe-expert-parallel-comm": ["--overlap-moe-expert-parallel-comm"],
    "with --hybrid-context-parallel": ["--hybrid-context-parallel"],
    "with --tensor-parallel-num-weight-shards above the tensor-parallel size": [
        "--tensor-parallel-num-weight-shards",
        "2",
    ],
    "with --expert-tensor-parallel-num-weight-shards above the experts' tensor-parallel size": [
        "--expert-tensor-parallel-num-weight-shards",
        "2",
    ],
    "with --cuda-graph-impl": ["--cuda-graph-impl", "local"],
    "with --enable-cuda-graph": ["--enable-cuda-graph"],
    "with --external-cuda-graph": ["--external-cuda-graph"],
    "with --optimizer-cuda-graph": ["--optimizer-cuda-graph"],
    "with --use-mup": ["--use-mup"],
    "with --use-transformer-engine-op-fuser": ["--use-transformer-engine-op-fuser"],
    "with --dobb-source output-gradient, the default of --dobb-side output, and recompute of whole layers": [
        *("--dobb-side", "output", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ],
    "with --dobb-source output-gradient, the default of --dobb-side output, and --fp16": [
        *("--dobb-side", "output", "--dobb-source", "output-gradient", "--fp16"),
    ],
    "with --dobb-source output-gradient, the default of --dobb-side output, and --calculate-per-token-loss": [
        *("--dobb-side", "output", "--calculate-per-token-loss"),
    ],
    "with --ckpt-format other than torch_dist": ["--save", "out", "--ckpt-format", "torch"],
    "with --non-persistent-ckpt-type local": ["--non-persistent-ckpt-type", "local"],
}
"""For each refusal, words of a command line that call it up."""


@pytest.fixture(autouse=True)
def _no_settings_left_behind():
    yield
    patches.configure(None)


@pytest.fixture(scope="module")
def megatrons_parser():
    return parser()


@pytest.fixture
def parse(monkeypatch, megatrons_parser):
    """Parse words with Megatron's own `parse_args`, in a world of two ranks.

    It makes its parser of 700 options only once, because that takes it half a second.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(arguments, "argparse", types.SimpleNamespace(ArgumentParser=lambda **_: megatrons_parser))
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda made: made)

    def parse(words):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        return arguments.parse_args()

    return parse


@pytest.fixture
def validate(parse):
    """Parse words and validate them, as Megatron does before it builds anything."""

    def validate(words):
        args = parse(words)
        arguments.validate_args(args)
        return args

    return validate


def parser(add=None):
    made = argparse.ArgumentParser(allow_abbrev=False)
    return (add or arguments.add_megatron_arguments)(made)


def test_every_setting_has_its_flag_and_every_flag_its_setting(megatrons_parser):
    ours = [action for action in megatrons_parser._actions if any("dobb" in option for option in action.option_strings)]
    dests = {action.dest: action.option_strings for action in ours}
    fields = {field.name for field in dataclasses.fields(DobbConfig)}
    assert {dest: options[0] for dest, options in dests.items()} == {
        f"dobb_{name}": flag("dobb", name) for name in fields
    }
    negatable = {dest: options[1:] for dest, options in dests.items() if options[1:]}
    assert negatable == {"dobb_overlap_refresh": ["--no-dobb-overlap-refresh"]}
    assert fields == FLAGS.keys(), "this file tests every flag"


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_sets_the_setting_of_its_name_and_no_other(validate, name):
    words, value = FLAGS[name]
    validate([*DOBB, "--no-dobb-overlap-refresh" if name == "overlap_refresh" else flag("dobb", name), *words])
    implied = {
        "block_width": {"blocks": None},
        "side": {"source": "output-gradient"},
        "log_diagnostics_weights": {"log_diagnostics_interval": 5},
    }
    changed = {name: value} | implied.get(name, {})
    assert dataclasses.asdict(patches.active()) == dataclasses.asdict(DobbConfig()) | changed


def test_without_flags_the_settings_are_the_defaults(validate):
    validate(DOBB)
    assert patches.active() == DobbConfig()


def test_optimizer_gains_one_choice_and_nothing_else_changes(megatrons_parser):
    def options(made):
        return {
            option: (action.dest, action.nargs, action.const, action.default, action.choices)
            for action in made._actions
            for option in action.option_strings
            if not option.startswith(("--dobb", "--no-dobb"))
        }

    stock = options(parser(arguments.add_megatron_arguments.__wrapped__))
    ours = options(megatrons_parser)
    different = {option for option in ours if repr(ours[option]) != repr(stock.get(option))}
    assert different == {"--optimizer"}
    assert ours.keys() == stock.keys()
    assert ours["--optimizer"][:4] == stock["--optimizer"][:4]
    assert list(ours["--optimizer"][4]) == [*stock["--optimizer"][4], "dobb"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dobb-qr", "gram-schmidt"], r"--dobb-qr: invalid choice: 'gram-schmidt'.*householder.*cholesky.*eigh"),
        (["--dobb-capture", "last"], r"--dobb-capture: invalid choice: 'last'.*first.*all"),
        (["--dobb-moment-dtype", "fp16"], r"--dobb-moment-dtype: invalid choice: 'fp16'.*fp32.*bf16"),
        (["--dobb-blocks", "many"], r"--dobb-blocks: invalid int value: 'many'"),
        (["--dobb-block", "4"], r"unrecognized arguments: --dobb-block 4"),
    ],
)
def test_the_parser_refuses_what_it_does_not_know(parse, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        parse([*DOBB, *words])
    errors = " ".join(capsys.readouterr().err.split())
    assert re.search(message, errors), errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dobb-blocks", "0"], r"--dobb-blocks 0 must be a whole number of at least 1"),
        (["--dobb-blocks", "4", "--dobb-block-width", "32"], r"--dobb-blocks 4 and --dobb-block-width 32 exclude each"),
        (["--dobb-momentum", "1"], r"--dobb-momentum 1.0 must be at least 0 and below 1"),
        (
            ["--dobb-capture", "all", "--dobb-capture-sequences", "4"],
            r"--dobb-capture-sequences 4 is incompatible with --dobb-capture all",
        ),
        (
            ["--dobb-blocks-for", "*.fc2"],
            r"--dobb-blocks-for '\*\.fc2' is not of the form PATTERN=COUNT; use one such as",
        ),
        (["--dobb-blocks-for", "=4"], r"--dobb-blocks-for =4 is not of the form PATTERN=COUNT"),
        (["--dobb-blocks-for", "*.fc2=4.5"], r"--dobb-blocks-for '\*\.fc2=4\.5' is not of the form PATTERN=COUNT"),
        (["--dobb-blocks-for", "*.fc2=²"], r"is not of the form PATTERN=COUNT"),
        (["--dobb-blocks-for", "*.fc2=0"], r"--dobb-blocks-for '\*\.fc2=0' must be a whole number of at least 1"),
        (
            ["--dobb-log-diagnostics-weights", "*.fc2"],
            r"weights '\*\.fc2' requires --dobb-log-diagnostics-interval; add",
        ),
        (["--dobb-blocks-for", "*.fc2=4", "*.fc2=8"], r"--dobb-blocks-for '\*\.fc2' is given both 4 and 8"),
    ],
)
def test_bad_settings_stop_validation_before_megatron_looks(validate, words, message):
    with pytest.raises(ConfigError, match=message):
        validate([*DOBB, *words])
    assert patches.active() is None


def test_bad_settings_do_not_matter_to_another_optimizer(validate):
    validate([*DISTRIBUTED, "--dobb-blocks", "0"])
    assert patches.active() is None


# Refusals.

REFUSALS = {str(UnsupportedError(refusal.what, settings={})): refusal for refusal in refusals("dobb")}
"""By the words for the option on a command line."""


def settings_file(path):
    """What Megatron makes of a YAML file; it needs these to be in it."""
    return types.SimpleNamespace(yaml_cfg=path, optimizer="dobb", disable_msc_deprecated=False, enable_msc=False)


def test_every_refusal_has_a_command_line_here():
    assert REFUSALS.keys() == REFUSED.keys()
    assert len(REFUSALS) == len(refusals("dobb"))


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refused_option_of_megatrons_command_line_stops_validation_with_its_own_message(validate, monkeypatch, what):
    monkeypatch.setattr(yaml_arguments, "load_yaml", settings_file)
    base = WITHOUT_OPTIMIZER if what.startswith("without") else DISTRIBUTED
    with pytest.raises(UnsupportedError) as refused:
        validate([*base, "--optimizer", "dobb", *REFUSED[what]])
    assert str(refused.value).startswith(f"--optimizer dobb does not work {what}: {REFUSALS[what].reason}; ")
    assert refused.value.remedy == REFUSALS[what].remedy
    assert patches.active() is None


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_refusal_proposes_instead_is_an_option_of_megatron(what, megatrons_parser):
    options = megatrons_parser._option_string_actions
    remedy = str(UnsupportedError(REFUSALS[what].remedy, settings={}))
    named = [word.strip(",;") for text in (what, remedy) for word in text.split() if word[:2] == "--"]
    assert all(option in options for option in named), named


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--save", "out", "--load", "out"],
        ["--save", "out", "--dist-ckpt-optim-fully-reshardable", "--async-save"],
        ["--save", "out", "--no-save-optim"],
        ["--load", "out", "--no-load-optim"],
        ["--load", "out", "--finetune"],
        ["--ckpt-format", "torch"],
        ["--cuda-graph-impl", "none"],
        ["--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "2"],
        ["--overlap-grad-reduce", "--overlap-param-gather"],
    ],
)
def test_what_works_is_not_refused(parse, words):
    refuse_unsupported(parse([*DOBB, *words]))


def test_an_option_that_megatron_itself_switches_on_is_refused_after_validation(validate, monkeypatch):
    # With the flag unset, the refusal can only come from the second look.
    stock = patches.refuse_unsupported
    looks = []

    def look(args):
        looks.append(1)
        if len(looks) == 2:
            args.use_mup = True
        stock(args)

    monkeypatch.setattr(patches, "refuse_unsupported", look)
    with pytest.raises(UnsupportedError, match="--use-mup"):
        validate(DOBB)
    assert patches.active() is None


# The disguise.


def test_validation_takes_dobb_for_a_sharded_optimizer_and_gives_its_name_back(validate):
    args = validate(DOBB)
    assert args.optimizer == "dobb"
    assert args.use_distributed_optimizer is True
    assert args.use_layer_wise_distributed_optimizer is False


def test_validation_gives_the_same_arguments_as_with_adam(validate):
    ours, adams = vars(validate(DOBB)), vars(validate([*DISTRIBUTED, "--optimizer", "adam"]))
    assert {name for name in ours if ours[name] != adams.get(name)} == {"optimizer"}
    assert ours.keys() == adams.keys()


def test_the_name_is_given_back_when_validation_fails(parse):
    args = parse([*DOBB, "--max-position-embeddings", "16"])
    with pytest.raises(AssertionError):
        arguments.validate_args(args)
    assert args.optimizer == "dobb"
    assert patches.active() is None


def test_another_optimizer_turns_dobb_off(validate):
    validate(DOBB)
    assert patches.active() is not None
    args = validate([*DISTRIBUTED, "--optimizer", "sgd"])
    assert args.optimizer == "sgd"
    assert patches.active() is None


def test_settings_of_the_program_and_of_the_command_line_are_not_mixed(validate):
    for words in ([*DISTRIBUTED, "--optimizer", "adam"], DOBB):
        patches.configure(DobbConfig(blocks=4))
        with pytest.raises(ConfigError, match=r"called megatron_dobb\.install\(config\), and its command line says"):
            validate(words)
        patches.configure(None)
        validate(words)


def test_the_optimizer_config_is_adams_and_carries_the_settings(validate):
    args = validate([*DOBB, "--dobb-blocks", "4", "--adam-beta2", "0.97"])
    config, _ = training.get_megatron_optimizer_config(args)
    assert args.optimizer == "dobb"
    assert (config.optimizer, config.adam_beta2, config.use_distributed_optimizer) == ("adam", 0.97, True)
    assert config.dobb == DobbConfig(blocks=4)


def test_the_optimizer_config_of_adam_knows_nothing_of_dobb(validate):
    config, _ = training.get_megatron_optimizer_config(validate(DISTRIBUTED))
    assert config.optimizer == "adam"
    assert not hasattr(config, "dobb")


def test_dobb_that_appears_after_validation_is_an_error_and_not_silently_adamw(validate):
    args = validate(DISTRIBUTED)
    args.optimizer = "dobb"
    with pytest.raises(UnsupportedError, match=r"set after Megatron's arguments were validated.*on the command line"):
        training.get_megatron_optimizer_config(args)
