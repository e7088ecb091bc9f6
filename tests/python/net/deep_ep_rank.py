"""A rank of torchrun: a Buffer of all ranks, whose every mode is compared with the reference."""

from __future__ import annotations

import torch.distributed as dist

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer


def main() -> None:
    """Says which of how many hosts the rank is on."""
    dist.init_process_group("gloo")
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    cases.everything(buffer, 7)
    cases.worst_case(buffer, 7)
    host = buffer._live().home.comm.host
    print(f"rank {buffer.rank}: host {host} of {buffer.num_rdma_ranks}", flush=True)
    buffer.destroy()
    dist.destroy_process_group()


main()
