"""What the scripts that draw measurements have in common. Needs matplotlib."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of what draws)
from matplotlib import ticker  # noqa: E402

__all__ = ["finish", "finish_times", "plt", "save"]


def finish(axes: plt.Axes, marks: list[int], x: str, y: str) -> None:
    """Names the axes; x is logarithmic, and marked where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(marks, labels=[str(mark) for mark in marks], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def finish_times(axes: plt.Axes, marks: list[int], x: str) -> None:
    """Likewise with times, which are logarithmic."""
    axes.set_yscale("log")
    finish(axes, marks, x, "microseconds, p50 of the slowest rank")
    # Numbers also where an axis spans less than a decade.
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Writes a figure and says where; equal figures give equal files, so without the date."""
    plt.rcParams["svg.hashsalt"] = "crossdock"
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(path)
