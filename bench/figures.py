"""The style that all drawings of measurements have in common. Needs matplotlib."""

import datetime
import importlib.util
import math
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of what draws)
from matplotlib import ticker  # noqa: E402

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "PURPLE", "device_of", "finish", "new"]
__all__ += ["finish_times", "plot", "save"]

# The package's own module by its file: the package would want its extension, which no figure needs.
_PLOT = pathlib.Path(__file__).resolve().parents[1] / "python/crossdock/plot.py"
_spec = importlib.util.spec_from_file_location("crossdock_plot", _PLOT)
_plot = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_plot)

# Readers who do not see all colours tell these apart; markers and dashes differ as well.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
BLACK, GREY = "#222222", "#888888"

WIDTH = 8  # inches: a page shows a figure about as wide, so letters are as large as its text
_MOST_LABELS = 17  # of a panel's x axis
_STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
}
plt.rcParams.update(_STYLE)


def new(lines: int, columns: int, height: float) -> tuple[plt.Figure, list[plt.Axes]]:
    """A figure as wide as a page, and its panels, which share the y axis."""
    figure, panels = plt.subplots(
        lines, columns, figsize=(WIDTH, height), sharey=True, squeeze=False, layout="constrained"
    )
    return figure, list(panels.flat)


def plot(axes: plt.Axes, xs: list, ys: list, label: str, **look: object) -> None:
    """Draws a line. Its markers are hollow, so that one below them is seen."""
    axes.plot(xs, ys, label=label, markerfacecolor=look.pop("fill", "white"), **look)


def _with_room(marks: list[int], most: int) -> list[int]:
    """Marks of a logarithmic axis whose labels and grid lines do not touch the next ones."""
    room = math.log2(marks[-1] / marks[0]) / most
    kept = marks[-1:]
    for mark in reversed(marks[:-1]):
        if math.log2(kept[-1] / mark) >= room:
            kept.append(mark)
    return kept[::-1]


def finish(axes: plt.Axes, marks: list[int], x: str, most: int = _MOST_LABELS) -> None:
    """Names the x axis, which is logarithmic, and marks it where something was measured."""
    axes.set_xscale("log", base=2)
    shown = _with_room(marks, most)
    axes.set_xticks(shown, labels=map(str, shown), rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(x)


def finish_times(panels: list[plt.Axes]) -> None:
    """Names the y axis that panels share: times, logarithmic, from one label to another."""
    times = [float(y) for axes in panels for line in axes.lines for y in line.get_ydata()]
    is_wide = max(times) / min(times) > 30
    steps = [1, 2, 5] if is_wide else [1, 1.5, 2, 3, 4, 5, 6, 8]
    labels = [step * 10.0**power for power in range(-1, 7) for step in steps]
    below = max(label for label in labels if label <= min(times))
    above = min(label for label in labels if label >= max(times))
    panels[0].set_yscale("log")
    panels[0].set_ylim(below, above)
    panels[0].set_ylabel("p50 of the slowest rank (µs)")
    for axes in panels:
        shown = [label for label in labels if below <= label <= above]
        axes.yaxis.set_major_locator(ticker.FixedLocator(shown))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())


def device_of(report: dict) -> str:
    """The processors that a file's first part names, in the words of a title."""
    gpus = report.get("gpus") or report["machine"]
    if isinstance(gpus, dict):
        return f"{gpus['count']} × {gpus['name']}"
    return gpus.partition(", Linux")[0].replace("(R)", "")


def save(figure: plt.Figure, said: str, report: dict, path: pathlib.Path) -> None:
    """Puts a title over the panels and one legend below them; writes the figure and says where."""
    day = datetime.date.fromisoformat(report["date"])
    where = f"{device_of(report)}, {day.day} {day:%B %Y}"
    figure.suptitle(f"{where}\n{said}", fontsize=9.5)
    lines = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels()):
            lines.setdefault(label, line)
    columns = math.ceil(len(lines) / math.ceil(len(lines) / 5))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=8.5)
    _plot.save(figure, path)
    print(path)
