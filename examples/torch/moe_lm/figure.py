"""The picture of a run, alone or beside another: losses, and how evenly the experts are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend has been chosen)
from matplotlib.axes import Axes  # noqa: E402

_REFERENCE, _OTHER, _GREY = "#9aa5b1", "#c2410c", "#52606d"


def draw(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the figure to ``path``, a ``.png``.

    Args:
        path: where to.
        runs: records of one run, or of two, by their titles. The last is the one of interest, whose
            use of the experts is shown; one before it is what it is held against.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = ({"color": _REFERENCE, "linewidth": 4.5}, {"color": _OTHER, "linewidth": 1.3})
    for (title, records), style in zip(runs.items(), styles[-len(runs) :]):
        steps = [record["step"] + 1 for record in records]
        left.plot(steps, [record["loss"] for record in records], label=title, **style)
    left.set(xlabel="step", ylabel="loss per byte (nats)", title="Loss of each step's batch")
    left.legend(frameon=False)

    _draw_use(right, list(runs.values())[-1])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_use(axes: Axes, records: list[dict[str, Any]]) -> None:
    """How much the experts between the least and the most used one of each step have to do."""
    steps = [record["step"] + 1 for record in records]
    experts = len(records[0]["load"][0])
    uses = [
        sorted(experts * sum(shares) / len(record["load"]) for shares in zip(*record["load"]))
        for record in records
    ]
    least, most = (_smooth([use[place] for use in uses]) for place in (0, -1))
    axes.fill_between(steps, least, most, color=_OTHER, alpha=0.15, label="all experts")
    axes.plot(steps, most, color=_OTHER, linewidth=1.3, label="the busiest")
    axes.plot(steps, least, color=_REFERENCE, linewidth=1.3, label="the idlest")
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1)
    axes.set(
        xlabel="step",
        ylabel="tokens, as a multiple of an even share",
        title=f"Use of the {experts} experts (dashed: all alike)",
    )
    axes.legend(frameon=False)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    """Mean over the steps around each."""
    around = window // 2
    parts = (values[max(i - around, 0) : i + around + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]
