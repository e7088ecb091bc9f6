"""The language model: a decoder of attention and mixture-of-experts blocks over bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256


class Layers(NamedTuple):
    """The makers of the layers that may be spread over ranks: see layers.py."""

    # (columns in, columns out): before attention, whose heads may be spread, and behind it
    to_heads: Callable[[int, int], nn.Module]
    from_heads: Callable[[int, int], nn.Module]
    experts: Callable[[], nn.Module]


class Prediction(NamedTuple):
    """The model's predictions for a batch."""

    logits: torch.Tensor  # [sequences, context, 256]
    aux_loss: torch.Tensor  # [], summed over layers
    load: torch.Tensor  # [layers, E]


class Attention(nn.Module):
    """Causal self-attention with rotary positions, which reads each token with the three before.

    That short convolution lets the first steps learn which bytes follow each other.
    """

    def __init__(self, hidden: int, heads: int, layers: Layers) -> None:
        super().__init__()
        self.columns = hidden // heads
        self.near = nn.Parameter(torch.zeros(hidden, 1, 4))
        self.qkv = layers.to_heads(hidden, 3 * hidden)
        self.out = layers.from_heads(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[sequences, context, hidden]`` to the same."""
        before = F.pad(x.transpose(1, 2), (3, 0))
        x = x + F.conv1d(before, self.near, groups=x.shape[2]).transpose(1, 2)
        # Columns of a head lie together, so that heads can be dealt out: from here to `out` these
        # are some of the heads, and the sequences of all ranks that share them.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.columns)).unbind(-2)
        q, k, v = _rotate(q.transpose(1, 2)), _rotate(k.transpose(1, 2)), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(-2))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """``[..., context, columns]``: each pair of columns turned by its position."""
    context, half = x.shape[-2], x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(context, device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention, then experts, each added to what it read."""

    def __init__(self, hidden: int, heads: int, layers: Layers) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(hidden, bias=False)
        self.attention = Attention(hidden, heads, layers)
        self.before_experts = nn.LayerNorm(hidden, bias=False)
        self.experts = layers.experts()
        with torch.no_grad():  # so that a block changes little at first
            self.attention.out.weight.mul_(0.1)
            self.experts.experts.w_out.mul_(0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, auxiliary loss, load of the experts."""
        x = x + self.attention(self.before_attention(x))
        out, aux_loss, load = self.experts(self.before_experts(x))[:3]
        return x + out, aux_loss, load


class LanguageModel(nn.Module):
    """Predicts each next byte."""

    def __init__(self, hidden: int, heads: int, blocks: int, layers: Layers) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(hidden, heads, layers) for _ in range(blocks))
        self.before_output = nn.LayerNorm(hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> Prediction:
        """``inputs``: bytes, ``[sequences, context]`` int64; no sequences is fine."""
        x = self.embedding(inputs)
        aux_losses, loads = [], []
        for block in self.blocks:
            x, aux_loss, load = block(x)
            aux_losses.append(aux_loss)
            loads.append(load)
        logits = F.linear(self.before_output(x), self.embedding.weight)
        return Prediction(logits, torch.stack(aux_losses).sum(), torch.stack(loads))
