#!/usr/bin/env python3
"""Tokens to experts and back with PyTorch, forward and backward.

torchrun --nproc-per-node 2 torch_round_trip.py
"""

import torch

import crossdock.torch as xd

HIDDEN, TOPK, EXPERTS = 32, 2, 4


def main() -> None:
    """One step of a mixture-of-experts layer, and the same computed without ranks."""
    comm = xd.init()  # this rank's GPU, or the CPU where there is none

    # Every rank makes all matrices, and keeps those of its own experts.
    torch.manual_seed(1)
    all_experts = torch.randn(EXPERTS, HIDDEN, HIDDEN).to(comm.device)
    local = EXPERTS // comm.num_ranks
    experts = all_experts[comm.rank * local :][:local].clone().requires_grad_()

    # Its tokens are its own, also in number.
    torch.manual_seed(2 + comm.rank)
    tokens = torch.randn(20 + comm.rank, HIDDEN, device=comm.device, requires_grad=True)
    logits = torch.randn(len(tokens), EXPERTS, device=comm.device, requires_grad=True)
    topk_weights, topk_idx = logits.softmax(dim=-1).topk(TOPK)

    group = xd.EpGroup(
        num_experts=EXPERTS,
        max_topk=TOPK,
        max_tokens_per_rank=64,
        hidden=HIDDEN,
        dtype=torch.float32,
    )
    plan = group.prepare(topk_idx)
    received = xd.dispatch(plan, tokens, topk_weights)
    expert_out = xd.grouped_mm(received.tokens, experts, plan.offsets)
    out = xd.combine(plan, expert_out, received.weights)
    out.square().sum().backward()

    expected = tokens.detach()[:, None, None, :] @ all_experts[topk_idx]
    expected = (expected.squeeze(2) * topk_weights.detach()[..., None]).sum(dim=1)
    torch.testing.assert_close(out.detach(), expected)
    group.check()  # on a GPU operations tell their errors here
    print(
        f"rank {comm.rank}: {int(plan.total)} of {group.rows} rows used, sums as expected, "
        f"gradients of {tokens.grad.norm():.1f} and {logits.grad.norm():.1f}\n",
        end="",
        flush=True,
    )


if __name__ == "__main__":
    main()
