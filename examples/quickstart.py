"""Pretrain a small GPT in Megatron's own training loop, with Dobb and with AdamW, in two CPU processes.

examples/quickstart.sh installs the requirements and starts this. The training text is English that comes with Python.
Dobb trains at learning rate --lr; AdamW at the same rate, at half of it and at twice it.
"""

import argparse
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corpus import Corpus
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from trainings import Training

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).with_suffix("")))

_MARKER = ".made-by-quickstart"
_FEWEST_STEPS = 15


def main() -> int:
    """Parse the options, run everything, and return the exit status."""
    options = parse(sys.argv[1:])
    if options.check_options:
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it would warn that there is no GPU
    from rich.console import Console

    console = Console(highlight=False)
    started = time.monotonic()
    try:
        with console.status("Making a data set from the text that comes with Python"):
            corpus = make_corpus(options.out)
        console.print(f"Data: {corpus.train_tokens:,} bytes to train on, {corpus.valid_tokens:,} held out.")
        if Path("/dev/nvidia0").exists():
            console.print("This machine has a GPU. The quickstart hides it from its processes and trains on the CPU.")
        trainings = plan(options)
        train(trainings, corpus, options.out, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What ran so far is in {options.out}.")
        return 130
    except Exception as error:
        from trainings import TrainingError

        if not isinstance(error, TrainingError):
            raise
        console.print(f"\n{error}", style="red", markup=False, soft_wrap=True)
        return 1
    report(trainings, options.out, console)
    console.print(f"Took {(time.monotonic() - started) / 60:.1f} minutes. Logs are in {options.out / 'logs'}.")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and validate the options."""
    parser = argparse.ArgumentParser(
        prog="examples/quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="training steps of each run (default: 500)")
    parser.add_argument("--lr", type=float, default=3.54e-3, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "quickstart_out",
        help="folder for data, logs and curves (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a test of a minute: Dobb and one AdamW, 45 steps")
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    if options.steps is None:
        options.steps = 45 if options.quick else 500
    if options.steps < _FEWEST_STEPS:
        parser.error(f"--steps {options.steps} is too few to draw a curve: use {_FEWEST_STEPS} or more")
    if not 0 < options.lr < 1:
        parser.error(f"--lr {options.lr:g} is no learning rate for this: use a value between 0 and 1, such as 3.54e-3")
    if options.out.exists() and not replaceable(options.out):
        parser.error(f"--out {options.out} holds files of something else: give a new or an empty folder")
    return options


def replaceable(out: Path) -> bool:
    """Return whether a folder is empty or contains the results of an earlier run."""
    return out.is_dir() and ((out / _MARKER).exists() or not any(out.iterdir()))


def make_corpus(out: Path) -> "Corpus":
    """Empty the output folder and write the data set to it."""
    if out.exists():
        shutil.rmtree(out)
    (out / "logs").mkdir(parents=True)
    (out / _MARKER).touch()
    import corpus

    return corpus.build(out / "data")


def plan(options: argparse.Namespace) -> list["Training"]:
    """List the training runs: Dobb first, then AdamW at one or three learning rates."""
    from trainings import ADAMW, DOBB, Training

    factors = (1.0,) if options.quick else (1.0, 0.5, 2.0)
    runs = [Training("Dobb", DOBB, options.lr, options.steps)]
    for factor in factors:
        rate = factor * options.lr
        runs.append(Training(f"AdamW, lr {rate:.3g}", ADAMW, rate, options.steps))
    return runs


def train(trainings: Sequence["Training"], corpus: "Corpus", out: Path, console: "Console") -> None:
    """Run the trainings one by one, each with a progress bar."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console.print("Losses: training / held-out text.")
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]:>13}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task(training.name, total=training.steps, start=False, losses="") for training in trainings
        ]
        for number, (training, bar) in enumerate(zip(trainings, bars, strict=True)):
            progress.start_task(bar)
            for _ in training.run(corpus, out / "logs" / f"{number}-{training.name.split(',')[0].lower()}.log"):
                show(training, progress, bar)
            show(training, progress, bar)


def show(training: "Training", progress: "Progress", bar: "TaskID") -> None:
    """Update a progress bar."""
    losses = [series[max(series)] if series else None for series in (training.train_loss, training.validation_loss)]
    shown = " / ".join("-" if loss is None else f"{loss:.3f}" for loss in losses)
    progress.update(bar, completed=training.step, losses=shown)


def report(trainings: Sequence["Training"], out: Path, console: "Console") -> None:
    """Save the curves and the numbers, and print the table."""
    from report import save_curves, save_results, table, verdict

    save_results(trainings, out / "results.json")
    save_curves(trainings, out / "curves.png")
    console.print(table(trainings))
    console.print(verdict(trainings), style="bold")
    console.print(f"Curves: {out / 'curves.png'}")


if __name__ == "__main__":
    sys.exit(main())
