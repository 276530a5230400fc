"""What a case must show on any machine, read from the logs that Megatron's harness leaves; no golden values.

    python check_run.py cases/gpt_dp8_overlap/model_config.yaml OUTPUT_PATH [--gpus 8] [--repeat 1]

For every run of the case: all iterations are there, with finite losses, none skipped; the loss falls; Dobb has all
matrices of the layers, what the first rank sends on a refresh is what the sizes say, and no other step sends anything
for Dobb. For a case that resumes: its losses are those of the run that was not interrupted, to the last digit printed
if the layout is the same, and moments and bases were taken over. Each claim is one line; the exit status is 1 if one
does not hold.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

MIB = 2**20
FALL = 0.9
"""The mean of a run's last losses, five of 100, over its first must lie below this."""
FIRST_RESUMED, LATER_RESUMED = 0.01, 0.05
"""On another layout: relative differences of the first loss, which only rounding moves, and of later ones, as in
Megatron's own approximate comparison."""

_ITERATION = re.compile(
    r"iteration +(\d+)/ *\d+ \|.* lm loss: (\S+) \|.* skipped iterations: +(\d+) \| number of nan iterations: +(\d+)"
)
_MATRICES = re.compile(r"dobb: (\d+) matrices \(([\d,]+) elements\) of the whole model")
_SENT = re.compile(r"dobb: sent by this rank on a refresh step: ([\d.]+) MiB reduce-scattered, .*; (.*)")
_ANEW = re.compile(r"dobb: .*start anew.*")


@dataclass
class Run:
    """One training, as its ranks' logs tell it."""

    losses: dict[int, str] = field(default_factory=dict)
    """As printed, by iteration."""
    skipped: int = 0
    matrices: tuple[int, int] | None = None
    """How many are on Dobb in the whole model, and their elements."""
    reduced: float = 0.0
    """MiB that the first rank reduce-scatters on a refresh, dense and experts together."""
    other_steps: set[str] = field(default_factory=set)
    """What the log says of other steps."""
    anew: list[str] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    """What is no number in the place of a loss, as where a log was cut off or ranks wrote into one line."""

    def read(self, log: str) -> None:
        """Take in the log of a rank."""
        for number, loss, skipped, nan in _ITERATION.findall(log):
            if not _is_number(loss):
                self.damaged[int(number)] = loss
                continue
            self.losses[int(number)] = loss
            self.skipped += int(skipped) + int(nan)
        for matrices, elements in _MATRICES.findall(log):
            self.matrices = int(matrices), int(elements.replace(",", ""))
        for mebibytes, others in _SENT.findall(log):
            self.reduced += float(mebibytes)
            self.other_steps.add(others)
        self.anew += _ANEW.findall(log)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def runs_of(logs: Path) -> list[Run]:
    """The runs whose logs torchrun put into a folder of their own each, the earliest iterations first."""
    if not logs.is_dir():
        raise SystemExit(f"error: there is no folder {logs}. OUTPUT_PATH must be that of run_ci_test.sh, after its run")
    found = []
    for folder in sorted(path for path in logs.iterdir() if path.is_dir()):
        run = Run()
        for log in sorted(folder.rglob("stdout.log")):
            run.read(log.read_text(errors="replace"))
        if run.losses or run.damaged:
            found.append(run)
    return sorted(found, key=lambda run: min(*run.losses, *run.damaged, math.inf))


@dataclass(frozen=True)
class Expected:
    """What a case's arguments say about Dobb's part of the model."""

    matrices: int
    elements: int
    reduced: float
    """MiB that the first rank reduce-scatters on a refresh."""


def expected(words: Mapping[str, object], gpus: int) -> Expected:
    """Derive it from the sizes alone: `n (b + 1) / 2` fp32 values a matrix and a token count.

    Args:
        words: MODEL_ARGS.
        gpus: the number of ranks.
    """

    def size(name: str, default: int) -> int:
        return int(str(words.get(f"--{name}", default)))

    layers, hidden, blocks = size("num-layers", 0), size("hidden-size", 0), size("dobb-blocks", 16)
    tensor, stages = size("tensor-model-parallel-size", 1), size("pipeline-model-parallel-size", 1)
    experts, expert_ranks = size("num-experts", 0), size("expert-model-parallel-size", 1)
    expert_tensor = size("expert-tensor-parallel-size", tensor)
    ffn = size("ffn-hidden-size", 4 * hidden)
    if experts:
        ffn = size("moe-ffn-hidden-size", ffn)
    tokens_over = gpus // (tensor * stages)
    sharded_input = tokens_over * (tensor if "--sequence-parallel" in words else 1)
    of_expert = gpus // (stages * expert_ranks * expert_tensor)

    def values(features: int, width: int, ranks: int) -> float:
        return features * (width + 1) / 2 + 1 if ranks > 1 else 0.0

    inner, outer = hidden // blocks, ffn // blocks
    layer = values(hidden, inner, sharded_input) + values(hidden // tensor, inner, tokens_over)
    if experts:
        per_expert = values(hidden, inner, of_expert) + values(ffn // expert_tensor, outer, of_expert)
        layer += experts // expert_ranks * per_expert
    else:
        layer += values(hidden, inner, sharded_input) + values(ffn // tensor, outer, tokens_over)
    copies = max(1, experts)
    return Expected(
        layers * (2 + 2 * copies),
        layers * (4 * hidden * hidden + copies * 2 * hidden * ffn),
        layers // stages * layer * 4 / MIB,
    )


Claim = tuple[bool, str]


def claims(config: Mapping[str, dict[str, object]], runs: list[Run], gpus: int) -> Iterator[Claim]:
    """What must hold, and whether it does."""
    resumes = str(config["TEST_TYPE"]) == "ckpt-resume"
    last = int(str(config["MODEL_ARGS"]["--train-iters"]))
    yield len(runs) == 1 + resumes, f"{1 + resumes} run(s) have logs (found {len(runs)})"
    for number, run in enumerate(runs, start=1):
        words = config.get(f"MODEL_ARGS_{number}", config["MODEL_ARGS"]) if number > 1 else config["MODEL_ARGS"]
        first = 1 if number == 1 else last // 2 + 1
        yield from _of_run(f"run {number}", run, expected(words, gpus), range(first, last + 1))
    if resumes and len(runs) == 2:
        yield from _of_resumed(*runs, exact="MODEL_ARGS_2" not in config)


def _of_run(name: str, run: Run, wanted: Expected, iterations: range) -> Iterator[Claim]:
    found = sorted(run.losses)
    yield found == list(iterations), f"{name}: iterations {iterations[0]} to {iterations[-1]} are logged ({len(found)})"
    losses = [float(run.losses[iteration]) for iteration in found]
    finite = all(map(math.isfinite, losses)) and not run.damaged
    yield finite, f"{name}: every loss is finite {run.damaged or ''}".rstrip()
    yield run.skipped == 0, f"{name}: no iteration was skipped or NaN ({run.skipped})"
    if iterations[0] == 1 and losses:
        last = losses[-max(1, len(losses) // 20) :]
        end = sum(last) / len(last)
        yield end < FALL * losses[0], f"{name}: the loss falls, from {losses[0]:.3f} to {end:.3f}"
    seen = run.matrices or (0, 0)
    yield (
        seen == (wanted.matrices, wanted.elements),
        f"{name}: {wanted.matrices} matrices of {wanted.elements:,} elements are on Dobb (log: {seen[0]}, {seen[1]:,})",
    )
    yield (
        abs(run.reduced - wanted.reduced) <= 0.01 * (1 + wanted.reduced),  # two tables, each to two digits
        f"{name}: a refresh reduce-scatters {wanted.reduced:.2f} MiB of the first rank (log: {run.reduced:.2f})",
    )
    yield run.other_steps == {"nothing on other steps"}, f"{name}: other steps send nothing for Dobb"


def _of_resumed(undisturbed: Run, resumed: Run, exact: bool) -> Iterator[Claim]:
    yield not resumed.anew, f"moments and bases were taken over {resumed.anew or ''}"
    # Megatron logs the first iteration of a run without clearing its sums: the next entry is the mean of two.
    logged = sorted(resumed.losses)
    common = [iteration for iteration in logged[:1] + logged[2:] if iteration in undisturbed.losses]
    if exact:
        same = all(resumed.losses[iteration] == undisturbed.losses[iteration] for iteration in common)
        yield bool(common) and same, f"the {len(common)} resumed losses are those of the run that was not interrupted"
        return
    pairs = [(float(resumed.losses[iteration]), float(undisturbed.losses[iteration])) for iteration in common]
    apart = [abs(mine - other) / abs(other) if other else math.inf for mine, other in pairs]
    yield bool(apart) and apart[0] <= FIRST_RESUMED, f"the first resumed loss is the same ({apart[:1]})"
    yield bool(apart) and max(apart) <= LATER_RESUMED, f"later losses agree (at most {max(apart, default=1):.4f} apart)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the model_config.yaml that was run")
    parser.add_argument("output", type=Path, help="OUTPUT_PATH of run_ci_test.sh")
    parser.add_argument("--gpus", type=int, default=8, help="ranks of the job (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="which of N_REPEAT repeats (default: %(default)s)")
    args = parser.parse_args()
    if not args.config.is_file():
        parser.error(f"config {args.config} is not there; give the model_config.yaml of a case")
    logs = args.output / "logs" / str(args.repeat)
    if not logs.is_dir():
        parser.error(f"there is no {logs}; give as output the OUTPUT_PATH of a run, such as $OUT/gpt_tp4_dp2")
    config = yaml.safe_load(args.config.read_text())
    results = list(claims(config, runs_of(logs), args.gpus))
    for holds, claim in results:
        print(f"{'ok    ' if holds else 'FAILED'}  {claim}")
    return 0 if all(holds for holds, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
