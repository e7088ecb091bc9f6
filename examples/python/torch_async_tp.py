#!/usr/bin/env python3
"""Products hide the transfers of programs that were written for torch.distributed alone.

`torchrun --nproc-per-node 2`, on the CPU or on GPUs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import crossdock.torch as xd
from crossdock.torch import tp
from crossdock.torch.tp import dtensor

HIDDEN, INNER, TOKENS = 32, 64, 16  # TOKENS of each rank


def spread_by_a_plan(mesh, x: torch.Tensor) -> None:
    """A model that parallelize_module has spread, beside the same model on one rank."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)).to(
        x.device
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)).to(
        x.device
    )
    plan = {
        "0": dtensor.ColwiseParallel(input_layouts=Shard(0), max_tokens=TOKENS),
        "2": dtensor.RowwiseParallel(output_layouts=Shard(0), max_tokens=TOKENS),
    }
    parallelize_module(model, mesh, plan)
    own = x.chunk(mesh.size())[mesh.get_local_rank()]
    expected = plain(x).chunk(mesh.size())[mesh.get_local_rank()]
    torch.testing.assert_close(model(own), expected, rtol=1e-3, atol=1e-3)


def compiled(mesh, x: torch.Tensor) -> None:
    """Collectives and products of a compiled function, which become fused operators."""
    weight = torch.randn(INNER, HIDDEN, device=x.device)
    own = x.chunk(mesh.size())[mesh.get_local_rank()].clone()

    def block(rows: torch.Tensor) -> torch.Tensor:
        rows = funcol.all_gather_tensor(rows, 0, mesh)
        inner = torch.relu(rows @ weight.t())
        return funcol.reduce_scatter_tensor(inner @ weight, "sum", 0, mesh)

    tp.enable_async_tp(mesh)
    got = torch.compile(block, fullgraph=True)(own)
    torch.testing.assert_close(got, block(own), rtol=1e-3, atol=1e-3)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    comm = xd.init()
    mesh = init_device_mesh(comm.device.type, (comm.num_ranks,))
    torch.manual_seed(1)
    x = torch.randn(TOKENS * comm.num_ranks, HIDDEN).to(comm.device)
    spread_by_a_plan(mesh, x)
    compiled(mesh, x)
    print(f"rank {os.environ['RANK']}: a plan and a compiled function as expected", flush=True)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
