"""The choice of experts, and the loss that keeps the choice even."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Routing(NamedTuple):
    """Where tokens go. Differentiable: weights, probabilities."""

    topk_idx: torch.Tensor  # [T, K] int64: experts, best first
    topk_weights: torch.Tensor  # [T, K] float32
    probabilities: torch.Tensor  # [T, E] float32


def route(logits: torch.Tensor, topk: int, *, normalize: bool = True) -> Routing:
    """Chooses the ``topk`` most probable experts of each token.

    Args:
        logits: ``[T, E]`` float32.
        topk: experts per token.
        normalize: whether a token's weights are scaled to sum to 1.
    """
    probabilities = torch.softmax(logits, dim=-1)
    weights, idx = torch.topk(probabilities, topk, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(idx, weights, probabilities)


def expert_load(
    topk_idx: torch.Tensor, num_experts: int, process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """``[E]`` float32: the share of all choices that went to each expert; sums to 1.

    Counted over the ranks of ``process_group``, or over this rank's tokens if that is None.
    """
    counts = torch.zeros(num_experts, dtype=torch.float32, device=topk_idx.device)
    choices = topk_idx.detach().reshape(-1)
    counts = counts.scatter_add(0, choices, torch.ones_like(choices, dtype=torch.float32))
    if process_group is not None:
        dist.all_reduce(counts, group=process_group)
    return counts / counts.sum().clamp(min=1)


def balance_loss(probabilities: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """``E * sum_e load[e] * mean_t probabilities[t, e]``: 1 where all experts are used alike.

    With ``load`` counted over all ranks it is linear in what each rank adds, so the average of the
    ranks' losses (of equally many tokens) is the loss of the whole batch, and the same holds for
    gradients.

    Args:
        probabilities: ``[T, E]`` float32; T = 0 gives 0.
        load: ``[E]``, from `expert_load`; no gradient.
    """
    tokens = max(probabilities.shape[0], 1)
    return probabilities.shape[1] * torch.dot(load, probabilities.sum(dim=0) / tokens)
