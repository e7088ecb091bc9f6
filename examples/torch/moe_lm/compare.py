"""Whether training over ranks is what one process does: gradients and losses, side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Float32, no dropout: only the order of sums differs between numbers of ranks. Later a choice of
# experts that two numbers of ranks round to different sides makes more of it, so that what is
# promised ends after the first steps.
GRADIENT_TOLERANCE = 1e-5  # |difference| / |gradient|, norms of the largest difference's parameter
LOSS_TOLERANCE = 1e-5  # |difference| / loss ...
FIRST_STEPS = 10  # ... in each of so many steps
FINAL_TOLERANCE = 0.02  # of the mean loss over the last tenth of the steps


@dataclass(frozen=True)
class Agreement:
    """How a run differs from the run it is held against; relative differences."""

    gradient: float  # of the parameter whose gradient of the first step differs most
    parameter: str  # its name
    first_steps: int  # how many are compared
    first_losses: float  # largest in them
    final_loss: float

    @property
    def holds(self) -> bool:
        """Whether each difference is within its tolerance; NaN is not."""
        return (
            self.gradient <= GRADIENT_TOLERANCE
            and self.first_losses <= LOSS_TOLERANCE
            and self.final_loss <= FINAL_TOLERANCE
        )

    def lines(self) -> list[str]:
        """What was compared, for people."""
        rows = (
            ("gradients of the first step", self.gradient, GRADIENT_TOLERANCE),
            (f"loss of each of the first {self.first_steps} steps", self.first_losses,
             LOSS_TOLERANCE),
            ("mean loss of the last tenth", self.final_loss, FINAL_TOLERANCE),
        )
        return [
            f"{what:<36} differ{'s' if what.startswith('mean') else ''} by at most".ljust(56)
            + f"{difference:.1e}  allowed {allowed:.0e}  "
            + ("agrees" if difference <= allowed else "DISAGREES")
            for what, difference, allowed in rows
        ]


def compare(reference: Path, other: Path) -> Agreement:
    """Hold the run in folder ``other`` against that in ``reference``, of equally many steps."""
    parameter, gradient = _gradient_difference(read_gradients(reference), read_gradients(other))
    expected, got = ([record["loss"] for record in read_log(f)] for f in (reference, other))
    if len(expected) != len(got):
        raise ValueError(f"{other}: expected {len(expected)} steps as in {reference}, got {len(got)}")
    first = min(FIRST_STEPS, len(expected))
    tenth = max(len(expected) // 10, 1)
    return Agreement(
        gradient=gradient,
        parameter=parameter,
        first_steps=first,
        first_losses=max(_relative(a, b) for a, b in zip(expected[:first], got[:first])),
        final_loss=_relative(sum(expected[-tenth:]) / tenth, sum(got[-tenth:]) / tenth),
    )


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per step."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of the first step by parameter, those of experts put together from all ranks."""
    ranks = len(list(folder.glob("gradients-*.pt")))
    parts = [torch.load(folder / f"gradients-{rank}.pt") for rank in range(ranks)]
    return {
        name: torch.cat([part[name][1] for part in parts]) if is_expert else gradient
        for name, (is_expert, gradient) in parts[0].items()
    }


def _gradient_difference(
    expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]
) -> tuple[str, float]:
    """The parameter whose gradient differs most, and by how much of its norm."""
    if expected.keys() != got.keys():
        raise ValueError(f"parameters: expected {sorted(expected)}, got {sorted(got)}")
    differences = {
        name: ((got[name] - gradient).norm() / gradient.norm()).item()
        for name, gradient in expected.items()
    }
    worst = max(differences, key=lambda name: (differences[name] != differences[name],
                                               differences[name]))
    return worst, differences[worst]


def _relative(expected: float, got: float) -> float:
    return abs(got - expected) / abs(expected)
