#!/usr/bin/env python3
"""Attention and an MLP whose weights are spread over the ranks, trained beside plain layers.

`torchrun --nproc-per-node 2`, on the CPU or on GPUs.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch import tp

HIDDEN, HEADS, TOKENS, BATCH, STEPS = 64, 8, 32, 2, 10  # TOKENS of all ranks


def attend(*parts: torch.Tensor) -> torch.Tensor:
    """Of ``[tokens, BATCH, heads, columns]``, as many heads as there are."""
    q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    """This rank's tokens ``[tokens, BATCH, HIDDEN]`` in and out."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        sizes = {"max_tokens": max_tokens, "dtype": torch.float32}
        self.attention = tp.TensorParallelAttentionProjections(HIDDEN, HEADS, **sizes)
        self.mlp = tp.SequenceParallelMLP(HIDDEN, 4 * HIDDEN, **sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # This rank's heads, for the tokens of all ranks.
        q, k, v = self.attention.qkv(x)
        x = x + self.attention.out(attend(q, k, v))
        return x + self.mlp(x)


class PlainBlock(nn.Module):
    """The same in one process: it draws the same parameters from the same seed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.linear_in, self.linear_out = (
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (HEADS, 3, HIDDEN // HEADS))
        x = x + self.out(attend(*heads.unbind(-2)).flatten(-2))
        return x + self.linear_out(F.gelu(self.linear_in(x), approximate="tanh"))


def train(
    make: Callable[[], nn.Module], device: torch.device, rank: int, ranks: int
) -> torch.Tensor:
    """This rank's part of the last step's output."""
    torch.manual_seed(0)  # the seed decides, not the number of ranks
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((TOKENS, BATCH, HIDDEN), generator=generator).to(device)
        own = x.chunk(ranks)[rank]
        out = model(own)
        loss = (out - own.flip(-1)).square().sum() / x.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return out.detach()


def main() -> None:
    with xd.init() as comm:
        max_tokens = TOKENS * BATCH // comm.num_ranks
        out = train(lambda: Block(max_tokens), comm.device, comm.rank, comm.num_ranks)
        expected = train(PlainBlock, comm.device, 0, 1).chunk(comm.num_ranks)[comm.rank]
        assert torch.allclose(out, expected, rtol=1e-2, atol=1e-2), (out - expected).abs().max()
        print(f"rank {comm.rank}: {STEPS} steps agree with plain layers", flush=True)


if __name__ == "__main__":
    main()
