"""What the scripts that draw measurements have in common. Needs matplotlib."""

import importlib.util
import math
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of what draws)
from matplotlib import ticker  # noqa: E402

__all__ = ["finish", "finish_times", "plt", "save"]

# The package's own module by its file: the package would want its extension, which no figure needs.
_PLOT = pathlib.Path(__file__).resolve().parents[1] / "python/crossdock/plot.py"
_spec = importlib.util.spec_from_file_location("crossdock_plot", _PLOT)
_plot = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_plot)

_MOST_LABELS = 20  # of an axis


def _readable(marks: list[int]) -> list[str]:
    """Labels of marks on a logarithmic axis: none where the next one would touch it."""
    room = math.log2(marks[-1] / marks[0]) / _MOST_LABELS
    gaps = [math.log2(after / mark) for mark, after in zip(marks, marks[1:])]
    return [str(mark) if gap >= room else "" for mark, gap in zip(marks, [*gaps, math.inf])]


def finish(axes: plt.Axes, marks: list[int], x: str, y: str) -> None:
    """Names the axes; x is logarithmic, and marked where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(marks, labels=_readable(marks), rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def finish_times(axes: plt.Axes, marks: list[int], x: str) -> None:
    """Likewise with times, which are logarithmic."""
    axes.set_yscale("log")
    finish(axes, marks, x, "microseconds, p50 of the slowest rank")
    # Numbers also where an axis spans less than a decade.
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Puts one legend below all panels, writes the figure and says where."""
    lines = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels()):
            lines.setdefault(label, line)
    figure.set_layout_engine("constrained")
    columns = min(len(lines), 5)
    place = "outside lower center"
    figure.legend(lines.values(), lines, loc=place, ncols=columns, frameon=False, fontsize=9)
    _plot.save(figure, path)
    print(path)
