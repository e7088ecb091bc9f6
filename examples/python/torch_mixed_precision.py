#!/usr/bin/env python3
"""Trains float32 parameters with products of 16 bits, with DDP, with FSDP2, or with scaled losses.

torchrun --nproc-per-node 4 torch_mixed_precision.py [ddp | fsdp | scaled]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import crossdock.torch as xd

HIDDEN, TOKENS, STEPS = 32, 16, 20


class Model(nn.Module):
    """A layer of experts between two that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.experts = xd.MoELayer(
            HIDDEN, ffn=64, num_experts=8, topk=2, max_tokens_per_rank=TOKENS
        )
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and auxiliary loss."""
        x = self.first(x)
        out = self.experts(x)
        return self.head(x + out.hidden), out.aux_loss


def main() -> None:
    """Learns to turn columns around."""
    way = (sys.argv[1:] or ["ddp"])[0]
    dist.init_process_group()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(
        device_type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "expert")
    )
    comm = xd.init(mesh["expert"])

    torch.manual_seed(1)  # the same everywhere
    model = Model().to(comm.device)
    if way == "fsdp":
        # The router computes in float32, and keeps its parameters so.
        fully_shard(model.experts.router, mesh=mesh["data"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    else:
        model = xd.data_parallel(model, mesh["data"])
    optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=1e-2)
    narrow = torch.float16 if way == "scaled" else torch.bfloat16
    scaler = xd.GradScaler(device_type, init_scale=2.0**10, enabled=way == "scaled")

    torch.manual_seed(2 + dist.get_rank())  # other tokens on every rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, device=comm.device)
        with torch.autocast(device_type, narrow, enabled=way != "fsdp"):
            out, aux_loss = model(x)
        loss = (out.float() - x.flip(-1)).square().mean()
        scaler.scale(loss + aux_loss).backward()
        xd.average_gradients(model)
        scaler.unscale_(optimizer)  # of all ranks, which agree on whether one has overflowed
        xd.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    xd.assert_replicated(model)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    print(
        f"rank {dist.get_rank()}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
