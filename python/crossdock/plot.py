"""Pictures of what plans do. Needs matplotlib, and is imported by itself."""

from __future__ import annotations

import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("crossdock.plot needs matplotlib: pip install 'crossdock[cli]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["routing", "save"]

_MOST_NUMBERS = 16  # ranks whose cells have room for their numbers
_BARS, _MEAN = "#2f7ebc", "#c2410c"
_DARK = (
    "<style>@media (prefers-color-scheme: dark) "
    "{ svg { filter: invert(1) hue-rotate(180deg) } }</style>"
)
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# The ends of lines inside an axis, a curve or another part of axes, which gets one line each.
_DEEPER = re.compile(r"\s*\n(?! {0,3}</?\w) *")


def _numbers(values: Any) -> np.ndarray:
    """An array of NumPy's, or a tensor of any device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _rows_between_ranks(axes: Axes, rank_rows: np.ndarray) -> None:
    ranks = len(rank_rows)
    image = axes.imshow(rank_rows, cmap="Blues", vmin=0)
    axes.set(xlabel="to rank", ylabel="from rank", title="rows between ranks")
    step = -(-ranks // _MOST_NUMBERS)
    axes.set_xticks(range(0, ranks, step))
    axes.set_yticks(range(0, ranks, step))
    if ranks <= _MOST_NUMBERS:
        for (source, destination), rows in np.ndenumerate(rank_rows):
            dark = 2 * rows > rank_rows.max()
            axes.text(
                destination,
                source,
                f"{rows:,}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    else:
        axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _rows_of_experts(axes: Axes, counts: np.ndarray) -> None:
    experts = len(counts)
    axes.bar(range(experts), counts, color=_BARS)
    if experts and counts.any():
        mean = counts.mean()
        axes.axhline(mean, color=_MEAN, linestyle="--", linewidth=1)
        label = f"mean {mean:,.0f}, busiest {counts.max() / mean:.1f}x"
        axes.annotate(label, (0, mean), (2, 2), textcoords="offset points", color=_MEAN, fontsize=8)
    axes.set(xlabel="local expert", ylabel="rows", title="rows of this rank's experts")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def routing(plan: Any) -> Figure:
    """Draws how evenly a batch is spread: rows between all ranks, and rows of this rank's experts.

    Args:
        plan: of `crossdock.EpGroup.prepare` or of crossdock.torch's; on a GPU its numbers are read,
            which waits for it.

    Returns:
        matplotlib's figure, which a notebook shows; `save` writes it.
    """
    rank_rows, counts = _numbers(plan.rank_rows), _numbers(plan.counts)
    ranks = int(np.sqrt(rank_rows.size))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _rows_between_ranks(left, rank_rows.reshape(ranks, ranks))
    _rows_of_experts(right, counts)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure, and closes it. A ``.svg`` is dark where its reader's browser is.

    Equal figures give equal files. The text of a ``.svg`` stays text.
    """
    place = pathlib.Path(path)
    is_svg = place.suffix == ".svg"
    with plt.rc_context({"svg.hashsalt": "crossdock", "svg.fonttype": "none"}):
        figure.savefig(place, dpi=130, metadata=_NO_METADATA if is_svg else None)
    plt.close(figure)
    if is_svg:
        head, mark, rest = place.read_text().partition("<defs>")
        place.write_text(_DEEPER.sub(" ", f"{head}{_DARK}\n {mark}{rest}"))
