"""What each token's choices mean per rank and per expert, by torch operations alone."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """Where the tokens of one rank go. W = ranks, E = experts, T = tokens."""

    num_tokens_per_rank: torch.Tensor  # [W] int32
    num_tokens_per_expert: torch.Tensor  # [E] int32
    is_token_in_rank: torch.Tensor  # [T,W] bool


def empty_layout(num_tokens: int, num_ranks: int, num_experts: int,
                 device: torch.device) -> Layout:
    """Tensors for `fill_layout`."""
    return Layout(
        torch.empty(num_ranks, dtype=torch.int32, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
        torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=device),
    )


def fill_layout(topk_idx: torch.Tensor, layout: Layout) -> None:
    """Writes `layout`. Ids outside 0 .. E - 1 are no choice. Nothing waits for the host.

    Args:
        topk_idx: [T,K] int64, global experts.
        layout: from `empty_layout`.
    """
    num_experts = layout.num_tokens_per_expert.numel()
    num_tokens, num_ranks = layout.is_token_in_rank.shape
    device = topk_idx.device
    # A bin past the last takes what is no choice. (bincount would wait for the host.)
    expert = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, num_experts)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    ones = torch.ones((), dtype=torch.int32, device=device).expand(expert.numel())
    per_expert.scatter_add_(0, expert.flatten(), ones)
    layout.num_tokens_per_expert.copy_(per_expert[:num_experts])

    rank = expert // (num_experts // num_ranks)
    in_rank = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool, device=device)
    in_rank.scatter_(1, rank, True)
    layout.is_token_in_rank.copy_(in_rank[:, :num_ranks])
    torch.sum(layout.is_token_in_rank, 0, dtype=torch.int32, out=layout.num_tokens_per_rank)
