"""Even load of experts without a loss: the bias of a router follows what experts were given."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ._replicas import replicas_of
from .moe import MoELayer
from .moe_router import Router

__all__ = ["update_router_bias"]


@torch.no_grad()
def update_router_bias(model: nn.Module, rate: float = 0.001) -> None:
    """Moves each router's bias against the load of its experts since the last call. Collective.

    ``bias += rate * sign(mean load - load)``, as in DeepSeek-V3 (arXiv:2408.15664, algorithm 1).
    Call it once per step, after the optimiser's. Load is that of forward passes in training mode,
    of all ranks and their ``replicas``, so that biases stay equal everywhere.

    Args:
        model: one `MoELayer` or more whose router has a bias.
        rate: how far a bias moves.

    Raises:
        ValueError: no layer of the model has a router with a bias.
        RuntimeError: a communicator of several ranks was made without torch.distributed, and so
            each of them knows its own load only.
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
    for layer in layers:
        comm = layer.group.comm
        if comm.num_ranks > 1 and comm.process_group is None:
            raise RuntimeError(
                "update_router_bias: expected torch.distributed to be initialised before "
                "crossdock.torch.init, as ranks compare their load through it"
            )
    for layer in layers:
        router = layer.router
        assert isinstance(router, Router) and router.bias is not None and router.load is not None
        replicas = replicas_of(model)(layer.group.comm)
        if replicas is not None:
            dist.all_reduce(router.load, group=replicas)
        router.bias.add_(torch.sign(router.load.mean() - router.load), alpha=rate)
        router.load.zero_()
