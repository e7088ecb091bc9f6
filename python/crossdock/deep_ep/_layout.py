"""The layout of each token's choices per rank and per expert."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock import _core
from crossdock.torch._calls import current_stream, spec

from ._hosts import Hosts


class Layout(NamedTuple):
    """Where the tokens of one rank go. W = ranks, N = hosts, E = experts, T = tokens."""

    num_tokens_per_rank: torch.Tensor  # [W] int32
    num_tokens_per_host: torch.Tensor | None  # [N] int32; None = there is one host
    num_tokens_per_expert: torch.Tensor  # [E] int32
    is_token_in_rank: torch.Tensor  # [T,W] bool


def empty_layout(
    num_tokens: int, num_ranks: int, num_hosts: int, num_experts: int, device: torch.device
) -> Layout:
    """Tensors for `fill_layout`."""

    def numbers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    return Layout(
        numbers(num_ranks),
        numbers(num_hosts) if num_hosts > 1 else None,
        numbers(num_experts),
        torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=device),
    )


def fill_layout(comm: _core.Comm, hosts: Hosts, topk_idx: torch.Tensor, layout: Layout) -> None:
    """Writes `layout`, on the current stream. Nothing waits for the host, or for a peer.

    An expert's second and later mentions in a row, and ids outside 0 .. E - 1, are no choices.

    Args:
        comm: of the ranks that the experts are on.
        hosts: of those ranks.
        topk_idx: [T,K] int64, global experts.
        layout: from `empty_layout`.
    """
    comm.routing_layout(
        {
            "num_experts": layout.num_tokens_per_expert.numel(),
            "topk_idx": spec(topk_idx),
            "rows_per_rank": spec(layout.num_tokens_per_rank),
            "rows_per_expert": spec(layout.num_tokens_per_expert),
            "token_in_rank": spec(layout.is_token_in_rank.view(torch.uint8)),
            "stream": current_stream(topk_idx.device),
        }
    )
    if layout.num_tokens_per_host is not None:
        hosts.count_tokens(layout.is_token_in_rank, layout.num_tokens_per_host)
