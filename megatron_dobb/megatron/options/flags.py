"""Flags of all registered methods on Megatron's command line."""

import argparse
from typing import Any

from ...methods import registry
from ...settings import flags

OPTIMIZER = "dobb"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every method to the choices of `--optimizer`, and each of its settings as a flag."""
    action = parser._option_string_actions["--optimizer"]
    action.choices = [*(action.choices or ()), *registry.names()]
    for method in registry.methods():
        flags.add_arguments(parser, method.load("settings"))
    return parser


def config_from_args(args: argparse.Namespace) -> Any:
    """The settings that the flags of the chosen method state.

    Args:
        args: parsed arguments; where they name no optimizer of this package, the flags are Dobb's.

    Raises:
        ConfigError: for a value out of range, flags that contradict each other, or a malformed PATTERN=COUNT.
    """
    return flags.read_arguments(registry.method(chosen(args)).load("settings"), args)


def chosen(args: argparse.Namespace) -> str:
    """The method of this package that `--optimizer` names."""
    name = getattr(args, "optimizer", None)
    return name if name in registry.names() else OPTIMIZER
