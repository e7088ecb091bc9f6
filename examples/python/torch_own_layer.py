#!/usr/bin/env python3
"""Trains a layer of one's own, of which ranks hold different experts, and saves it.

torchrun --nproc-per-node 2 torch_own_layer.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import crossdock.torch as xd

HIDDEN, TOPK, EXPERTS, TOKENS, STEPS = 32, 2, 4, 64, 20


class Experts(nn.Module):
    """One matrix for each expert of this rank."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        every = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
        self.matrices = nn.Parameter(every[first : first + count].clone())

    def forward(self, rows: torch.Tensor, plan: xd.Plan) -> torch.Tensor:
        """Of rows that are grouped by expert."""
        return xd.grouped_mm(rows, self.matrices, plan.offsets)


class Block(nn.Module):
    """A router, which is equal on all ranks, and experts, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.group = xd.EpGroup(
            num_experts=EXPERTS,
            max_topk=TOPK,
            max_tokens_per_rank=TOKENS,
            hidden=HIDDEN,
            dtype=torch.float32,
        )
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        comm, count = self.group.comm, self.group.num_local_experts
        self.experts = Experts(comm.rank * count, count)
        self.to(comm.device)
        xd.mark_experts(self.experts, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, HIDDEN]`` to the same."""
        weights, chosen = self.router(x).softmax(dim=-1).topk(TOPK)
        plan = self.group.prepare(chosen)
        received = xd.dispatch(plan, x, weights)
        return xd.combine(plan, self.experts(received.tokens, plan), received.weights)


def main() -> None:
    """Learns to turn columns around."""
    dist.init_process_group()
    comm = xd.init()
    torch.manual_seed(1)  # the same everywhere
    block = Block()
    optimizer = torch.optim.AdamW(xd.parameter_groups(block), lr=1e-2)

    torch.manual_seed(2 + comm.rank)  # other tokens on every rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, device=comm.device)
        loss = (block(x) - x.flip(-1)).square().mean()
        loss.backward()
        xd.average_gradients(block)
        xd.clip_grad_norm_(block, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    xd.assert_replicated(block)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(block, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    print(
        f"rank {comm.rank}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; saved\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
