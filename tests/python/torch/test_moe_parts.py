"""MoELayer with parts of the caller's, and with experts of other kinds, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import crossdock.torch as xd
from support import Rank, on_ranks
from torch_support import eager_and_compiled, joined, normal, one_rank_errs, where

HIDDEN, FFN, E, K, TOKENS = 16, 24, 8, 2, 12


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return normal(seed, *shape) / shape[-1] ** 0.5


class ByHash(nn.Module):
    """A router without scores: the experts are a function of the token, the weights are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.75, 0.5], device=where()))

    def forward(self, tokens: torch.Tensor) -> xd.Routing:
        first = (tokens[:, 0] * 1000).long().abs() % E
        idx = torch.stack([first, (first + 3) % E], dim=1)
        idx[:, 1] = idx[:, 1].masked_fill(first == 0, -1)  # some tokens have one expert
        return xd.Routing(idx, self.weight.expand(len(tokens), K).contiguous())


class Biased(nn.Module):
    """Experts of one matrix and a bias, which compute row by row."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(drawn(1, E, HIDDEN, HIDDEN)[first : first + count])
        self.inner = nn.Module()
        self.inner.bias = nn.Parameter(drawn(2, E, HIDDEN)[first : first + count])

    def forward(self, rows: torch.Tensor, plan: xd.Plan) -> torch.Tensor:
        expert = plan.row_experts()[: len(rows)]
        out = xd.grouped_mm(rows, xd.local_tensor(self.matrix), plan.offsets)
        return torch.tanh(out + xd.local_tensor(self.inner.bias)[expert])


def plain(x: torch.Tensor, router: ByHash, matrix: torch.Tensor, bias: torch.Tensor) -> Any:
    routing = router(x)
    out = torch.zeros_like(x)
    for k in range(K):
        real = routing.topk_idx[:, k] >= 0
        expert = routing.topk_idx[:, k].clamp(min=0)
        result = torch.tanh(torch.einsum("th,thm->tm", x, matrix[expert]) + bias[expert])
        out = out + (routing.topk_weights[:, k] * real)[:, None] * result
    return out


def make_layer(comm: Any, **parts: Any) -> xd.MoELayer:
    options: Any = {"max_tokens_per_rank": TOKENS, "dtype": torch.float32}
    return xd.MoELayer(HIDDEN, FFN, E, K, comm=comm, **options, **parts)


@on_ranks(1, 4)
def test_parts_of_the_callers_are_as_in_one_process(me: Rank) -> None:
    with joined() as comm:
        count = E // me.num_ranks
        shared = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, device=where()), nn.Sigmoid())
        for parameter in shared.parameters():
            parameter.detach().copy_(drawn(3, *parameter.shape))
        layer = make_layer(
            comm,
            router=ByHash(),
            experts=Biased(me.rank * count, count),
            shared_experts=shared,
        )
        names = {name for name, p in layer.named_parameters() if p in xd.expert_parameters(layer)}
        assert names == {"experts.matrix", "experts.inner.bias"}
        x, grad = drawn(4, TOKENS, HIDDEN), drawn(5, TOKENS, HIDDEN)
        whole, router = x.clone().requires_grad_(), ByHash()
        matrix = drawn(1, E, HIDDEN, HIDDEN).requires_grad_()
        bias = drawn(2, E, HIDDEN).requires_grad_()
        expected = plain(whole, router, matrix, bias) + shared(whole)
        shared_grads = torch.autograd.grad(expected, list(shared.parameters()), grad, True)
        (plain(whole, router, matrix, bias) + shared(whole)).backward(grad)
        for parameter in shared.parameters():
            parameter.grad = None

        part = x.tensor_split(me.num_ranks)[me.rank].clone().requires_grad_()
        output = layer(part)
        output.hidden.backward(grad.tensor_split(me.num_ranks)[me.rank])
        assert output.aux_loss == 0  # no probabilities
        close(output.hidden, expected.tensor_split(me.num_ranks)[me.rank])
        close(part.grad, whole.grad.tensor_split(me.num_ranks)[me.rank])
        here = slice(layer.first_expert, layer.first_expert + count)
        close(xd.local_tensor(layer.experts.matrix.grad), matrix.grad[here])
        close(xd.local_tensor(layer.experts.inner.bias.grad), bias.grad[here])
        for parameter, wanted in zip(
            (layer.router.weight, *shared.parameters()), (router.weight.grad, *shared_grads)
        ):
            dist.all_reduce(parameter.grad)
            close(parameter.grad, wanted)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) * F.relu(x),
}


@on_ranks(1, 2)
def test_activations_and_biases_are_as_in_one_process(me: Rank) -> None:
    with joined() as comm:
        for number, (name, function) in enumerate(ACTIVATIONS.items()):
            gated, bias = number % 2 == 0, number > 0
            place: Any = {"dtype": torch.float32, "device": where()}
            experts = xd.GroupedExperts(
                E // me.num_ranks, HIDDEN, FFN, activation=name, gated=gated, bias=bias, **place
            )
            layer = make_layer(
                comm,
                router=(router := ByHash()),
                experts=experts,
            )
            weights = {
                "w_in": drawn(1, E, HIDDEN, FFN * (2 if gated else 1)),
                "w_out": drawn(2, E, FFN, HIDDEN),
            }
            if bias:
                weights |= {
                    "b_in": drawn(3, *weights["w_in"].shape[::2]),
                    "b_out": drawn(4, E, HIDDEN),
                }
            # All ranks' experts, as plain tensors: each rank takes its own.
            layer.load_state_dict(
                {f"experts.{key}": value for key, value in weights.items()}, strict=False
            )
            weights = {key: value.clone().requires_grad_() for key, value in weights.items()}
            x = drawn(5, TOKENS, HIDDEN)
            expected = plain_experts(x, router, weights, function, gated)
            expected.sum().backward()
            part = x.tensor_split(me.num_ranks)[me.rank]
            out = layer(part).hidden
            out.sum().backward()
            close(out, expected.tensor_split(me.num_ranks)[me.rank])
            here = slice(layer.first_expert, layer.first_expert + layer.num_local_experts)
            for key, value in weights.items():
                close(xd.local_tensor(getattr(experts, key).grad), value.grad[here])


def plain_experts(x: torch.Tensor, router: ByHash, w: dict, function: Any, gated: bool) -> Any:
    routing = router(x)
    out = torch.zeros_like(x)
    zero = torch.zeros((), device=x.device)
    for token, (ids, factors) in enumerate(zip(routing.topk_idx.tolist(), routing.topk_weights)):
        for expert, factor in zip(ids, factors):
            if expert < 0:
                continue
            inner = x[token] @ w["w_in"][expert] + (w["b_in"][expert] if "b_in" in w else zero)
            if gated:
                inner = function(inner[:FFN]) * inner[FFN:]
            else:
                inner = function(inner)
            result = inner @ w["w_out"][expert] + (w["b_out"][expert] if "b_out" in w else zero)
            out = out.index_add(0, torch.tensor([token], device=x.device), factor * result[None])
    return out


@on_ranks(2)
def test_a_router_that_fails_is_heard_of_by_the_peers(me: Rank) -> None:
    with joined() as comm:
        options: Any = {"comm": comm, "max_tokens_per_rank": TOKENS, "dtype": torch.float32}
        layer = xd.MoELayer(HIDDEN, FFN, E, K, router=ByHash(), **options)
        good = drawn(6, 3, HIDDEN)
        expected = layer(good).hidden

        class Bad(ByHash):
            def forward(self, tokens: torch.Tensor) -> xd.Routing:
                raise KeyError("no such expert")

        class Float(ByHash):
            def forward(self, tokens: torch.Tensor) -> xd.Routing:
                routing = super().forward(tokens)
                return routing._replace(topk_idx=routing.topk_idx.float())

        fine = layer.router
        for router, kind, text in (
            (Bad(), KeyError, "no such expert"),
            (Float(), TypeError, "topk_idx"),
        ):
            if me.rank == 0:
                layer.router = router
            one_rank_errs(me, 0, layer.group, layer, {"x": good}, (kind, text, {}))
            layer.router = fine
            assert torch.equal(layer(good).hidden, expected)
        wrong = nn.Linear(HIDDEN, 3, device=where())
        with pytest.raises(ValueError, match="experts.weight: expected a slice for each of the 4"):
            xd.MoELayer(HIDDEN, FFN, E, K, experts=wrong, **options)
        with pytest.raises(ValueError, match="activation: expected a function or of .* got 'tan'"):
            xd.GroupedExperts(4, HIDDEN, FFN, activation="tan")
        with pytest.raises(ValueError, match="capacity_factor: expected a positive number, got 0"):
            xd.MoELayer(HIDDEN, FFN, E, K, capacity_factor=0, **options)


@on_ranks(2, timeout=120)
def test_all_choices_compile_into_one_graph(me: Rank) -> None:
    with joined() as comm:
        torch.manual_seed(9)
        layer = make_layer(
            comm,
            router=xd.RouterOptions("sigmoid", num_groups=4, topk_groups=2, bias=True),
            experts=xd.GroupedExperts(
                E // me.num_ranks, HIDDEN, FFN, bias=True, dtype=torch.float32
            ),
            shared_experts=1,
            capacity_factor=1.25,
            z_loss_weight=0.1,
        )
        x = drawn(10 + me.rank, TOKENS, HIDDEN)
        pairs = list(
            eager_and_compiled(
                lambda x: layer(x)[:3],
                [layer],
                x,
                lambda found: found[0].square().sum() + found[1],
            )
        )
        for eager, compiled in pairs:
            close(compiled, eager)
        _, _, (load, _), *_ = pairs
        close(layer.router.load, 2 * TOKENS * K * load)
