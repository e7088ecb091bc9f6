#!/usr/bin/env python3
"""Trains one mixture-of-experts layer, data- and expert-parallel.

torchrun --nproc-per-node 2 torch_moe_layer.py
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import crossdock.torch as xd

HIDDEN, TOKENS, STEPS = 32, 64, 40


def main() -> None:
    """Learns to turn columns around."""
    dist.init_process_group()
    comm = xd.init()  # of the ranks of torch.distributed

    # The same seed everywhere, so that what all ranks hold begins equal.
    torch.manual_seed(1)
    layer = xd.MoELayer(HIDDEN, ffn=64, num_experts=8, topk=2, max_tokens_per_rank=TOKENS)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    torch.manual_seed(2 + comm.rank)  # other tokens on every rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, device=comm.device)
        out = layer(x)
        loss = F.mse_loss(out.hidden, x.flip(-1))
        (loss + out.aux_loss).backward()
        xd.average_gradients(layer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if losses[-1] > 0.9 * losses[0]:
        raise SystemExit(f"rank {comm.rank}: learned nothing: {losses[0]:.3f}, {losses[-1]:.3f}")
    print(
        f"rank {comm.rank}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last, busiest "
        f"expert {out.load.max():.0%} of all choices\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
