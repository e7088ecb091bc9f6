"""How a layer's router chooses experts, in words that PyTorch's layer and JAX's share."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

__all__ = ["LEAST_SUM", "RouterOptions", "capacity_of", "capacity_rows"]

# Added to nothing, but the least that a token's scores are divided by: all of them may be 0.
LEAST_SUM = 1e-20

Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """The choice of the K best of E experts by a token's scores.

    A token's score for an expert is the softmax, or the sigmoid, of its logits. It goes to the K
    experts with the largest ``score + bias``, of those groups of experts that come first
    by ``group_score``; the weights of their results are the scores without the bias.

    Mixtral and Qwen3-MoE: the defaults. DeepSeek-V3: sigmoid, normalised, scaled by 2.5, the best 4
    of 8 groups by "top2", with a bias (arXiv:2412.19437, section 2.1.2). DeepSeek-V2: softmax, not
    normalised, scaled, the best groups by "max" (arXiv:2405.04434, section 2.2.2).

    Attributes:
        scores: "softmax" over all experts, or "sigmoid" of each.
        normalize: whether a token's K weights are divided by their sum.
        scale: what weights are multiplied by, after that.
        num_groups: groups of E / num_groups experts that follow one another; 1 = no groups.
        topk_groups: groups that a token's experts may be of.
        group_score: of a group: the sum of its two best, or its best.
        bias: whether experts have a bias that evens out their load in place of a loss
            (arXiv:2408.15664).
    """

    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "top2"
    bias: bool = False

    def __post_init__(self) -> None:
        for name, known in (("scores", ("softmax", "sigmoid")), ("group_score", ("top2", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, got {getattr(self, name)!r}")
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise ValueError(f"scale: expected a positive number, got {self.scale}")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups: expected 1 to num_groups = {self.num_groups}, got {self.topk_groups}"
            )

    def check(self, num_experts: int, topk: int) -> None:
        """Refuses groups that so many experts, or choices of a token, do not fit.

        Raises:
            ValueError: names both numbers.
        """
        size, rest = divmod(num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and self.group_score == "top2" and size < 2):
            least = 2 if self.group_score == "top2" else 1
            raise ValueError(
                f"num_groups: expected equal groups of at least {least} of the {num_experts} "
                f"experts, got {self.num_groups}"
            )
        if not 1 <= topk <= self.topk_groups * size:
            groups = f" of {self.topk_groups} of {self.num_groups} groups"
            raise ValueError(
                f"topk: expected 1 to {self.topk_groups * size}, the experts"
                f"{groups if self.num_groups > 1 else ''}, got {topk}"
            )


def capacity_of(capacity_factor: float, num_tokens: int, topk: int, num_experts: int) -> int:
    """How many of a rank's tokens an expert takes: its even share times the factor, rounded up."""
    # In this order rounding errors cannot make one more of a product that is a whole number.
    return math.ceil(capacity_factor * (num_tokens * topk) / num_experts)


def capacity_rows(
    capacity_factor: float,
    max_tokens_per_rank: int,
    topk: int,
    num_experts: int,
    num_ranks: int,
    alignment: int = 1,
) -> int:
    """Rows that a rank can receive at most, where every rank keeps to that capacity."""
    each = capacity_of(capacity_factor, max_tokens_per_rank, topk, num_experts)
    each = min(each, max_tokens_per_rank)  # a token names an expert once
    zone = -(-(num_ranks * each) // alignment) * alignment
    return num_experts // num_ranks * zone
