#!/usr/bin/env python3
"""Trains a model on a mesh of data times experts, with DDP or FSDP2, and saves it.

torchrun --nproc-per-node 4 torch_mesh.py [ddp | fsdp]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim.swa_utils import AveragedModel

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
    comm = xd.init(mesh["expert"])  # ranks along this axis hold different experts

    torch.manual_seed(1)  # the same everywhere
    model = Model().to(comm.device)
    if way == "ddp":
        model = xd.data_parallel(model, mesh["data"])
    else:
        fully_shard(model, mesh=mesh["data"])
    average = AveragedModel(model.module) if way == "ddp" else None
    optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=1e-2)

    torch.manual_seed(2 + dist.get_rank())  # other tokens on every rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, device=comm.device)
        out, aux_loss = model(x)
        loss = (out - x.flip(-1)).square().mean()
        (loss + aux_loss).backward()
        xd.average_gradients(model)
        xd.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            with implicit_replication():  # of plain tensors, which are equal on all ranks
                average.update_parameters(model.module)
        losses.append(loss.item())
    xd.assert_replicated(model)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    save(folder[0], model, optimizer)
    print(
        f"rank {dist.get_rank()}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; saved\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves with torch's checkpoints and loads it again."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": STEPS}
    dcp.save(state, checkpoint_id=folder)

    # On as many ranks as there are then, wrapped as the model is then:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)  # overwrites tensors in place, and entries of the dict
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert state["step"] == STEPS


if __name__ == "__main__":
    main()
