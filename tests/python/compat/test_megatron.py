"""Megatron's layers with Crossdock's token dispatcher, against its all-to-all: equal losses."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.errors import InvalidArgument, Mismatch
from support import Rank, on_ranks
from torch_ranks import process_group

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

HIDDEN, EXPERTS, TOPK, TOKENS = 32, 8, 2, 10


class NoStream:
    """Stands for a CUDA stream, and for an event in one, where there is no CUDA."""

    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None: ...


def splits_as_lists(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Does as Megatron's method on a GPU: numbers of rows are the host's."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(value := getattr(dispatcher, name, None), torch.Tensor):
            setattr(dispatcher, name, value.tolist())
    return tokens_per_expert


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Lets Megatron, which expects a GPU, compute on the CPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = NoStream()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    patch.setattr(
        token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", splits_as_lists
    )
    # A name that is not there without TransformerEngine.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)


def make_layer(me: Rank, kind: str, **options: Any) -> Any:
    """One MoE layer: of the same numbers for any dispatcher."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=me.num_ranks,
        moe_token_dispatcher_type=kind,
        use_cpu_initialization=True,
        add_bias_linear=False,
        **options,
    )
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=EXPERTS), config=config)
    local = EXPERTS // me.num_ranks
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            seed, first = sum(map(ord, name)), 0
            if "local_experts" in name:
                number = int(name.split(".local_experts.")[1].split(".")[0])
                first = me.rank * local + number
                seed = sum(map(ord, name.replace(f".{number}.", ".")))
            generator = torch.Generator().manual_seed(1000 * first + seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / HIDDEN**0.5)
    return layer


def losses(me: Rank, kind: str, **options: Any) -> list[float]:
    """Of a few steps, whose last bits differ if anything does."""
    layer = make_layer(me, kind, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(2 + me.rank)
    found = []
    for _ in range(4):
        x = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator)
        out, _ = layer(x)
        loss = (out - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        found.append(loss.item())
    return found


@on_ranks(2)
def test_losses_are_those_of_the_all_to_all_dispatcher(me: Rank) -> None:
    patch = pytest.MonkeyPatch()
    without_cuda(patch)
    # Its fused functions are compiled by torch, which takes long and changes no dispatcher.
    with process_group(), torch._dynamo.config.patch(disable=True):
        try:
            check_losses(me)
        finally:
            patch.undo()


def check_losses(me: Rank) -> None:
    from megatron.core import parallel_state

    from crossdock.compat import megatron

    parallel_state.initialize_model_parallel(expert_model_parallel_size=me.num_ranks)
    try:
        for options in ({}, {"moe_expert_capacity_factor": 0.75}):
            megatron.install(max_tokens_per_rank=TOKENS)
            got = losses(me, "flex", **options)
            megatron.uninstall()
            expected = losses(me, "alltoall", **options)
            assert got == pytest.approx(expected, rel=1e-5), (got, expected, options)
        with pytest.raises(ValueError, match="max_tokens_per_rank: expected at least 1, got 0"):
            megatron.install(0)
    finally:
        megatron.uninstall()
        parallel_state.destroy_model_parallel()


@on_ranks(2)
def test_what_a_dispatcher_would_lose_is_refused_on_all_ranks(me: Rank) -> None:
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    config = SimpleNamespace(moe_router_padding_for_quantization=False, moe_router_dtype=None)
    probs = torch.rand(TOKENS, 2, EXPERTS // 2)
    routing = torch.arange(EXPERTS).roll(me.rank).expand(TOKENS, -1) < TOPK

    def layer() -> Any:
        return megatron.CrossdockManager(dist.group.WORLD, EXPERTS // 2, TOPK, EXPERTS, config)

    def dispatch(manager: Any, x: torch.Tensor, chosen: torch.Tensor = routing) -> torch.Tensor:
        manager.setup_metadata(chosen.view_as(probs), probs)
        return manager.dispatch(x)

    x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).float()
    with process_group():
        # Two micro batches in one layer: on rank 1 alone, as rank 0's second one has its own.
        one, other = layer(), layer()
        dispatch(one, x)
        again, kind, says = other, Mismatch, "rank 1: its call failed"
        if me.rank == 1:
            again, kind, says = one, ValueError, "expected a combine of the earlier dispatch first"
        with pytest.raises(kind, match=says):
            dispatch(again, x)
        # In a layer for each they are right.
        one, other = layer(), layer()
        rows, others = dispatch(one, x), dispatch(other, -x)
        assert torch.equal(one.combine(rows), TOPK * x)
        assert torch.equal(other.combine(others), -TOPK * x)
        # A token of rank 0 has an expert more than the router chooses.
        more = routing.clone()
        more[3, EXPERTS - 1] |= me.rank == 0
        kind, says = InvalidArgument, "2 expert ids .*the lowest rank with some is 0"
        if me.rank == 0:
            kind, says = ValueError, "routing_map: .* router_topk = 2 .* more for 1 of 10 tokens"
        with pytest.raises(kind, match=says):
            dispatch(one, x, more)
        assert torch.equal(one.combine(dispatch(one, x)), TOPK * x)
    megatron.uninstall()
