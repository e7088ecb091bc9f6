"""The layers of the model that may be spread over ranks, with Crossdock and without."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import crossdock.torch as xd
from crossdock.torch import tp

from .model import Layers
from .plain_moe import PlainMoE
from .settings import Settings


def make_layers(settings: Settings, device: torch.device, comms: contextlib.ExitStack) -> Layers:
    """The layers for this rank; communicators are closed with ``comms``.

    Experts are spread over all ranks. With ``settings.tensor_parallel`` = N ranks ``N * d`` and the
    N - 1 behind it also share attention: each has its own sequences, and in attention some of the
    heads for the sequences of all N.
    """
    s = settings
    if s.plain:
        return Layers(
            _plain_linear,
            _plain_linear,
            lambda: PlainMoE(s.hidden, s.ffn, s.experts, s.topk, s.aux_loss_weight),
        )
    comm = comms.enter_context(xd.init(device=device))
    tokens = max(s.sequences // comm.num_ranks, 1) * s.context
    # One group for all layers: their operations come one after the other.
    group = xd.EpGroup(
        num_experts=s.experts,
        hidden=s.hidden,
        max_topk=s.topk,
        max_tokens_per_rank=tokens,
        dtype=torch.float32,
        # Each layer keeps what went into and out of its experts until its backward pass.
        symmetric_tensors=2 * s.layers + 4,
        wire_formats=(s.combine_wire,),
        comm=comm,
    )

    def experts() -> nn.Module:
        return xd.MoELayer(
            s.hidden,
            s.ffn,
            s.experts,
            s.topk,
            group=group,
            aux_loss_weight=s.aux_loss_weight,
            combine_wire=s.combine_wire,
            global_load=True,  # the loss of one process is that of all ranks' choices
        )

    if s.tensor_parallel == 1:
        return Layers(_plain_linear, _plain_linear, experts)
    mesh = init_device_mesh(
        device.type,
        (comm.num_ranks // s.tensor_parallel, s.tensor_parallel),
        mesh_dim_names=("data", "tensor"),
    )
    heads_comm = comms.enter_context(xd.init(mesh["tensor"], device=device))
    if mesh["data"].size() > 1:
        # The ranks with the same heads, over which average_gradients averages.
        heads_comm.replicas = mesh["data"].get_group()
    options: dict[str, Any] = {
        "bias": False,
        "comm": heads_comm,
        "max_tokens": tokens,
        "dtype": torch.float32,
    }
    return Layers(
        lambda columns, out: tp.ColumnParallelLinear(columns, out, **options),
        lambda columns, out: tp.RowParallelLinear(columns, out, **options),
        experts,
    )


def _plain_linear(columns: int, out: int) -> nn.Module:
    return nn.Linear(columns, out, bias=False)
