"""MoELayer with combine_wire: sums cross in that form, and gradients are those without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import Mismatch
from support import Rank, on_ranks
from torch_support import joined, normal

HIDDEN, FFN, EXPERTS, TOPK = 256, 32, 8, 3
MOST = 6
TOKENS = (5, 0, 6, 1)


def make_layer(comm: xd.Comm, wire: Any, **options: Any) -> xd.MoELayer:
    torch.manual_seed(9)
    given = {"max_tokens_per_rank": MOST, "dtype": torch.bfloat16} | options
    return xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, combine_wire=wire, **given)


def result_and_gradients(layer: xd.MoELayer, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    hidden = layer(x).hidden
    hidden.backward(normal(4, *hidden.shape, dtype=hidden.dtype))
    found = [x.grad, *(xd.local_tensor(one.grad) for one in layer.parameters())]
    return [hidden.detach(), *found]


@on_ranks(2, 4)
def test_sums_cross_in_the_wire_and_gradients_are_those_without(me: Rank) -> None:
    x = normal(3 + me.rank, TOKENS[me.rank], HIDDEN, dtype=torch.bfloat16)
    with joined() as comm:
        plain = make_layer(comm, "same")
        _, *gradients = result_and_gradients(plain, x)
        for wire in ("float32", "fp8"):
            layer = make_layer(comm, wire, decode_tokens=MOST)
            got, *others = result_and_gradients(layer, x)
            with torch.no_grad():
                routing = layer.router(x)
                plan = layer.group.prepare(routing.topk_idx)
                rows = xd.dispatch(plan, x, routing.topk_weights)
                results = layer.experts(rows.tokens, plan)
                wanted = xd.combine(plan, results, rows.weights, wire=wire)
                decoded = layer(x, decode=True).hidden
            assert torch.equal(got, wanted)
            assert torch.equal(decoded, wanted)
            for number, (one, other) in enumerate(zip(others, gradients, strict=True)):
                assert torch.equal(one, other), number


@on_ranks(1)
def test_wires_that_a_layer_cannot_have_are_refused(me: Rank) -> None:
    with pytest.raises(ValueError, match="combine_wire: expected one of"):  # not that there is none
        xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, combine_wire="fp9")
    with joined() as comm:
        for wire, options, text in (
            ("fp4", {}, "combine_wire: expected one of 'same'"),
            ("fp8", {"overlap": True}, "combine_wire: expected 'same' beside overlap, got 'fp8'"),
            (
                "fp8",
                {"group": make_layer(comm, "float32").group, "max_tokens_per_rank": None},
                r"combine_wire: expected 'same' or one of the group's wire_formats \['float32'\]",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                make_layer(comm, wire, **options)
        with pytest.raises(ValueError, match="hidden: expected a multiple of 128 .* got 192"):
            xd.MoELayer(192, FFN, EXPERTS, TOPK, comm=comm, combine_wire="fp8")
        shared = make_layer(comm, "same", group=make_layer(comm, "fp8_block128").group)
        assert make_layer(comm, "fp8", group=shared.group).combine_wire == "fp8"


@on_ranks(2)
def test_a_bad_argument_of_one_ranks_layer_is_told_to_the_peers(me: Rank) -> None:
    with joined() as comm:
        for bad in (
            {"wire": "fp9"},
            {"capacity_factor": -1.0},
            {"z_loss_weight": 1.0, "router": abs},
        ):
            given = {"wire": "same"} | (bad if me.rank == 0 else {})
            with pytest.raises(ValueError if me.rank == 0 else Mismatch, match="rank 0|expected"):
                make_layer(comm, **given)
        assert make_layer(comm, "same").num_experts == EXPERTS
