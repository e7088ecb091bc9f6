"""A rank of torchrun: forward and backward through an expert layer; every element is checked."""

from __future__ import annotations

import torch
import torch.distributed as dist

import crossdock.torch as xd
import deep_ep_cases as cases
from crossdock.deep_ep import Buffer
from torch_support import Batch, assert_equal, layer


def main() -> None:
    """Says which host the rank is on."""
    dist.init_process_group("gloo")
    with xd.init(timeout=60) as comm:
        for seed, layout in enumerate(("expert_major", "rank_major")):
            batch = Batch(seed, ((5, 0, 9, 1), 8, 3, 32), layout)
            topk_idx, x, weights, grad_out = batch.local(comm.rank)
            out = layer(batch.group(comm=comm).prepare(topk_idx), x, weights)
            out.backward(grad_out)
            assert x.grad is not None and weights.grad is not None
            got = (out, x.grad, weights.grad)
            for name, mine, wanted in zip(
                ("out", "grad x", "grad w"), got, batch.expected(comm.rank)
            ):
                assert_equal(f"{layout}: {name}", mine, wanted)
        comm.barrier()
        print(f"rank {comm.rank}: host {comm.core.host} of {comm.core.num_hosts}", flush=True)
    deep_ep()
    dist.destroy_process_group()


def deep_ep() -> None:
    """Compares every mode of a Buffer of all ranks with the reference."""
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    cases.everything(buffer, 7)
    cases.worst_case(buffer, 7)
    host = buffer._live().comm.host
    print(f"rank {buffer.rank}: a Buffer on host {host} of {buffer.num_rdma_ranks}", flush=True)
    buffer.destroy()


torch.manual_seed(0)
main()
