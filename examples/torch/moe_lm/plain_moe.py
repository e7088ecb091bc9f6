"""The layer without Crossdock: one process holds every expert. The training is compared with it.

Shares no code with ``crossdock.torch.MoELayer``: parameters, draws and outputs are the same.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class PlainMoE(nn.Module):
    """All E experts in one process, one after the other."""

    def __init__(
        self, hidden: int, ffn: int, num_experts: int, topk: int, aux_loss_weight: float
    ) -> None:
        super().__init__()
        self.topk = topk
        self.aux_loss_weight = aux_loss_weight
        seed = int(torch.randint(2**62, ()))

        def drawn(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(rows)

        experts_in, experts_out = [], []
        for expert in range(num_experts):
            generator = torch.Generator().manual_seed(seed + expert)
            experts_in.append(drawn(generator, hidden, 2 * ffn))
            experts_out.append(drawn(generator, ffn, hidden))
        generator = torch.Generator().manual_seed(seed + num_experts)
        self.router = nn.utils.skip_init(nn.Linear, hidden, num_experts, bias=False)
        self.router.weight = nn.Parameter(drawn(generator, hidden, num_experts).t().contiguous())
        self.experts = nn.ParameterDict(
            {"w_in": torch.stack(experts_in), "w_out": torch.stack(experts_out)}
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output like ``x`` ``[..., H]``, auxiliary loss, and load ``[E]`` of the experts."""
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(self.router(tokens), dim=-1)
        weights, chosen = probabilities.topk(self.topk, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)
        rows = []
        pairs = zip(self.experts["w_in"], self.experts["w_out"])
        for expert, (w_in, w_out) in enumerate(pairs):
            token, k = torch.where(chosen == expert)
            gate, up = (tokens[token] @ w_in).chunk(2, dim=-1)
            result = (F.silu(gate) * up) @ w_out
            out = out.index_add(0, token, weights[token, k, None] * result)
            rows.append(token.numel())
        load = torch.tensor(rows, dtype=torch.float32, device=x.device) / chosen.numel()
        aux_loss = len(rows) * torch.dot(load, probabilities.mean(dim=0))
        return out.view_as(x), self.aux_loss_weight * aux_loss, load
