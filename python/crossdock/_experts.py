"""Which rank holds which experts, as callers say it."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["ranks_of_experts"]


def ranks_of_experts(given: Any, num_experts: int) -> tuple[int, ...] | None:
    """The argument expert_ranks, as numbers.

    Raises:
        TypeError, ValueError: it is no sequence of `num_experts` whole numbers.
    """
    if given is None:
        return None
    try:
        ranks = tuple(operator.index(rank) for rank in given)
    except TypeError:
        raise TypeError(f"expert_ranks: expected a rank for each expert, got {given!r}") from None
    if len(ranks) != num_experts:
        raise ValueError(
            f"expert_ranks: expected the ranks of num_experts = {num_experts} experts, "
            f"got {len(ranks)}"
        )
    return ranks
