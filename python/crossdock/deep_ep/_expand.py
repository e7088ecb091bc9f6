"""Received rows by expert: a row for each expert that wants it, from one row per token and back.

N = received rows, K = choices per token, L = experts of this rank, M = rows by expert. Nothing here
waits for a peer, and nothing for the host where M is given.
"""

from __future__ import annotations

import dataclasses

import torch

from ._arguments import topk_idx_t


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Where rows go. Experts' zones follow one another; each begins at a multiple of alignment."""

    slots: torch.Tensor  # [N,K] int64: row by expert of each choice, M where there is none
    sources: torch.Tensor  # [M] int64: received row * K + choice, -1 for padding
    ends: torch.Tensor  # [L] int32: where the rows of each expert end, without padding

    @property
    def num_rows(self) -> int:
        """M."""
        return self.sources.shape[0]


def counts_of(topk_idx: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """[L] int32: choices of each expert in ``topk_idx`` [N,K], where -1 is none."""
    experts = topk_idx.reshape(-1)
    counts = torch.zeros(num_local_experts, dtype=torch.int32, device=topk_idx.device)
    real = experts >= 0
    return counts.scatter_add_(0, experts.masked_fill(~real, 0), real.int())


def expansion_of(
    topk_idx: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int
) -> Expansion:
    """The places of all choices: those of an expert in the order of received rows.

    Args:
        topk_idx: [N,K], local experts, -1 = none.
        counts: [L], from `counts_of`.
        alignment: rows that a zone is padded to a multiple of.
        num_rows: M, at least what is needed.
    """
    local = counts.shape[0]
    aligned = (counts + (alignment - 1)) // alignment * alignment
    starts = torch.cumsum(aligned, 0) - aligned
    experts = topk_idx.reshape(-1)
    experts = torch.where(experts < 0, local, experts)
    order = torch.argsort(experts, stable=True)
    before = torch.cumsum(counts, 0) - counts
    # For choices of no expert, which come last: anything.
    shift = torch.nn.functional.pad(starts - before, (0, 1))[experts[order]]
    place = torch.arange(experts.numel(), device=experts.device) + shift
    place = torch.where(experts[order] == local, num_rows, place)
    slots = torch.empty_like(experts).scatter_(0, order, place)
    # One more, for choices of no expert.
    sources = torch.full((num_rows + 1,), -1, dtype=topk_idx_t, device=experts.device)
    sources.scatter_(0, slots, torch.arange(experts.numel(), device=experts.device))
    ends = (starts + counts).to(torch.int32)
    return Expansion(slots.view(topk_idx.shape), sources[:num_rows], ends)


def expand_rows(expansion: Expansion, rows: torch.Tensor, zero_padding: bool) -> torch.Tensor:
    """[M,...] from received rows [N,...]; padding is zero, or anything."""
    topk = expansion.slots.shape[1]
    if rows.shape[0] == 0:
        return rows.new_zeros(expansion.num_rows, *rows.shape[1:])
    # Types that torch does not index are moved as bytes.
    plain = rows if rows.dtype.is_floating_point and rows.element_size() > 1 else None
    moved = rows.view(torch.uint8) if plain is None else plain
    out = moved.index_select(0, expansion.sources.clamp(min=0) // topk)
    if zero_padding:
        padding = expansion.sources < 0
        out.masked_fill_(padding.view(-1, *[1] * (out.dim() - 1)), 0)
    return out.view(rows.dtype)


def expand_weights(expansion: Expansion, weights: torch.Tensor) -> torch.Tensor:
    """[M] from received weights [N,K]; 0 for padding."""
    flat = torch.nn.functional.pad(weights.reshape(-1), (0, 1))  # also where there is no row
    return torch.where(expansion.sources < 0, 0, flat[expansion.sources.clamp(min=0)])


def collect_weights(expansion: Expansion, weights: torch.Tensor) -> torch.Tensor:
    """[N,K] from weights [M] of rows by expert; 0 where a choice is not here."""
    return torch.nn.functional.pad(weights, (0, 1))[expansion.slots]


def reduce_rows(expansion: Expansion, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N,H] sums of a token's rows [M,H]: float32, by ascending choice, rounded once to `dtype`."""
    total = torch.zeros(
        expansion.slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device
    )
    if expansion.num_rows == 0:
        return total.to(dtype)
    for slot in expansion.slots.unbind(1):
        real = slot < expansion.num_rows
        one = rows.index_select(0, torch.where(real, slot, 0)).float()
        total += one.masked_fill(~real[:, None], 0)  # padding may hold anything
    return total.to(dtype)
