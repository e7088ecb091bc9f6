"""torchtitan's layers with Crossdock's token dispatcher, against its all-to-all: equal losses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossdock.compat._groups import Groups
from support import Rank, on_ranks
from torch_ranks import process_group

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

HIDDEN, FFN, EXPERTS, TOPK, TOKENS, STEPS = 16, 32, 8, 2, 10, 4


def torchtitan() -> tuple[Any, Any]:
    """Its configurations, and Crossdock's part."""
    # One of its dispatchers, which no test uses, is written in Triton: not for CPUs alone.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep", mock.MagicMock())
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import config_utils

    from crossdock.compat import torchtitan as ours

    set_spmd_backend("default")  # of plain tensors, which these layers are given
    return config_utils, ours


class Layer(torch.nn.Module):
    """A router, and the routed experts of this rank: of the same numbers for any dispatcher."""

    def __init__(self, me: Rank, backend: str, override: dict[str, Any] | None) -> None:
        super().__init__()
        from torchtitan.config.override import OverrideConfig, apply_overrides

        configs, _ = torchtitan()
        config = configs.make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=FFN,
            num_experts=EXPERTS,
            top_k=TOPK,
            param_init={},
            comm_backend=backend,
            num_max_tokens_per_rank=TOKENS,
        )
        config.inner_experts.num_experts = EXPERTS // me.num_ranks
        if override is not None:
            line = ("crossdock.compat.torchtitan.use_crossdock", override)
            apply_overrides(OverrideConfig(imports=[line]), config)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = config.build()
        generator = torch.Generator("cpu").manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                shape = (EXPERTS, *parameter.shape[1:])
                drawn = torch.randn(shape, generator=generator, device="cpu")
                drawn /= parameter.shape[-1] ** 0.5
                mine = drawn.tensor_split(me.num_ranks)[me.rank]
                parameter.copy_(mine if "experts" in name else drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.router(x).softmax(-1).topk(TOPK)
        return self.experts(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))


def mesh_of(me: Rank) -> Any:
    """The mesh of experts over all ranks, on torch's default device."""
    device = torch.get_default_device().type
    return dist.device_mesh.init_device_mesh(device, (me.num_ranks,), mesh_dim_names=("ep",))


def losses(
    me: Rank, override: dict[str, Any] | None, backend: str = "standard", selective: bool = False
) -> tuple[list[float], torch.Tensor]:
    """Of a few steps, whose last bits differ if anything does, and a result without gradients."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    layer = Layer(me, backend, override)
    dispatcher = layer.experts.token_dispatcher
    assert ("Crossdock" in type(dispatcher).__name__) == (override is not None)
    dispatcher.wire_meshes(ep_mesh=mesh_of(me))
    model = SelectiveAC(SelectiveAC.Config())._wrap_block(layer) if selective else layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    generator = torch.Generator("cpu").manual_seed(2 + me.rank)
    found = []
    for _ in range(STEPS):
        drawn = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator, device="cpu")
        x = drawn.to(torch.get_default_device()).bfloat16().float()
        out = model(x)
        loss = (out - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name
        dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        return found, layer(x)


@contextlib.contextmanager
def crossdock_dispatcher() -> Iterator[Any]:
    """Has a process group, and the module's groups until the end."""
    _, ours = torchtitan()
    with process_group(), mock.patch.object(ours, "_groups", Groups()) as groups:
        try:
            yield ours
        finally:
            groups.close()


@on_ranks(2)
def test_losses_are_those_of_the_all_to_all_dispatcher(me: Rank) -> None:
    with crossdock_dispatcher():
        got, out = losses(me, {"max_tokens_per_rank": TOKENS})
        expected, its_out = losses(me, None)
    assert got == pytest.approx(expected, rel=1e-4), (got, expected)
    assert torch.allclose(out, its_out, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_sizes_come_from_the_config_and_the_group_with_the_meshes(me: Rank) -> None:
    with crossdock_dispatcher() as ours:
        layer = Layer(me, "deepep", {"dtype": "float32"})
        layer.experts.token_dispatcher.wire_meshes(ep_mesh=mesh_of(me))
        (group,) = ours._groups
        assert (group.max_tokens_per_rank, group.hidden, group.dtype) == (
            TOKENS,
            HIDDEN,
            torch.float32,
        )
        layer(torch.randn(1, TOKENS, HIDDEN))
        assert list(ours._groups) == [group]
        for override, problem in (
            ({}, "max_tokens_per_rank: expected a number, .*: give it, or set moe_comm_backend"),
            ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: expected at least 1, got 0"),
            ({"max_tokens_per_rank": 1, "dtype": "f32"}, "dtype: expected the name .* got 'f32'"),
        ):
            with pytest.raises(ValueError, match=problem):
                Layer(me, "standard", override)


@on_ranks(2)
def test_rows_are_padded_as_quantised_experts_need(me: Rank) -> None:
    _, ours = torchtitan()
    from torchtitan.models.common import token_dispatcher as theirs

    sizes = {"num_experts": EXPERTS, "top_k": TOPK}
    config = ours.use_crossdock(
        theirs.TorchAOTokenDispatcher.Config(**sizes, pad_multiple=8), max_tokens_per_rank=TOKENS
    )
    blocks = theirs.HybridEPTokenDispatcher.Config(**sizes, non_blocking_capacity_factor=0.5)
    with pytest.raises(ValueError, match="non_blocking_capacity_factor: expected None, got 0.5"):
        ours.use_crossdock(blocks, max_tokens_per_rank=TOKENS)
    dispatcher = config.build()
    x, ids = torch.ones(TOKENS, HIDDEN), torch.arange(TOPK).expand(TOKENS, TOPK)
    given = (x, torch.ones(TOKENS, TOPK), ids, ids.new_zeros(EXPERTS))
    with pytest.raises(ValueError, match="expert_parallel_degree: expected 2 or more, .* 8 other"):
        dispatcher.dispatch(*given)
    with crossdock_dispatcher():
        dispatcher.wire_meshes(ep_mesh=mesh_of(me))
        rows, counts, metadata = dispatcher.dispatch(*given)
        padded = 24 if me.rank == 0 else 0  # 2 ranks * 10 tokens
        assert counts.tolist() == [padded] * TOPK + [0] * (EXPERTS // 2 - TOPK)
        assert len(rows) == TOPK * padded
        assert torch.equal(dispatcher.combine(rows, metadata, x), TOPK * x)


@on_ranks(2)
def test_selective_checkpointing_repeats_no_operation(me: Rank) -> None:
    override = {"max_tokens_per_rank": TOKENS}
    with crossdock_dispatcher() as ours:
        expected, _ = losses(me, override)
        (group,) = ours._groups
        before = group.stats().calls
        assert before["dispatch"] == STEPS + 1
        assert losses(me, override, selective=True)[0] == expected
        assert group.stats().calls == {name: 2 * calls for name, calls in before.items()}
        from torchtitan.distributed.activation_checkpoint import SelectiveAC

        once = SelectiveAC.get_save_ops
        assert ours._with_ours(once) is once  # as where the module is loaded again


@on_ranks(2)
def test_without_gradients_shapes_may_be_static(me: Rank) -> None:
    """As many rows as can arrive, of which those behind the last expert's are left alone."""
    with crossdock_dispatcher():
        got, out = losses(me, {"max_tokens_per_rank": TOKENS, "cudagraphable": True})
        expected, its_out = losses(me, {"max_tokens_per_rank": TOKENS})
        assert got == expected
        assert torch.equal(out, its_out)
        layer = Layer(me, "deepep", {"cudagraphable": True})
        dispatcher = layer.experts.token_dispatcher
        dispatcher.wire_meshes(ep_mesh=mesh_of(me))
        ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
        ids[:, 1] = 1
        given = (torch.ones(TOKENS, HIDDEN), torch.ones(TOKENS, TOPK), ids, ids.new_zeros(EXPERTS))
        sent = 2 * TOKENS * TOPK if me.rank == 0 else 0
        rows, counts, metadata = dispatcher.dispatch(*given)
        assert (len(rows), counts.sum()) == (sent, sent)
        dispatcher.combine(rows, metadata, given[0])
        with torch.no_grad():
            rows, counts, metadata = dispatcher.dispatch(*given)
            assert (len(rows), counts.sum()) == (2 * TOKENS * TOPK, sent)
            rows[sent:] = torch.nan
            assert torch.equal(dispatcher.combine(rows, metadata, given[0]), TOPK * given[0])
