"""Mixed precision: parameters of one dtype, products of another, as torch's tools ask for it.

The reference is the same model in one process, under ``torch.autocast``: it multiplies the same
bfloat16 operands, and sums the results of a token's experts in float32. Results of other ranks are
rounded to bfloat16 once more, which has 8 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import crossdock.torch as xd
from moe_lm.plain_moe import PlainMoE
from support import Rank, on_ranks
from test_torch_tools import (
    DRAWN,
    EXPERTS,
    FFN,
    HIDDEN,
    SEED,
    TOKENS,
    TOPK,
    Model,
    batch,
    two_by_two,
)
from torch_support import eager_and_compiled, joined, normal, where, whole

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Of a parameter's largest gradient.
BOUND = 0.01


def make_layer(comm: xd.Comm, **options: Any) -> xd.MoELayer:
    torch.manual_seed(SEED)
    options = {"aux_loss_weight": 0.5, "max_tokens_per_rank": TOKENS, "dtype": F32} | options
    return xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, **options)


def run(
    layer: xd.MoELayer, x: torch.Tensor, autocast: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Results and gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(where().type, autocast or BF16, enabled=autocast is not None):
        out = layer(x)
    (out.hidden.float().square().sum() + out.aux_loss).backward()
    gradients = [xd.local_tensor(p.grad) for p in layer.parameters()]
    return [out.hidden.detach(), out.aux_loss.detach(), out.load, x.grad, *gradients]


@on_ranks(1, 2)
def test_wide_parameters_are_cast_where_they_are_used(me: Rank) -> None:
    """As if they had been cast before, with gradients of their own dtype."""
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    with joined() as comm:
        for dtype in (BF16, F16):
            wide = make_layer(comm, dtype=dtype, param_dtype=F32, shared_experts=1)
            narrow = make_layer(comm, dtype=dtype, shared_experts=1)
            for name, parameter in wide.named_parameters():
                assert parameter.dtype == F32, name
                narrow.get_parameter(name).detach().copy_(parameter.detach())
            assert wide.param_dtype == F32 and wide.group.dtype == dtype
            for got, wanted in zip(run(wide, x), run(narrow, x), strict=True):
                # The gradient of the narrow one is what the wide one's was before it was cast.
                assert torch.equal(got, wanted.to(got.dtype))
            assert all(p.grad.dtype == F32 for p in wide.parameters())


@on_ranks(1, 2)
def test_autocast_is_obeyed_as_by_linear_layers(me: Rank) -> None:
    """Rows travel and are multiplied in its dtype; the router, and the losses, are float32."""
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    with joined() as comm:
        layer = make_layer(comm, shared_experts=1)
        seen: list[torch.dtype] = []
        layer.experts.register_forward_hook(
            lambda module, given, out: seen.extend((given[0].dtype, out.dtype))
        )
        for dtype in (BF16, F16):
            seen.clear()
            wide = make_layer(comm, dtype=dtype, param_dtype=F32, shared_experts=1)
            got, wanted = run(layer, x, dtype), run(wide, x)
            assert seen == [dtype, dtype]
            assert got[0].dtype == dtype and wanted[0].dtype == F32
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one.float(), other)
        seen.clear()
        run(layer, x)
        assert seen == [F32, F32]


@on_ranks(2, timeout=120)
def test_autocast_compiles_into_one_graph(me: Rank) -> None:
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    with joined() as comm:
        layer, kind = make_layer(comm), where().type

        def under(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast(kind, BF16):
                return tuple(layer(x)[:2])

        pairs = eager_and_compiled(
            under, [layer], x, lambda found: found[0].float().square().sum() + found[1]
        )
        for eager, compiled in pairs:
            assert eager.dtype == compiled.dtype
            torch.testing.assert_close(
                compiled, eager, rtol=BOUND, atol=BOUND * eager.abs().max().item()
            )


@on_ranks(2)
def test_parts_of_the_callers_see_autocast(me: Rank) -> None:
    """Their own linear layers do what they do elsewhere."""
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    seen: dict[str, torch.dtype] = {}

    class Experts(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.matrix = nn.Parameter(normal(SEED, count, HIDDEN, HIDDEN))

        def forward(self, rows: torch.Tensor, plan: xd.Plan) -> torch.Tensor:
            out = xd.grouped_mm(rows, self.matrix, plan.offsets)
            seen["experts"] = out.dtype
            return out

    class Chooser(nn.Linear):
        def forward(self, tokens: torch.Tensor) -> xd.Routing:
            logits = super().forward(tokens)
            seen["router"] = logits.dtype
            return xd.route(logits, TOPK)

    with joined() as comm:
        shared = nn.Linear(HIDDEN, HIDDEN, device=where())
        layer = make_layer(
            comm,
            router=Chooser(HIDDEN, EXPERTS, device=where()),
            experts=Experts(EXPERTS // me.num_ranks),
            shared_experts=shared,
        )
        for dtype in (BF16, F32):
            with torch.autocast(where().type, BF16, enabled=dtype == BF16):
                out = layer(x)
            assert out.hidden.dtype == dtype and out.aux_loss.dtype == F32
            assert seen == {"experts": dtype, "router": dtype}


@on_ranks(2)
def test_the_dtype_of_parameters_says_that_of_products(me: Rank) -> None:
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    with joined() as comm:
        narrow = make_layer(comm, dtype=BF16)
        layer = make_layer(comm)
        for name, parameter in layer.experts.named_parameters():
            narrow.experts.get_parameter(name).detach().copy_(parameter.detach())
        layer.experts.to(BF16)
        assert torch.equal(layer(x).hidden, narrow(x).hidden)
        narrow.experts.float()  # wider than what the group carries: parameters alone
        layer.experts.float()
        assert torch.equal(narrow(x).hidden, run(layer, x, BF16)[0].float())
        layer.double()
        with pytest.raises(TypeError, match="experts.w_in: expected one of .*, got torch.float64"):
            layer(x)
        with pytest.raises(TypeError, match="param_dtype: expected one of .*, got torch.int8"):
            make_layer(comm, param_dtype=torch.int8)
        text = "param_dtype: expected None or torch.float32, which the parameters of shared_experts"
        with pytest.raises(ValueError, match=text):
            make_layer(comm, param_dtype=BF16, shared_experts=nn.Linear(2, 2))


@on_ranks(2)
def test_fp8_experts_have_wide_parameters(me: Rank) -> None:
    x = normal(SEED + 1 + me.rank, TOKENS, HIDDEN)
    with joined() as comm:
        layers = []
        for dtype in (BF16, F32):
            experts = xd.GroupedExperts(
                EXPERTS // me.num_ranks, HIDDEN, 32, fp8=True, dtype=dtype, device=where()
            )
            layers.append(make_layer(comm, dtype=BF16, experts=experts))
        narrow, wide = layers
        for name, parameter in narrow.experts.named_parameters():
            wide.experts.get_parameter(name).detach().copy_(parameter.detach())
        assert torch.equal(narrow(x).hidden, wide(x).hidden)


# ---- Recipes -------------------------------------------------------------------------------------


def make_model(comm: xd.Comm, **options: Any) -> Model:
    options = {"aux_loss_weight": 0.0, "max_tokens_per_rank": TOKENS, "dtype": F32} | options
    return Model(lambda: xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, **options))


def make_plain() -> Model:
    def experts() -> nn.Module:
        with DRAWN:
            return PlainMoE(HIDDEN, FFN, EXPERTS, TOPK, aux_loss_weight=0.0)

    return Model(experts)


class InAutocast(nn.Module):
    """`PlainMoE`'s result, with products in bfloat16, and a router and sums in float32."""

    def __init__(self, plain: PlainMoE) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain, tokens = self.plain, x.flatten(0, -2)
        with torch.autocast(where().type, enabled=False):
            probabilities = torch.softmax(plain.router(tokens.float()), dim=-1)
        weights, chosen = probabilities.topk(plain.topk, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        rows = tokens.to(BF16)
        out = torch.zeros_like(tokens, dtype=F32)
        for expert in range(EXPERTS):
            token, k = torch.where(chosen == expert)
            w_in, w_out = (plain.experts[name][expert].to(BF16) for name in ("w_in", "w_out"))
            gate, up = (rows[token] @ w_in).chunk(2, dim=-1)
            result = (nn.functional.silu(gate) * up) @ w_out
            out = out.index_add(0, token, weights[token, k, None] * result.float())
        return (out.to(x.dtype).view_as(x),)


def plain_gradients(me: Rank) -> dict[str, torch.Tensor]:
    """Of one process with all ranks' tokens, under autocast."""
    plain = make_plain()
    names = dict(plain.named_parameters())
    plain.experts = InAutocast(plain.experts)
    with torch.autocast(where().type, BF16):
        loss = loss_of(plain, batch(0, me.num_ranks).flatten(0, 1))
    loss.backward()
    return {name: parameter.grad for name, parameter in names.items()}


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def policy() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


def by_ddp(comm: xd.Comm, mesh: Any) -> nn.Module:
    return xd.data_parallel(make_model(comm), mesh["data"])


def by_ddp_with_wide_parameters(comm: xd.Comm, mesh: Any) -> nn.Module:
    return xd.data_parallel(make_model(comm, dtype=BF16, param_dtype=F32), mesh["data"])


def by_fsdp(comm: xd.Comm, mesh: Any, **options: Any) -> nn.Module:
    model = make_model(comm, **options)
    # The router computes in float32, of parameters that are no narrower.
    fully_shard(model.experts.router, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy())


def by_fsdp_with_wide_parameters(comm: xd.Comm, mesh: Any) -> nn.Module:
    return by_fsdp(comm, mesh, dtype=BF16, param_dtype=F32)


RECIPES: list[tuple[Callable[[xd.Comm, Any], nn.Module], bool]] = [
    (by_ddp, True),
    (by_ddp_with_wide_parameters, True),
    (by_fsdp, False),
    (by_fsdp_with_wide_parameters, False),
]


@on_ranks(2, 4)
def test_recipes_have_gradients_of_one_process(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        wanted = plain_gradients(me)
        for make, autocast in RECIPES:
            model = make(comm, mesh)
            sent: list[torch.dtype] = []
            experts = (model.module if autocast else model).experts.experts
            experts.register_forward_hook(lambda module, given, out: sent.append(given[0].dtype))
            with torch.autocast(where().type, BF16, enabled=autocast):
                loss = loss_of(model, batch(0, me.num_ranks)[me.rank])
            loss.backward()
            xd.average_gradients(model)
            assert sent == [BF16], make
            worst = {}
            for name, parameter in model.named_parameters():
                got, expected = whole(parameter.grad), wanted[name.removeprefix("module.")]
                assert parameter.dtype == got.dtype == F32, name
                worst[name] = ((got - expected).abs().max() / expected.abs().max()).item()
            assert max(worst.values()) < BOUND, (make, worst)
            xd.clip_grad_norm_(model, 1.0)
            torch.optim.AdamW(xd.parameter_groups(model), lr=0.01).step()
            xd.assert_replicated(model)


# ---- Scaled losses -------------------------------------------------------------------------------


def scaled_step(
    model: nn.Module,
    scaler: xd.GradScaler,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    spoil: Callable[[nn.Module], None] = lambda model: None,
    unscale: bool = True,
) -> None:
    optimizer.zero_grad()
    with torch.autocast(where().type, F16):
        loss = loss_of(model, x)
    scaler.scale(loss).backward()
    spoil(model)
    xd.average_gradients(model)
    if unscale:
        scaler.unscale_(optimizer)
        xd.clip_grad_norm_(model, 100.0)
    scaler.step(optimizer)
    scaler.update()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [xd.local_tensor(p.detach()).clone() for p in model.parameters()]


@on_ranks(2)
def test_scaled_losses_give_the_steps_of_unscaled_ones(me: Rank) -> None:
    x = batch(0, me.num_ranks)[me.rank]
    with joined() as comm:
        for options in ({}, {"foreach": True}, {"fused": True}):
            for unscale in (True, False):
                results = []
                for scale in (1.0, 256.0):  # float16 has the same digits of both
                    model = make_model(comm)
                    groups = xd.parameter_groups(model)
                    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-2, **options)
                    scaler = xd.GradScaler(where().type, init_scale=scale)
                    scaled_step(model, scaler, optimizer, x, unscale=unscale)
                    results.append(values_of(model))
                    assert scaler.get_scale() == scale
                before = values_of(make_model(comm))
                for got, wanted, old in zip(*results, before, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
                    assert not torch.equal(got, old)


@on_ranks(2)
def test_torchs_own_scaler_is_not_silently_wrong(me: Rank) -> None:
    with joined() as comm:
        model = make_model(comm)
        optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=0.01)
        scaler = torch.amp.GradScaler(where().type, init_scale=4.0)
        scaler.scale(loss_of(model, batch(0, me.num_ranks)[me.rank])).backward()
        xd.average_gradients(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            scaler.unscale_(optimizer)


@on_ranks(4)
def test_an_overflow_of_one_ranks_experts_is_one_of_all(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        x = batch(0, me.num_ranks)[me.rank]
        for sharded in (False, True):
            for holder in range(me.num_ranks):
                model = make_model(comm)
                if sharded:
                    fully_shard(model, mesh=mesh["data"])

                def spoil(model: nn.Module, holder: int = holder) -> None:
                    if me.rank == holder:
                        xd.local_tensor(model.experts.experts.w_out.grad)[0, 0, 0] = torch.inf

                optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=0.01)
                scaler = xd.GradScaler(where().type, init_scale=256.0)
                before = values_of(model)
                scaled_step(model, scaler, optimizer, x, spoil)
                # Without a wrapper the other half of the ranks has a model of its own.
                told = sharded or me.rank // 2 == holder // 2
                skipped = all(map(torch.equal, before, values_of(model)))
                assert skipped == told, (holder, sharded)
                assert scaler.get_scale() == (128.0 if told else 256.0)


@on_ranks(2)
def test_a_rank_without_gradients_takes_part(me: Rank) -> None:
    with joined() as comm:
        layer = make_layer(comm)
        optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.1)
        scaler = xd.GradScaler(where().type, init_scale=4.0)
        scaler.scale(torch.ones((), device=where()))
        if me.rank == 0:
            for parameter in layer.experts.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        twin = copy.deepcopy(scaler.state_dict())
        assert torch.amp.GradScaler(where().type).state_dict().keys() == twin.keys()
