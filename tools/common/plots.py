"""Pictures in files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, dpi: int = 160) -> Iterator[Any]:
    """Axes `[rows, columns]` to draw on; what was drawn is written at the end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        yield axes
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)
