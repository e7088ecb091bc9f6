"""The results that a Buffer must give, which share no code with it (reference.py), and batches.

Every rank makes the tensors of all ranks, so it can say by itself what it must receive.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

import spread
from reference import Routing, Row


@dataclasses.dataclass
class Batch:
    """One batch of all ranks; lists are by rank."""

    num_experts: int
    topk_idx: list[torch.Tensor]  # [T,K] int64
    topk_weights: list[torch.Tensor]  # [T,K] float32
    x: list[torch.Tensor]  # [T,H]

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    @functools.cached_property
    def routing(self) -> Routing:
        """The routing by rank, of the indices when it is first asked for."""
        return Routing([idx.numpy() for idx in self.topk_idx], self.num_experts, "rank_major")

    def ranks_of(self, source: int, token: int) -> list[int]:
        """Where a token goes, ascending."""
        return self.routing.goes(source)[token].nonzero()[0].tolist()

    def rows(self, rank: int) -> list[Row]:
        """The rows that `rank` receives, in order."""
        return self.routing.rows(rank)

    def received(self, rank: int, per_token: list[torch.Tensor]) -> torch.Tensor:
        """Rows of `per_token` (by rank, a row per token) as `rank` receives them."""
        rows = [per_token[row.source][row.token] for row in self.rows(rank)]
        return torch.stack(rows) if rows else per_token[rank][:0].contiguous()

    def received_topk(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Local experts, -1 elsewhere, and weights, 0 elsewhere."""
        weights = [one.numpy() for one in self.topk_weights]
        return (
            torch.from_numpy(self.routing.recv_topk_idx(rank)),
            torch.from_numpy(self.routing.dispatch_weights(rank, weights)),
        )

    def per_expert(self, rank: int, alignment: int) -> list[int]:
        """Choices per expert of `rank`, rounded up."""
        return [-(-count // alignment) * alignment for count in self.routing.counts(rank)]

    def prefix(self) -> torch.Tensor:
        """[W,W]: rows of each destination from sources up to the line's."""
        return torch.from_numpy(self.routing.rank_rows().cumsum(0)).int()

    def per_host(self, rank: int) -> torch.Tensor | None:
        """Tokens that go to each host, each counted once; None with one host."""
        host_of = spread.hosts(self.num_ranks)
        counts = torch.zeros(len(set(host_of)), dtype=torch.int32)
        for token in range(len(self.x[rank])):
            for host in {host_of[peer] for peer in self.ranks_of(rank, token)}:
                counts[host] += 1
        return counts if len(counts) > 1 else None

    def layout(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens per rank and per expert, and whether a token goes to a rank."""
        in_rank = torch.from_numpy(self.routing.goes(rank))
        per_rank = in_rank.sum(0, dtype=torch.int32)
        counts = [int((self.topk_idx[rank] == e).sum()) for e in range(self.num_experts)]
        return per_rank, torch.tensor(counts, dtype=torch.int32), in_rank

    def combined(
        self, rank: int, outputs: list[torch.Tensor], bias: tuple[torch.Tensor, ...] = ()
    ) -> torch.Tensor:
        """Sums in float32 by ascending rank, then the biases' sum; rounded once.

        With several hosts: sums of each host by ascending rank, rounded to the type in which rows
        travel; then by ascending host.
        """
        dtype = outputs[rank].dtype
        travels = torch.float32 if bias else dtype
        host_of = spread.hosts(self.num_ranks)
        sums = [torch.zeros(len(self.x[rank]), outputs[rank].shape[1]) for _ in set(host_of)]
        for peer in range(self.num_ranks):
            for number, row in enumerate(self.rows(peer)):
                if row.source == rank:
                    sums[host_of[peer]][row.token] += outputs[peer][number].float()
        total = sums[0]
        if len(sums) > 1:
            total = torch.zeros_like(total)
            for one in sums:
                total += one.to(travels).float()
        if bias:
            total += torch.stack([one.float() for one in bias]).sum(0)
        return total.to(dtype)


def make_batch(
    seed: int,
    num_ranks: int,
    tokens: list[int] | int = 17,
    hidden: int = 64,
    topk: int = 3,
    local_experts: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """A random batch. About one choice in eight is none; rows are random bits of few magnitudes.

    Args:
        tokens: per rank, or of every rank a number near it, the last rank of several having none.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(tokens, int):
        tokens = [max(0, tokens - 5 * rank) for rank in range(num_ranks)]
        if num_ranks > 1:
            tokens[-1] = 0
    experts = num_ranks * local_experts
    batch = Batch(experts, [], [], [])
    for count in tokens:
        scores = torch.rand(count, experts, generator=generator)
        ids = scores.topk(min(topk, experts), dim=1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.125] = -1
        batch.topk_idx.append(ids)
        batch.topk_weights.append(torch.rand(ids.shape, generator=generator))
        batch.x.append(torch.randn(count, hidden, generator=generator).to(dtype))
    return batch


def expert_outputs(seed: int, batch: Batch, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The experts' outputs on every rank; None = of the rows' own type."""
    generator = torch.Generator().manual_seed(seed + 1000)
    hidden, dtype = batch.x[0].shape[1], dtype or batch.x[0].dtype
    return [
        torch.randn(len(batch.rows(rank)), hidden, generator=generator).to(dtype)
        for rank in range(batch.num_ranks)
    ]


def make_bias(
    seed: int, batch: Batch, rank: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two biases for the tokens of `rank`."""
    generator = torch.Generator().manual_seed(seed + 2000 + rank)
    shape, dtype = batch.x[rank].shape, dtype or batch.x[rank].dtype
    return (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
    )
