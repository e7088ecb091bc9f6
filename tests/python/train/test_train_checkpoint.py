"""A run that goes on from a checkpoint is the run that was never interrupted."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from moe_lm.compare import read_log
from runs import Outcome, run, small
from support import run_ranks

SAVED_AT, STEPS = 3, 6
STOPPED = {"steps": SAVED_AT, "schedule_steps": STEPS, "save_every": SAVED_AT}


def gathered(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """All parameters, with experts put together from all ranks."""
    return {
        name: np.concatenate([outcome.parameters[name] for outcome in outcomes])
        if ".w_" in name
        else value
        for name, value in outcomes[0].parameters.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Outcome]]:
    """An uninterrupted run of 4 ranks: its folder, with a checkpoint in the middle, and its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(4, run, small(folder, steps=STEPS, save_every=SAVED_AT))


def resumed(ranks: int, folder: pathlib.Path, saved: pathlib.Path) -> list[Outcome]:
    """Goes on from the checkpoint in the middle of the run in folder `saved`."""
    name = f"step-{SAVED_AT:06d}"
    shutil.copytree(saved / name, folder / name)
    return run_ranks(ranks, run, small(folder, steps=STEPS, resume=True))


def test_resume_equals_the_uninterrupted_run(whole, tmp_path: pathlib.Path) -> None:
    folder, expected = whole
    run_ranks(4, run, small(tmp_path, **STOPPED))
    outcomes = run_ranks(4, run, small(tmp_path, steps=STEPS, resume=True))
    for got, wanted in zip(gathered(outcomes).items(), gathered(expected).items()):
        assert got[0] == wanted[0] and np.array_equal(got[1], wanted[1]), got[0]
    losses = [[record["loss"] for record in read_log(path)] for path in (tmp_path, folder)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_of_4_ranks_goes_on_on_fewer(whole, ranks: int, tmp_path: pathlib.Path) -> None:
    folder, expected = whole
    outcomes = resumed(ranks, tmp_path, folder)
    wanted = [record["loss"] for record in read_log(folder)][SAVED_AT:]
    got = [record["loss"] for record in read_log(tmp_path)]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for name, value in gathered(outcomes).items():
        # Adam turns the rounding of a gradient near zero into a step of any sign.
        np.testing.assert_allclose(value, gathered(expected)[name], atol=2e-3, err_msg=name)


def test_checkpoint_of_1_rank_goes_on_on_4(whole, tmp_path: pathlib.Path) -> None:
    folder, _ = whole
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    run_ranks(1, run, small(tmp_path / "one", **STOPPED))
    resumed(4, tmp_path / "four", tmp_path / "one")
    wanted = [record["loss"] for record in read_log(folder)][SAVED_AT:]
    np.testing.assert_allclose(
        [record["loss"] for record in read_log(tmp_path / "four")], wanted, rtol=1e-5
    )
