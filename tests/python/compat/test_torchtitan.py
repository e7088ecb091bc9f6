"""torchtitan's layers with Crossdock's token dispatcher, against its all-to-all: equal losses."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support import Rank, on_ranks
from torch_ranks import process_group

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 16, 32, 8, 2, 10


def torchtitan() -> tuple[Any, Any]:
    """Its configurations, and Crossdock's part."""
    # One of its dispatchers, which no test uses, is written in Triton: not for CPUs alone.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep", mock.MagicMock())
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import config_utils

    from crossdock.compat import torchtitan as ours

    set_spmd_backend("default")  # of plain tensors, which these layers are given
    return config_utils, ours


def make_layer(num_ranks: int, rank: int, with_crossdock: bool) -> Any:
    """A router, and the routed experts of this rank: of the same numbers for any dispatcher."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    configs, _ = torchtitan()
    config = configs.make_routed_experts_config(
        dim=HIDDEN,
        hidden_dim=FFN,
        num_experts=EXPERTS,
        top_k=TOPK,
        param_init={},
        comm_backend="standard",
    )
    config.inner_experts.num_experts = EXPERTS // num_ranks
    if with_crossdock:
        line = ("crossdock.compat.torchtitan.use_crossdock", {"max_tokens_per_rank": TOKENS})
        apply_overrides(OverrideConfig(imports=[line]), config)
    layer = torch.nn.ModuleDict(
        {"router": torch.nn.Linear(HIDDEN, EXPERTS, bias=False), "experts": config.build()}
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            shape = (EXPERTS, *parameter.shape[1:])
            drawn = torch.randn(shape, generator=generator) / parameter.shape[-1] ** 0.5
            parameter.copy_(drawn.tensor_split(num_ranks)[rank] if "experts" in name else drawn)
    return layer


def losses(me: Rank, with_crossdock: bool) -> list[float]:
    """Of a few steps, whose last bits differ if anything does."""
    layer = make_layer(me.num_ranks, me.rank, with_crossdock)
    dispatcher = layer["experts"].token_dispatcher
    assert ("Crossdock" in type(dispatcher).__name__) == with_crossdock
    mesh = dist.device_mesh.init_device_mesh("cpu", (me.num_ranks,), mesh_dim_names=("ep",))
    dispatcher.wire_meshes(ep_mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(2 + me.rank)
    found = []
    for _ in range(4):
        x = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator).bfloat16().float()
        scores, ids = layer["router"](x).softmax(-1).topk(TOPK)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        out = layer["experts"](x, scores, ids, counts)
        loss = (out - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name
        dist.all_reduce(layer["router"].weight.grad)
        optimizer.step()
        found.append(loss.item())
    return found


@on_ranks(2)
def test_losses_are_those_of_the_all_to_all_dispatcher(me: Rank) -> None:
    _, ours = torchtitan()
    try:
        with process_group():
            got, expected = losses(me, True), losses(me, False)
        assert got == pytest.approx(expected, rel=1e-4), (got, expected)
    finally:
        for kept in (ours._groups, ours._comms):
            while kept:
                kept.popitem()[1].close()
