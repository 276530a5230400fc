"""Show the progress of a set of training runs."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .finished_runs import Record
from .runs import Run


class Watch:
    """Shows how far a comparison is: a bar on a terminal, a line for each run elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("training", total=0)
        self.total = self.done = 0

    def __enter__(self) -> "Watch":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def expect(self, more: int) -> None:
        """So many runs more will come."""
        self.total += more
        self.progress.update(self.task, total=self.total)

    def finished(self, run: Run, record: Record) -> None:
        """A run was done."""
        self.done += 1
        self.progress.update(self.task, advance=1)
        settings = "".join(f" {key}={value}" for key, value in run.method.settings.items())
        loss = "diverged" if record["final"] is None else f"{record['final']:.4f}"
        line = f"{self.done}/{self.total} {run.method.optimizer}{settings} lr={run.learning_rate:.3g} seed={run.seed}"
        self.progress.console.print(f"{line}: {loss}", highlight=False)
