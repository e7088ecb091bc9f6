"""Even load of experts without a loss: the bias of a router follows what experts were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._comm import Comm
from .._replicas import replicas_of
from .layer import MoELayer
from .router import Router

__all__ = ["update_router_bias"]


@torch.no_grad()
def update_router_bias(model: nn.Module, rate: float = 0.001) -> None:
    """Moves each router's bias against the load of its experts since the last call. Collective.

    ``bias += rate * sign(mean load - load)``, as in DeepSeek-V3 (arXiv:2408.15664, algorithm 1).
    Call it once per step, after the optimiser's, on all ranks. Forward passes in training mode
    count the choices of their rank; here the counts of all ranks and their ``replicas`` are added
    up, those of all layers of a communicator at once, so that biases stay equal everywhere. Ranks
    exchange them by `Comm.all_gather`, for which the host waits, and only replicas by
    torch.distributed.

    Args:
        model: one `MoELayer` or more whose router has a bias.
        rate: how far a bias moves.

    Raises:
        ValueError: no layer of the model has a router with a bias.
        PeerLost, Timeout, Mismatch: as of `Comm.all_gather`, where a rank has ended, does not come,
            or has other layers. Biases and counts of that communicator's layers stay as they were.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, MoELayer)
        and isinstance(layer.router, Router)
        and layer.router.load is not None
    ]
    if not layers:
        raise ValueError("model: expected a MoELayer with RouterOptions(bias=True), got none")
    replicas = replicas_of(model)
    for comm in dict.fromkeys(layer.group.comm for layer in layers):
        _move([layer.router for layer in layers if layer.group.comm is comm], comm, replicas, rate)


def _move(
    routers: list[Any],
    comm: Comm,
    replicas: Callable[[Comm], dist.ProcessGroup | None],
    rate: float,
) -> None:
    """Moves the biases of a communicator's layers."""
    counts = torch.cat([router.load for router in routers])
    if comm.num_ranks > 1:
        parts = comm.all_gather(counts.double().cpu().numpy().tobytes())
        total = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float64)
        counts.copy_(total.view(comm.num_ranks, -1).sum(0))
    if (group := replicas(comm)) is not None:
        dist.all_reduce(counts, group=group)
    for router, load in zip(routers, counts.split([len(router.load) for router in routers])):
        router.bias.add_(torch.sign(load.mean() - load), alpha=rate)
        router.load.zero_()
