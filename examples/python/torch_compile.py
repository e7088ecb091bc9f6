#!/usr/bin/env python3
"""Compiles a block of two mixture-of-experts branches, forward and backward.

torchrun --nproc-per-node 2 torch_compile.py [backend of torch.compile]
"""

import sys

import torch

import crossdock.torch as xd

HIDDEN, TOPK, EXPERTS = 32, 2, 4


def branch(plan: xd.Plan, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Experts that are a mere activation."""
    received = xd.dispatch(plan, x, topk_weights)
    return xd.combine(plan, torch.nn.functional.silu(received.tokens), received.weights)


def block(group: xd.EpGroup, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Two branches that do not need each other's results."""
    weights, idx = logits.softmax(dim=-1).topk(TOPK)
    first = group.prepare(idx)
    left = branch(first, x, weights)
    # No data says which branch comes first: `after` does, so that all ranks agree.
    second = group.prepare((idx + 1) % EXPERTS, after=first)
    return left + branch(second, x, weights)


def main() -> None:
    """Runs the block compiled and not, with gradients, and compares."""
    comm = xd.init()
    group = xd.EpGroup(
        num_experts=EXPERTS,
        max_topk=TOPK,
        max_tokens_per_rank=64,
        hidden=HIDDEN,
        dtype=torch.float32,
    )
    compiled = torch.compile(block, fullgraph=True, backend=(sys.argv[1:] or ["inductor"])[0])

    torch.manual_seed(comm.rank)
    for tokens in (16 + comm.rank, 0 if comm.rank else 5):
        x = torch.randn(tokens, HIDDEN, device=comm.device, requires_grad=True)
        logits = torch.randn(tokens, EXPERTS, device=comm.device, requires_grad=True)
        plain = torch.autograd.grad(block(group, x, logits).sum(), (x, logits))
        fast = torch.autograd.grad(compiled(group, x, logits).sum(), (x, logits))
        torch.testing.assert_close(fast, plain)
    print(f"rank {comm.rank}: gradients agree\n", end="", flush=True)


if __name__ == "__main__":
    main()
