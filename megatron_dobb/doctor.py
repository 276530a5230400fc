"""Report what works in this environment, what does not, and what to do about it: `python -m megatron_dobb doctor`.

It needs no launcher and starts no training. The checks run in a child process, so that it also reports libraries that
crash or hang; the parent process imports nothing heavy.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .autoload import VARIABLE
from .errors import UnsupportedError
from .version import __version__

DESCRIPTION = """Look at versions, the compiled extension, GPUs and Megatron, test the optimizer on small blocks,
and end with a verdict. Exit status: 0 if Dobb can be used, 1 if not, 2 for wrong arguments."""

LIMIT_S = 180.0
"""Time limit for all checks together: they take ten seconds, longer if Megatron loads from a busy file system."""

PYTHON, TORCH = ">=3.12", ">=2.11"
INSTALL = "pip install 'megatron-core>=0.19,<0.21', or run the doctor in the folder of your Megatron-LM checkout"
PTH = "megatron_dobb_autoload.pth"
REINSTALL = "pip install --no-build-isolation --no-deps -e . in a checkout of megatron_dobb"
OPTIONAL = {
    "transformer-engine": ("transformer_engine", "train with --transformer-impl local"),
    "apex": ("apex", "train with --no-gradient-accumulation-fusion unless Transformer Engine is there"),
}
"""Libraries that Megatron uses if they are installed: the module, and what to do without it."""

State = Literal["ok", "note", "warning", "failure"]
MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "failure": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """Result of a check. A `warning` (Dobb works, with limits) or a `failure` (it does not work) has a remedy."""

    check: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.state in ("ok", "note"), f"no remedy for {self}"

    def __str__(self) -> str:
        text = f"{MARKS[self.state]}  {self.check:<18}  {self.text}"
        return f"{text}\n{'':26}-> {self.remedy}" if self.remedy else text


def verdict(findings: Sequence[Finding]) -> str:
    """Summarize in one line: `ready: ...`, `works, with: ...` or `not usable: ...`, and each finding's remedy."""
    if not findings:
        return "not usable: no check ended (please report it)"
    for state, start in (("failure", "not usable: "), ("warning", "works, with: ")):
        of_state = [f"{f.text} ({f.remedy})" for f in findings if f.state == state]
        if of_state:
            return start + "; ".join(of_state)
    told = ("package", "torch", "megatron-core", "extension", "gpu")
    return "ready: " + "; ".join(f.text for f in findings if f.check in told and f.state == "ok")


def usable(findings: Sequence[Finding]) -> bool:
    """Return whether nothing failed; without any findings, return false."""
    return bool(findings) and all(f.state != "failure" for f in findings)


def main(arguments: Sequence[str]) -> int:
    """Print the findings and the verdict, and return the exit status."""
    parser = argparse.ArgumentParser("python -m megatron_dobb doctor", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    as_json = parser.parse_args(arguments).json
    findings: list[Finding] = []
    for finding in run(list(CHECKS)):
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"verdict": verdict(findings), "usable": usable(findings), "findings": rows}, indent=2))
    else:
        print(f"\n{verdict(findings)}")
    return 0 if usable(findings) else 1


# The child process.


def run(names: Sequence[str], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Run checks in a child process; if one kills it, report that and run the remaining checks in a new process."""
    left = list(names)
    while left:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            safe = ["-P"] if sys.flags.safe_path else []
            child = subprocess.Popen(
                [sys.executable, *safe, "-m", __name__, *left],
                # Autoload has its own check; the others need an unpatched Megatron.
                env={key: value for key, value in os.environ.items() if key != VARIABLE},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            late = threading.Event()
            timer = threading.Timer(limit_s, _stop, (child, late))
            timer.start()
            running = None
            try:
                for line in child.stdout or ():
                    message = json.loads(line) if line.endswith("\n") else ""
                    if isinstance(message, dict):
                        yield Finding(**message)
                    elif message:
                        running = message
                status = child.wait()
            finally:
                timer.cancel()
                child.kill()
                child.wait()
            if status == 0:
                return
            errors.seek(0)
            lines = errors.read().strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        reason = f"it ended its process with {how}{': ' + lines[-1] if lines else ''}"
        yield _broken(running or left[0], f"it did not end within {limit_s:g} s" if late.is_set() else reason)
        if running is None:
            return  # no check started at all, so none would in another process
        left = left[left.index(running) + 1 :]


def _stop(child: "subprocess.Popen[str]", late: threading.Event) -> None:
    late.set()
    child.kill()


def _child(names: Sequence[str]) -> None:
    """Write a line of JSON for each check started and each finding; send other output to standard error."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps(name), file=pipe, flush=True)
        for finding in findings_of(name):
            print(json.dumps(dataclasses.asdict(finding)), file=pipe, flush=True)


def findings_of(name: str) -> Iterator[Finding]:
    """Run one check and yield its findings; if it raises, yield a finding that says so."""
    try:
        with warnings.catch_warnings():  # Megatron warns about every optional package that is not installed
            warnings.simplefilter("ignore")
            for state, text, *remedy in CHECKS[name][0]():
                yield Finding(name, state, text, *remedy)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken installation can raise anything, and still needs a verdict
        if isinstance(error, ImportError) and _import_error("torch") is not None:
            yield Finding(name, "note", "not tried, because PyTorch does not import")
        else:
            yield _broken(name, _first_line(error))


def _broken(name: str, reason: str) -> Finding:
    remedy = "repair what the message names; if it names nothing that you can repair, please report it"
    return Finding(name, CHECKS[name][1], f"the check of {name} broke off: {reason}", remedy)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # its own ImportError, or anything raised by a library it loads
        return _first_line(error)
    return None


def _fits(version: str, supported: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return Version(version).base_version in SpecifierSet(supported)


# Checks: each yields a state, a text and, if there is something to do, a remedy.

Result = tuple[State, str] | tuple[State, str, str]


def _package() -> Iterator[Result]:
    yield "ok", f"megatron_dobb {__version__} in {Path(__file__).resolve().parent}"


def _environment() -> Iterator[Result]:
    # An older Python does not get here: importing the package already fails with a clear message.
    yield "ok", f"Python {sys.version.split()[0]} (supported: {PYTHON}), {sys.executable}"
    from torch.utils import collect_env as env

    found = (env.get_os(env.run), f"GCC {env.get_gcc_version(env.run)}", env.get_libc_version())
    yield "note", f"{', '.join(found)}, CUDA toolkit {env.get_running_cuda_version(env.run)}"


def _torch() -> Iterator[Result]:
    remedy = f"install a supported PyTorch: pip install 'torch{TORCH}', or see pytorch.org for CUDA builds"
    error = _import_error("torch")
    if error is not None:
        yield "failure", f"PyTorch does not import: {error}", remedy
        return
    import torch

    version = str(torch.__version__)
    if not _fits(version, TORCH):
        yield "failure", f"PyTorch {version} is not supported: megatron_dobb needs {TORCH}", remedy
    else:
        yield "ok", f"PyTorch {version} (supported: {TORCH})"
    if torch.version.cuda is None:
        yield (
            "warning",
            f"PyTorch {version} is built without CUDA: everything runs on CPUs",
            "to train on NVIDIA GPUs, install a CUDA build of PyTorch, from pytorch.org or in NVIDIA's container",
        )
    elif not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        yield "warning", "PyTorch is built without NCCL: ranks with GPUs cannot communicate", "install one with NCCL"


def _optional(check: str) -> Iterator[Result]:
    module, without = OPTIONAL[check]
    if importlib.util.find_spec(module) is None:
        yield "note", f"{module} is not found: optional; without it {without}"
        return
    try:
        version = importlib.metadata.version(check)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    error = _import_error(module)
    if error is None:
        yield "ok", f"{module} {version}"
    else:
        text = f"{module} {version} does not import, so Megatron runs without it: {error}"
        yield "warning", text, "install one built for this PyTorch, or uninstall it"


def _megatron_core() -> Iterator[Result]:
    from .megatron.seam import probe_report, versions

    place = probe_report.find()
    if place is None:
        yield "warning", "megatron-core is not found: only megatron_dobb.Dobb for plain PyTorch can be used", INSTALL
        return
    try:
        versions.check_version(place.version)
    except UnsupportedError as error:
        text, _, remedy = str(error).partition("; ")
        yield "failure", f"{text}; found in {place.folder}", remedy
        return
    yield "ok", f"megatron-core {place.version} (supported: {versions.SUPPORTED}) in {place.folder}"


def _extension() -> Iterator[Result]:
    from .kernels import extension

    loaded = extension.load()
    if loaded.module is None:
        text = f"the extension is not usable, and slower plain PyTorch runs in its place: {loaded.reason}"
        yield "warning", text, extension.HOW_TO_BUILD
        return
    info = extension.build_info()
    yield (
        "ok",
        f"the extension runs its {info.cpu} kernels on this CPU; built by {info.compiler} for PyTorch {info.torch} "
        f"from sources {getattr(loaded.module, 'sources', '') or 'without a stamp'}",
    )
    file, here = Path(loaded.module.__file__ or "").resolve(), Path(__file__).resolve().parent
    if file.parent != here:  # an editable install of another checkout shadows a copy on PYTHONPATH
        text = f"the extension is that of another installation, {file}, and the package is in {here}"
        yield "warning", text, f"uninstall the other one, or {extension.HOW_TO_BUILD}"
    if info.cuda_architectures:
        yield "ok", f"CUDA kernels were built for {info.cuda_architectures}"
    else:
        yield "note", f"no CUDA kernels: {extension.why_not('cuda')}"


def _gpu() -> Iterator[Result]:
    import torch
    from torch.utils import collect_env

    from .kernels import extension

    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if torch.cuda.is_available():
        for index, (name, capability) in _gpus():
            text = f"{name} of capability {capability}, driver {driver}"
            if extension.runs_on("cuda"):
                yield "ok", f"{text}; the self-test runs the CUDA kernels on cuda:{index}"
            else:
                yield "warning", f"{text}: no CUDA kernels, {extension.why_not('cuda')}", _rebuild(capability)
    elif torch.version.cuda is None and driver is None:
        yield "note", "no NVIDIA driver on this machine, and no CUDA in PyTorch"
    else:
        if torch.version.cuda is None:
            reason = f"it is built without CUDA, and the NVIDIA driver is {driver}"
            remedy = "install a CUDA build of PyTorch"
        elif (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            reason, remedy = f"CUDA_VISIBLE_DEVICES is {hidden!r}", "unset CUDA_VISIBLE_DEVICES to see all GPUs"
        elif driver is None:
            reason, remedy = "there is no NVIDIA driver on this machine", "run the doctor where the training will run"
        else:
            reason = f"NVIDIA driver {driver} does not serve its CUDA {torch.version.cuda}"
            remedy = "see what nvidia-smi says; a newer CUDA in PyTorch needs a newer driver"
        yield "warning", f"PyTorch sees no GPU: {reason}", remedy


def _gpus() -> list[tuple[int, tuple[str, str]]]:
    """Return the index, name and capability of the first GPU of each kind."""
    from torch import cuda

    kinds: dict[tuple[str, str], int] = {}
    for index in range(cuda.device_count()):
        major, minor = cuda.get_device_capability(index)
        kinds.setdefault((cuda.get_device_name(index), f"{major}.{minor}"), index)
    return [(index, kind) for kind, index in kinds.items()]


def _rebuild(capability: str) -> str:
    return f"rebuild the extension where the GPU is, with TORCH_CUDA_ARCH_LIST={capability}: {REINSTALL}"


def _autoload() -> Iterator[Result]:
    """Start an interpreter with the variable set, as for a training script, and check that the hook ran."""
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
    loaded, here = finished.stdout.split("\n")[0].strip(), Path(__file__).resolve().parent
    if not loaded:
        lines = finished.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"no {PTH} in the site-packages of {sys.executable}"
        remedy = f"start scripts with python -m megatron_dobb, or {REINSTALL}"
        yield "warning", f"{VARIABLE}=1 has no effect here: {reason}", remedy
    elif (other := Path(loaded).resolve().parent) != here:
        text = f"{VARIABLE}=1 loads another megatron_dobb, {other}, than this one, {here}"
        yield "warning", text, f"uninstall one of them, or {REINSTALL}"
    else:
        now = "set" if os.environ.get(VARIABLE) == "1" else "not set"
        yield "ok", f"{VARIABLE}=1 works here; it is {now} now"


def _contract() -> Iterator[Result]:
    """Import, check and patch every Megatron module that the contract names."""
    from .megatron.seam import contract, probe_report, versions

    place = probe_report.find()
    if place is None or not versions.supports(place.version):
        yield "note", "no Megatron to patch" if place is None else "not tried on a Megatron that is not supported"
        return
    fitting = 0
    for name, error in probe_report.problems():
        if error is None:
            fitting += 1
        elif isinstance(error, UnsupportedError):
            yield "failure", str(error), f"install a supported one: {INSTALL}"
        else:  # other front ends use megatron.core without Megatron's training loop
            state: State = "warning" if name.startswith("megatron.training") else "failure"
            remedy = f"repair Megatron's installation until python -c 'import {name}' works"
            yield state, f"{name} does not import here: {_first_line(error)}", remedy
    if not probe_report.has("megatron.training"):
        yield (
            "warning",
            "megatron.training is not found beside megatron.core, so pretrain_gpt.py cannot run here",
            "run the doctor in the folder of your Megatron-LM checkout, or put that on PYTHONPATH",
        )
    if fitting:
        yield "ok", f"the {len(contract.NAMES)} names of the contract fit {fitting} modules of Megatron"


# Self-test: run small blocks through the functions that training uses.


def _self_test() -> Iterator[Result]:
    import torch

    from .kernels import dispatch, extension
    from .methods.dobb.self_test import refresh_problem, update_problem

    gpus = _gpus() if torch.cuda.is_available() else []
    for device, capability in [("cpu", ""), *((f"cuda:{index}", kind[1]) for index, kind in gpus)]:
        kind = torch.device(device)
        own = extension.runs_on(kind.type)
        name = dispatch.kernel_name(kind) if own else f"plain PyTorch on {device}"
        remedy = "train with --dobb-backend reference, and please report it" if own else "please report it"
        remedy = f"{_rebuild(capability)}; or {remedy}" if own and capability else remedy
        try:
            for what, problem in (("update", update_problem(kind)), ("refresh", refresh_problem(kind))):
                if problem is None:
                    yield "ok", f"the {what} by {name} on {device} agrees with float64"
                else:
                    yield "failure", f"the {what} by {name} on {device} is wrong: {problem}", remedy
        except RuntimeError as error:  # kernels built for other GPUs
            yield "failure", f"the kernels do not run on {device}: {_first_line(error)}", remedy
    before, after = losses()
    if after < before:
        yield "ok", f"a step of the plain optimizer lowers a loss: from {before:.3f} to {after:.3f}"
    else:
        text = f"a step of the plain optimizer does not lower a loss: {before:.3f}, then {after:.3f}"
        yield "failure", text, "please report it"


def losses() -> Iterator[float]:
    """Yield the loss of a small model before and after one step of the plain optimizer."""
    import torch
    from torch import nn

    from .pytorch.dobb import Dobb

    torch.manual_seed(3)
    model, inputs, targets = nn.Linear(32, 8), torch.randn(64, 32), torch.randn(64, 8)
    optimizer = Dobb(model, lr=1e-2, weight_decay=0.0, blocks=2)
    for _ in range(2):
        loss = nn.functional.mse_loss(model(inputs), targets)
        yield loss.item()
        loss.backward()
        optimizer.step()


CHECKS: dict[str, tuple[Callable[[], Iterator[Result]], State]] = {
    "package": (_package, "failure"),
    "environment": (_environment, "warning"),
    "torch": (_torch, "failure"),
    **{check: (functools.partial(_optional, check), "warning") for check in OPTIONAL},
    "megatron-core": (_megatron_core, "failure"),
    "extension": (_extension, "failure"),
    "gpu": (_gpu, "warning"),
    "autoload": (_autoload, "warning"),
    "self-test": (_self_test, "failure"),
    "patches": (_contract, "failure"),
}
"""Checks by name, each with the state to report if the check itself breaks."""

if __name__ == "__main__":
    _child(sys.argv[1:])
