"""Ranks that come to a step unlike, and layers on several communicators: right, or told on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crossdock.torch as xd
import test_tp_training as parts
from support import Rank, on_ranks
from test_torch_tools import (
    DRAWN,
    EXPERTS,
    FFN,
    HIDDEN,
    SEED,
    TOKENS,
    TOPK,
    PlainMoE,
    batch,
    compare,
    loss_of,
    make_model,
    two_by_two,
)
from torch_support import where


class Two(nn.Module):
    """Two layers of experts."""

    def __init__(self, make_layers: list[Callable[[], nn.Module]]) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        with DRAWN:
            self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([make() for make in make_layers])
        self.to(where())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def make_two(*comms: xd.Comm) -> Two:
    def layer_on(comm: xd.Comm) -> Callable[[], nn.Module]:
        options = {"max_tokens_per_rank": TOKENS, "aux_loss_weight": 0.0, "dtype": torch.float32}
        return lambda: xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, **options)

    return Two([layer_on(comm) for comm in comms])


def make_plain_two() -> Two:
    def layer() -> nn.Module:
        with DRAWN:
            return PlainMoE(HIDDEN, FFN, EXPERTS, TOPK, aux_loss_weight=0.0)

    return Two([layer, layer])


@on_ranks(4)
def test_experts_of_two_communicators_are_scaled_by_their_own_ranks(me: Rank) -> None:
    """Of pairs of ranks, and of all of them, in either order, with DDP and without."""
    with two_by_two(me) as (mesh, pairs), xd.init(device=where()) as everyone:
        plain = make_plain_two()
        loss_of(plain, batch(0, me.num_ranks).flatten(0, 1)).backward()
        x = batch(0, me.num_ranks)[me.rank]
        for comms in ((pairs, everyone), (everyone, pairs)):
            pairs.replicas = mesh["data"].get_group()
            model = make_two(*comms)
            loss_of(model, x).backward()
            xd.average_gradients(model)
            compare(model, plain, lambda parameter: parameter.grad)
            xd.assert_replicated(model)
            pairs.replicas = None
            wrapped = xd.data_parallel(make_two(*comms), mesh["data"])
            assert everyone.replicas is None
            loss_of(wrapped, x).backward()
            xd.average_gradients(wrapped)
            compare(wrapped, plain, lambda parameter: parameter.grad)


def told_on_all(model: nn.Module, match: str, kind: type[Exception] = RuntimeError) -> None:
    """`average_gradients` raises, and changes nothing."""
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [None if grad is None else xd.local_tensor(grad).clone() for grad in gradients]
    with pytest.raises(kind, match=match):
        xd.average_gradients(model)
    for parameter, gradient in zip(model.parameters(), before):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(xd.local_tensor(parameter.grad), gradient)


@on_ranks(4)
def test_a_parameter_that_one_rank_has_frozen_is_told_on_all(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        comm.replicas = mesh["data"].get_group() if me.num_ranks > 2 else None
        model = make_model(comm)
        x = batch(0, me.num_ranks)[me.rank]
        for rank in range(me.num_ranks):
            loss_of(model, x).backward()
            bias = model.head.bias.requires_grad_(me.rank != rank)
            told_on_all(model, "average_gradients: rank [0-9]: .*head.bias")
            bias.requires_grad_(True)
        model.head.bias.requires_grad_(False)  # on all of them
        xd.average_gradients(model)


@on_ranks(4)
def test_the_mistake_of_one_rank_is_told_on_all(me: Rank) -> None:
    """Peers hear of it instead of waiting."""
    with two_by_two(me) as (mesh, comm):
        comm.replicas = mesh["data"].get_group() if me.num_ranks > 2 else None
        model = make_model(comm)
        loss_of(model, batch(0, me.num_ranks)[me.rank]).backward()
        if me.rank == 1:
            with pytest.raises(TypeError, match="between: expected parameters"):
                xd.average_gradients(model, between=model.head.bias)
        else:
            told_on_all(model, "rank 1: between: expected parameters")
        xd.average_gradients(model)


@on_ranks(2)
def test_a_fused_gradient_beside_another_one_is_refused(me: Rank) -> None:
    with parts.in_distributed(me) as (mesh, comm):
        model = parts.Model(comm, fused_wgrad=True)
        weights = [model.attention.linear_qkv.weight, model.attention.linear_out.weight]
        for weight in weights:
            weight.main_grad = torch.zeros_like(xd.local_tensor(weight.detach()))
        x = parts.own(me, parts.tokens(me.num_ranks))
        loss = model(x).square().mean()
        tied: Any = F.linear(x, xd.local_tensor(weights[0]))
        (loss + tied.square().mean()).backward()
        name = "attention.linear_qkv.weight.grad: expected None, zeros or main_grad itself"
        told_on_all(model, name, ValueError)
        with pytest.raises(ValueError, match=name):
            xd.clip_grad_norm_(model, 1.0)
        kept = weights[0].main_grad.clone()
        weights[0].grad = torch.zeros_like(weights[0])
        xd.average_gradients(model)
        assert torch.equal(weights[0].main_grad, kept / me.num_ranks)
        # An optimiser that reads `grad` is given the same memory.
        main = weights[0].main_grad
        shares = torch.distributed.tensor.DTensor
        weights[0].grad = (
            shares.from_local(main, mesh, weights[0].placements) if me.num_ranks > 1 else main
        )
        xd.clip_grad_norm_(model, 1.0)
