"""Checks of Megatron: whether it is there and supported, whether the patches fit it, whether autoload reaches it."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..autoload import VARIABLE
from ..errors import UnsupportedError
from .findings import Finding, first_line

INSTALL = "pip install 'megatron-core>=0.19,<0.21', or run the doctor in the folder of your Megatron-LM checkout"
PTH = "megatron_dobb_autoload.pth"


def megatron_core() -> Iterator[Finding]:
    from ..megatron.seam import probe_report, versions

    place = probe_report.find()
    if place is None:
        yield Finding(
            "megatron-core",
            "warning",
            "megatron-core is not found: only megatron_dobb.Dobb for plain PyTorch can be used",
            INSTALL,
        )
        return
    try:
        versions.check_version(place.version)
    except UnsupportedError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding("megatron-core", "failure", f"{what}; found in {place.folder}", remedy)
        return
    yield Finding("megatron-core", "ok", f"megatron-core {place.version} (supported: {versions.SUPPORTED})")
    yield Finding("megatron-core", "note", f"megatron-core is in {place.folder}")


def seam() -> Iterator[Finding]:
    from ..megatron.seam import probe_report, versions

    place = probe_report.find()
    if place is None:
        yield Finding("patches", "note", "no Megatron to patch")
        return
    try:
        versions.check_version(place.version)
    except UnsupportedError:
        yield Finding("patches", "note", "not tried on a Megatron that is not supported")
        return
    fitting = []
    for name, error in _problems():
        if error is None:
            fitting.append(name)
        elif isinstance(error, UnsupportedError):
            yield Finding("patches", "failure", str(error), f"install a supported one: {INSTALL}")
        else:
            # Without Megatron's training loop, other front ends can still use megatron.core.
            yield Finding(
                "patches",
                "warning" if name.startswith("megatron.training") else "failure",
                f"{name} does not import here: {first_line(error)}",
                f"mend Megatron's installation until python -c 'import {name}' works",
            )
    if not probe_report.has("megatron.training"):
        yield Finding(
            "patches",
            "warning",
            "megatron.training is not found beside megatron.core, so pretrain_gpt.py cannot run here",
            "run the doctor in the folder of your Megatron-LM checkout, or put that on PYTHONPATH",
        )
    if fitting:
        yield Finding("patches", "ok", f"the patches fit {len(fitting)} modules of Megatron: {', '.join(fitting)}")


def _problems() -> Iterator[tuple[str, BaseException | None]]:
    from ..megatron.seam import probe_report

    with warnings.catch_warnings():  # Megatron warns of everything optional that is not installed
        warnings.simplefilter("ignore")
        yield from probe_report.problems()


def autoload() -> Iterator[Finding]:
    """Start an interpreter with the variable set, as a training script would be, and look."""
    code = "import sys; found = sys.modules.get('megatron_dobb.autoload'); print(getattr(found, '__file__', ''))"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {VARIABLE: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = finished.stdout.split("\n")
    loaded = lines[0].strip()
    install = "pip install --no-build-isolation --no-deps -e . in a checkout of megatron_dobb"
    here = Path(__file__).resolve().parents[1]
    if not loaded:
        said = finished.stderr.strip().splitlines()
        reason = said[-1] if said else f"no {PTH} in the site-packages of {sys.executable}"
        yield Finding(
            "autoload",
            "warning",
            f"{VARIABLE}=1 has no effect here: {reason}",
            f"start scripts with python -m megatron_dobb, or {install}",
        )
    elif Path(loaded).resolve().parent != here:
        yield Finding(
            "autoload",
            "warning",
            f"{VARIABLE}=1 loads another megatron_dobb, {Path(loaded).resolve().parent}, than this one, {here}",
            f"uninstall one of them, or {install}",
        )
    else:
        now = "set" if os.environ.get(VARIABLE) == "1" else "not set"
        yield Finding("autoload", "ok", f"{VARIABLE}=1 works here; it is {now} now")
