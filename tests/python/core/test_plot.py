"""Pictures of plans."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import crossdock
from core_support import config_of
from support import Rank, run_ranks

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def _draw(me: Rank, path: str) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")
    from crossdock import plot

    with me.comm() as comm, crossdock.EpGroup(comm, config_of(max_tokens_per_rank=8)) as group:
        plan = group.prepare(np.tile(np.array([[0, 3]], np.int64), (5 + me.rank, 1)))
        figure = plot.routing(plan)
    left, right = figure.axes
    cells = [text.get_text() for text in left.texts]
    bars = [int(bar.get_height()) for bar in right.patches]
    if me.rank == 0:
        plot.save(figure, path)
        plot.save(plot.routing(plan), path + ".again.svg")
    return [*cells, *map(str, bars)]


def test_a_plan_is_drawn_with_its_numbers_and_for_dark_readers(tmp_path: pathlib.Path):
    path = tmp_path / "routing.svg"
    drawn = run_ranks(2, _draw, str(path))
    # Rows from each rank to each rank; then rows of this rank's two experts.
    assert drawn[0] == ["5", "5", "6", "6", "11", "0"]
    assert drawn[1] == ["5", "5", "6", "6", "0", "11"]
    text = path.read_text()
    assert text.count("prefers-color-scheme: dark") == 1
    assert text == pathlib.Path(f"{path}.again.svg").read_text()
