"""Whether training over ranks is what one process does: logits, gradients, losses, side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Float32, no dropout: only the order of sums differs between the runs. As long as no token goes to
# another expert, the runs differ by no more. Then two probabilities have been rounded to different
# sides, and each step widens the difference, so less is promised, and of the first steps only. At
# the end the runs are two runs of the same training, as two runs of one process with different
# numbers of threads would be.
SAME_CHOICES_TOLERANCE = 1e-5
SAME_CHOICES_STEPS = 3  # the first ones, or there is nothing that the tolerance above is held to
FIRST_STEPS = 10
OTHER_CHOICES_TOLERANCE = 1e-2
FINAL_TOLERANCE = 0.05  # of the mean loss over the last tenth of the steps

FIRST_STEP = "first-step"  # begins the names of files with logits and gradients of the first step
LOGITS = "logits"  # among the gradients there, which have the names of their parameters


class Parts(NamedTuple):
    """How a tensor's parts lie on ranks: one on each of the first ``ranks``, along ``dim``."""

    dim: int
    ranks: int


class Check(NamedTuple):
    """One comparison of two runs."""

    what: str
    difference: float  # the largest, relative
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.difference <= self.allowed

    def __str__(self) -> str:
        verdict = "agrees" if self.holds else "DISAGREES"
        return f"{verdict:<9} {self.difference:.1e} of {self.allowed:.0e}  {self.what}"


def compare(reference: Path, other: Path) -> list[Check]:
    """Holds the run in folder ``other`` against that in ``reference``, of equally many steps."""
    pairs = list(zip(read_log(reference), read_log(other), strict=True))
    differences = [_relative(expected["loss"], got["loss"]) for expected, got in pairs]
    alike = [expected["load"] == got["load"] for expected, got in pairs]
    same = (alike + [False]).index(False)  # steps until the first choice that differs
    expected, got = read_first_step(reference), read_first_step(other)
    logits = _difference(expected.pop(LOGITS), got.pop(LOGITS))
    parameter, gradient = _gradient_difference(expected, got)
    enough = same >= min(SAME_CHOICES_STEPS, len(pairs))
    tenth = max(len(pairs) // 10, 1)
    final = [sum(pair[run]["loss"] for pair in pairs[-tenth:]) for run in (0, 1)]
    return [
        Check("logits of step 1", logits, SAME_CHOICES_TOLERANCE),
        Check(
            f"gradient of {parameter}",  # the one that differs most
            gradient,
            SAME_CHOICES_TOLERANCE,
        ),
        Check(
            f"losses of the {same} steps of equal choices"
            + ("" if enough else f", expected {SAME_CHOICES_STEPS}"),
            max(differences[:same]) if enough else math.inf,
            SAME_CHOICES_TOLERANCE,
        ),
        Check(
            f"losses of the first {min(FIRST_STEPS, len(pairs))} steps",
            max(differences[:FIRST_STEPS]),
            OTHER_CHOICES_TOLERANCE,
        ),
        Check("mean loss of the last tenth", _relative(*final), FINAL_TOLERANCE),
    ]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per step."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_first_step(folder: Path) -> dict[str, torch.Tensor]:
    """Logits and gradients of the first step by parameter, with all ranks' parts put together."""
    ranks = len(list(folder.glob(f"{FIRST_STEP}-*.pt")))
    files = [torch.load(folder / f"{FIRST_STEP}-{rank}.pt") for rank in range(ranks)]
    return {
        name: torch.cat([file[name][2] for file in files[:count]], dim)
        for name, (dim, count, _) in files[0].items()
    }


def _gradient_difference(
    expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]
) -> tuple[str, float]:
    """The parameter whose gradient differs most, and by how much of its norm."""
    if expected.keys() != got.keys():
        raise ValueError(f"parameters: expected {sorted(expected)}, got {sorted(got)}")
    differences = {name: _difference(gradient, got[name]) for name, gradient in expected.items()}
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return worst, differences[worst]


def _difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """By how much of its norm."""
    return ((got - expected).norm() / expected.norm()).item()


def _relative(expected: float, got: float) -> float:
    return abs(got - expected) / abs(expected)
