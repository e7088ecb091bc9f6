"""One rank's Buffer and batch, for the benchmarks of crossdock.deep_ep."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from crossdock.deep_ep import Buffer, Config

SCALE_BLOCK = 128  # columns of fp8 rows that share a scale


def add_sizes(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Adds the arguments that a `BufferBatch` reads; `tokens` is a default."""
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)


def draws(rank: int, device: torch.device) -> dict[str, Any]:
    """Options by which torch's functions draw a rank's numbers."""
    return {"device": device, "generator": torch.Generator(device).manual_seed(rank)}


def draw_tokens(
    options: argparse.Namespace, made: dict[str, Any], copies: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rows, experts and weights of tokens, as `BufferBatch` has them."""
    shape = options.tokens, options.hidden
    x = [torch.randint(-8, 9, shape, **made).bfloat16() for _ in range(copies)]
    scores = torch.rand(options.tokens, options.experts, **made)
    topk_idx = scores.topk(options.topk, dim=1).indices
    return x, topk_idx, torch.ones(topk_idx.shape, device=made["device"])


class BufferBatch:
    """A Buffer over all ranks of torch's process group, and batches of one routing.

    Args:
        options: with the arguments of `add_sizes`.
        rank: chooses the batch.
        num_sms: multiprocessors of each operation.
        copies: batches of rows.
        buffer_options: of the Buffer.

    Attributes:
        buffer, config, cuda: the Buffer, its multiprocessors, and whether it is on a GPU.
        x: [T,H] bfloat16 each, small integers, of which every sum over ranks is exact.
        fp8: the same as pairs with float32 scales.
        topk_idx, weights: [T,K]: random experts, and ones.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        num_sms: int,
        copies: int = 1,
        **buffer_options: Any,
    ) -> None:
        self.buffer = Buffer(dist.group.WORLD, explicitly_destroy=True, **buffer_options)
        self.options, self.config = options, Config(num_sms)
        device = self.buffer._live().device
        self.cuda = device.type == "cuda"
        made = draws(rank, device)
        self.x, self.topk_idx, self.weights = draw_tokens(options, made, copies)
        scales = options.tokens, options.hidden // SCALE_BLOCK
        self.fp8 = [(one.to(torch.float8_e4m3fn), torch.rand(scales, **made)) for one in self.x]

    def layout(self, tokens: int | None = None) -> dict[str, Any]:
        """Finds the layout of the first tokens; returns it as arguments of `Buffer.dispatch`."""
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.topk_idx[:tokens], self.options.experts
        )
        return {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }

    def dispatch(self, layout: dict[str, Any], tokens: int | None = None) -> Any:
        """A dispatch without a handle of the first tokens."""
        return self.buffer.dispatch(
            self.x[0][:tokens],
            topk_idx=self.topk_idx[:tokens],
            topk_weights=self.weights[:tokens],
            config=self.config,
            **layout,
        )
