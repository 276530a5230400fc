"""Settings from one description: flags, tables, docstrings, stored values and errors, for any method."""

import argparse
import pickle
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_dobb import DobbConfig
from megatron_dobb.errors import BlockError, ConfigError, Style, UnsupportedError, verbatim
from megatron_dobb.megatron.options import flags as options
from megatron_dobb.megatron.options.unsupported import option, refuse_unsupported
from megatron_dobb.methods import registry
from megatron_dobb.settings.checks import COUNT, DECAY, PATTERN_COUNTS, PATTERNS, POSITIVE, SWITCH, choice
from megatron_dobb.settings.fields import Settings, setting
from megatron_dobb.settings.flags import add_arguments, read_arguments
from megatron_dobb.settings.format import document, flags_table
from megatron_dobb.settings.patterns import check_used, patterns_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ToyConfig(Settings):
    """Settings of a method that is made up.

    Raises:
        ConfigError: if a value is out of range.
    """

    method: ClassVar[str] = "toy"

    rounds: int = setting(3, COUNT, "rounds of 100 % of a step, `r`", metavar="R", stored=True)
    rate: float = setting(0.5, POSITIVE, "rate of change")
    decay: float | None = setting(None, DECAY, "decay of the rate", default_text="that of the rate")
    mode: str = setting("slow", choice(("slow", "fast")), "speed of a round", link="[docs](docs/toy.md)")
    quiet: bool = setting(False, SWITCH, "print nothing")
    warm: bool = setting(True, SWITCH, "start warm")
    skip: tuple[str, ...] = setting((), PATTERNS, "weights to leave out", stored=True)
    counts: dict[str, int] = setting({}, PATTERN_COUNTS, "rounds of some weights", stored=True)


TOY_REFUSALS = (option("bf16", "it is too coarse", "use {mode:slow}"),)


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser, ToyConfig)
    return read_arguments(ToyConfig, parser.parse_args(words))


def help_text(columns="200"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        parser = argparse.ArgumentParser()
        add_arguments(parser, ToyConfig)
        return parser.format_help()


def test_flags_set_the_settings_of_their_names():
    words = shlex.split("--toy-rounds 7 --toy-rate 2 --toy-decay 0 --toy-mode fast --toy-quiet --no-toy-warm")
    changed = parsed(*words, "--toy-skip", "*.a", "b", "--toy-counts", "*.a=2")
    assert changed == ToyConfig(7, 2.0, 0.0, "fast", True, False, ("*.a", "b"), {"*.a": 2})
    assert parsed() == ToyConfig()


def test_a_registered_method_is_a_choice_of_optimizer_with_flags_and_refusals_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    here = f"{__name__}:"
    parts = {"select_weights": "", "optimizer": "", "startup_report": ""}
    registry.register(registry.Method("toy", here + "ToyConfig", refusals=here + "TOY_REFUSALS", **parts))
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=["adam"])
    parser.add_argument("--bf16", action="store_true")
    args = options.add_arguments(parser).parse_args(shlex.split("--optimizer toy --toy-rounds 5 --dobb-blocks 0"))
    args.tensor_model_parallel_size, args.use_distributed_optimizer = 1, True
    assert options.config_from_args(args) == ToyConfig(rounds=5)
    refuse_unsupported(args)
    args.bf16 = True
    with pytest.raises(UnsupportedError) as refused:
        refuse_unsupported(args)
    assert str(refused.value) == "--optimizer toy does not work with --bf16: it is too coarse; use --toy-mode slow"
    args.optimizer = "dobb"
    with pytest.raises(ConfigError, match="--dobb-blocks 0"):
        options.config_from_args(args)


def test_absent_arguments_take_defaults():
    assert read_arguments(ToyConfig, argparse.Namespace(toy_rounds=4, other=1)) == ToyConfig(rounds=4)


def test_help_shows_the_description_and_the_default():
    text = help_text()
    assert "--toy-rounds R" in text
    assert "Rounds of 100 % of a step, r (default: 3)." in text
    assert "Decay of the rate (default: that of the rate)." in text
    assert "--toy-mode {slow,fast}" in text
    assert "--toy-warm, --no-toy-warm" in text
    assert "docs/toy.md" not in text


def test_the_table_has_a_row_for_each_setting():
    head, rule, *rows = flags_table(ToyConfig)
    assert head.count("|") == rule.count("|") == 4
    assert rows == [
        "| `--toy-rounds R` | 3 | rounds of 100 % of a step, `r` |",
        "| `--toy-rate` | 0.5 | rate of change |",
        "| `--toy-decay` | that of the rate | decay of the rate |",
        "| `--toy-mode` | `slow` | speed of a round: [docs](docs/toy.md) |",
        "| `--toy-quiet` | off | print nothing |",
        "| `--no-toy-warm` | on | start warm |",
        "| `--toy-skip PATTERN ...` | | weights to leave out |",
        "| `--toy-counts PATTERN=COUNT ...` | | rounds of some weights |",
    ]


def test_the_docstring_lists_every_setting_before_what_is_raised():
    class Copy(ToyConfig):
        __doc__ = ToyConfig.__doc__

    document(Copy)
    attributes, _, raises = Copy.__doc__.partition("Raises:")
    assert all(f"        {name}: {about.help}" in attributes for name, about in ToyConfig.described().items())
    assert "ConfigError: if a value" in raises


def test_the_readme_has_the_table_that_the_settings_give():
    table = "\n".join(flags_table(DobbConfig))
    assert f"<!-- flags -->\n\n{table}\n\n<!-- end of flags -->" in (ROOT / "README.md").read_text()


def test_the_tool_finds_the_readme_up_to_date():
    command = [sys.executable, ROOT / "tools/flags_table.py", "--check"]
    assert subprocess.run(command, check=False, cwd=ROOT / "tools").returncode == 0


def test_what_is_stored_is_plain():
    assert ToyConfig(skip=["a"], counts={"b": 2}).stored() == {"rounds": 3, "skip": ["a"], "counts": {"b": 2}}


def test_defaults_that_can_change_are_not_shared():
    one = ToyConfig()
    one.counts["a"] = 1
    assert ToyConfig().counts == {}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"rounds": 0}, "--toy-rounds 0 must be a whole number of at least 1; the default is 3"),
        ({"rounds": True}, "--toy-rounds must be a whole number of at least 1, not True; the default is 3"),
        ({"decay": 1.0}, "--toy-decay 1.0 must be at least 0 and below 1"),
        ({"mode": "idle"}, "--toy-mode idle is unknown; use one of slow, fast"),
        ({"counts": {"*.a": 0}}, "--toy-counts '*.a=0' must be a whole number of at least 1; use one such as 16"),
        ({"counts": "{*}"}, "--toy-counts '{*}' must map name patterns to counts; use one such as"),
    ],
)
def test_each_setting_is_checked_by_its_kind(settings, shown):
    with pytest.raises(ConfigError) as refused:
        ToyConfig(**settings)
    assert str(refused.value).startswith(shown)
    assert refused.value.settings.keys() == settings.keys()


def test_patterns_are_found_by_kind_and_unused_ones_refused():
    config = ToyConfig(skip=("*.a",), counts={"*.b": 2})
    assert patterns_of(config) == {"skip": ("*.a",), "counts": ("*.b",)}
    check_used(config, {"*.a", "*.b"})
    with pytest.raises(ConfigError, match=r"--toy-counts '\*\.b' matches no weight that Toy could manage"):
        check_used(config, {"*.a"})


# Styles of errors.


def error(**others):
    return ConfigError(
        "are not possible with {megatron.use_mup}", "use {mode:fast}, {rounds:2} or {warm:False}", **others
    )


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        (
            Style.FLAG,
            "w: --toy-rounds 3 and --toy-skip '*.a' b are not possible with --use-mup; use --toy-mode fast, "
            "--toy-rounds 2 or --no-toy-warm",
        ),
        (
            Style.FIELD,
            "w: ToyConfig(rounds=3, skip=('*.a', 'b')) are not possible with use_mup; use mode='fast', rounds=2 or "
            "warm=False",
        ),
        (
            Style.KEYWORD,
            "w: rounds=3 and skip=('*.a', 'b') are not possible with use_mup; use mode='fast', rounds=2 or warm=False",
        ),
    ],
)
def test_one_error_names_settings_as_flags_fields_or_keywords(style, shown):
    found = error(subject="w", settings={"rounds": 3, "skip": ("*.a", "b")}, owner=ToyConfig)
    assert found.text(style) == shown
    found.style = style
    assert str(found) == shown


def test_an_error_keeps_its_parts_when_it_is_sent_to_another_process():
    sent = BlockError("does not fit {mode}", "use {rounds:2}", subject="w", settings={"rounds": 3}, owner=ToyConfig)
    sent.style = Style.KEYWORD
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is BlockError
    assert str(received) == str(sent) == "w: rounds=3 does not fit mode; use rounds=2"
    assert (received.settings, received.remedy) == (sent.settings, sent.remedy)


def test_an_error_of_one_text_is_that_text_braces_and_all():
    assert str(ConfigError("takes no {'blocks': 4}")) == "takes no {'blocks': 4}"
    assert str(ConfigError(verbatim("takes no {x}"), "use {mode}")) == "takes no {x}; use --dobb-mode"
