"""Layers whose transfers and products overlap: the bits of the serial layer, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import crossdock.torch as xd
from crossdock.errors import InvalidArgument
from support import Rank, on_ranks
from torch_support import eager_and_compiled, in_mesh, joined, normal, one_rank_errs, where

HIDDEN, FFN, TOPK = 16, 24, 3
SEED = 31

# By the number of ranks: the tokens of each.
TOKENS = {1: (9,), 2: (7, 0), 4: (5, 0, 1, 16)}


def make_layer(comm: xd.Comm, **options: Any) -> xd.MoELayer:
    torch.manual_seed(SEED)
    options = {"dtype": torch.float32, "aux_loss_weight": 0.5, "z_loss_weight": 0.1} | options
    experts = 5 * comm.num_ranks  # of a rank; no multiple of the parts
    return xd.MoELayer(HIDDEN, FFN, experts, TOPK, comm=comm, max_tokens_per_rank=16, **options)


def computed() -> torch.dtype:
    """A dtype whose products are the library's: on GPUs there are none of float32."""
    return torch.bfloat16 if where().type == "cuda" else torch.float32


def batch(me: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and the gradient of their outputs."""
    tokens = TOKENS[me.num_ranks][me.rank]
    return normal(SEED + me.rank, tokens, HIDDEN), normal(SEED + 9 + me.rank, tokens, HIDDEN)


def trained(
    model: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, recomputed: bool = False
) -> dict[str, torch.Tensor]:
    """A step's output and all gradients, by name."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    if recomputed:
        hidden, aux_loss, *_ = checkpoint(lambda x: tuple(model(x)), x, use_reentrant=False)
    else:
        hidden, aux_loss, *_ = model(x)
    ((hidden * grad).sum() + aux_loss).backward()
    grads = {name: xd.local_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return {"hidden": hidden.detach(), "x": x.grad} | grads


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares bit for bit, but not the gradients of matrices that torch's kernels give on GPUs."""
    assert got.keys() == expected.keys()
    for name, one in got.items():
        if where().type == "cuda" and name.endswith(("w_in", "w_out")):
            close(one, expected[name])
        else:
            assert torch.equal(one, expected[name]), name


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    coarse = where().type == "cuda"  # bfloat16
    limits = {"rtol": 5e-2, "atol": 5e-2} if coarse else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **limits)


@on_ranks(1, 2, 4)
def test_a_layer_has_the_bits_of_the_serial_one(me: Rank) -> None:
    with joined() as comm:
        x, grad = batch(me)
        for options in (
            {"dtype": computed()},
            {"dtype": torch.bfloat16, "param_dtype": torch.float32},
        ):
            expected = trained(make_layer(comm, **options), x, grad)
            for overlap in (True, xd.Overlap(1), xd.Overlap(2, sms=8), xd.Overlap(5)):
                layer = make_layer(comm, overlap=overlap, **options)
                for _ in range(2):
                    assert_same(trained(layer, x, grad), expected)
                with torch.no_grad():
                    assert torch.equal(layer(x).hidden, expected["hidden"])
                assert layer.group.stats().staged_tensors == 0


@on_ranks(2)
def test_a_recomputed_layer_has_the_bits_of_the_serial_one(me: Rank) -> None:
    with joined() as comm:
        x, grad = batch(me)
        expected = trained(make_layer(comm, dtype=computed()), x, grad)
        layer = make_layer(comm, dtype=computed(), overlap=xd.Overlap(2))
        for _ in range(2):
            assert_same(trained(layer, x, grad, recomputed=True), expected)


@on_ranks(4)
def test_a_replicated_layer_has_the_bits_of_the_serial_one(me: Rank) -> None:
    with in_mesh((me.num_ranks // 2, 2), "data", "expert") as (mesh, comm):
        x, grad = batch(me)

        def step(**options: Any) -> dict[str, torch.Tensor]:
            layer = make_layer(comm, dtype=computed(), **options)
            model = xd.data_parallel(layer, mesh["data"])
            got = trained(model, x, grad)
            xd.average_gradients(model)
            averaged = {name: xd.local_tensor(p.grad) for name, p in model.named_parameters()}
            return {"hidden": got["hidden"], "x": got["x"]} | averaged

        assert_same(step(overlap=xd.Overlap(2)), step())


@on_ranks(1, 2, timeout=120)
def test_a_compiled_layer_has_one_node_for_all(me: Rank) -> None:
    with joined() as comm:
        layer = make_layer(comm, dtype=computed(), overlap=xd.Overlap(2))
        x, grad = batch(me)
        nodes: list[str] = []

        def loss(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return (found[0] * grad).sum() + found[1]

        def backend(graph: torch.fx.GraphModule, _: object) -> Any:
            nodes.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        for eager, compiled in eager_and_compiled(lambda x: layer(x)[:2], [layer], x, loss):
            close(compiled, eager)
        torch._dynamo.reset()
        torch.compile(layer, backend=backend, fullgraph=True)(x)
        ours = [node for node in nodes if node.startswith("crossdock.")]
        assert ours == ["crossdock.prepare.default", "crossdock.moe_forward.default"]


@on_ranks(2)
def test_the_function_takes_tokens_without_weights_and_frozen_matrices(me: Rank) -> None:
    with joined() as comm:
        group = xd.EpGroup(
            num_experts=4, hidden=HIDDEN, max_topk=2, max_tokens_per_rank=8, dtype=computed()
        )
        del comm
        idx = torch.tensor([[0, 2], [1, -1], [3, 1]])[: 3 - me.rank]
        dtype = computed()
        tokens = normal(SEED + me.rank, idx.shape[0], HIDDEN, dtype=dtype).requires_grad_()
        w_in = 0.25 * normal(1, 2, HIDDEN, 2 * FFN, dtype=dtype)
        w_out = 0.25 * normal(2, 2, FFN, HIDDEN, dtype=dtype)
        plan = group.prepare(idx)
        received = xd.dispatch(plan, tokens)
        inner = xd.grouped_mm(received.tokens, w_in, plan.offsets)
        gate, up = inner.chunk(2, dim=-1)
        # torch's activation, of other bits than the library's
        activated = torch.nn.functional.silu(gate) * up
        expected = xd.combine(plan, xd.grouped_mm(activated, w_out, plan.offsets))
        expected.square().sum().backward()
        grad, tokens.grad = tokens.grad, None
        transposed = w_in.mT.contiguous().mT
        for overlap, matrices in (
            (False, w_in),
            (True, transposed),
            (xd.Overlap(2), w_in),
            ("auto", w_in),
        ):
            plan = group.prepare(idx, parts=2)
            got = xd.moe(plan, tokens, None, matrices, w_out, overlap=overlap)
            close(got, expected)
            got.square().sum().backward()
            close(tokens.grad, grad)
            tokens.grad = None


@on_ranks(2)
def test_a_mistake_is_named_and_the_peers_hear_of_it(me: Rank) -> None:
    with joined() as comm:
        group = xd.EpGroup(
            num_experts=6,
            hidden=HIDDEN,
            max_topk=2,
            max_tokens_per_rank=8,
            dtype=(dtype := computed()),
            comm=comm,
        )
        tokens, weights = normal(1, 3, HIDDEN, dtype=dtype), torch.ones(3, 2)
        w_in = normal(1, 3, HIDDEN, 2 * FFN, dtype=dtype)
        w_out = normal(2, 3, FFN, HIDDEN, dtype=dtype)
        plan = group.prepare(torch.tensor([[0, 5], [1, 2], [3, 4]]), parts=3)
        good = {"tokens": tokens, "topk_weights": weights, "w_in": w_in, "w_out": w_out}
        good["overlap"] = True
        expected = xd.moe(plan, **good)
        narrow = w_in[..., :8].contiguous()
        mistakes: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, "moe: overlap: expected the plan's parts = 3", {"overlap": xd.Overlap(2)}),
            (TypeError, "moe: overlap: expected a bool, 'auto' or an Overlap", {"overlap": 3}),
            (ValueError, "moe: activation: expected one of", {"activation": "tanh"}),
            (TypeError, "moe: tokens: expected a dtype of", {"tokens": tokens.long()}),
            (TypeError, "tokens: expected a tensor, got list", {"tokens": [1.0]}),
            (TypeError, "moe: w_in: expected a tensor, got NoneType", {"w_in": None}),
            (TypeError, "w_out: expected a tensor, got str", {"w_out": "w_out"}),
            (TypeError, "moe: topk_weights: expected a tensor, got float", {"topk_weights": 0.5}),
            (TypeError, f"moe: w_in: expected a dtype of {dtype}", {"w_in": w_in.half()}),
            (ValueError, "w_out: expected 3 dimensions", {"w_out": w_out[0]}),
            (InvalidArgument, "xd_moe_forward: w_in: has shape", {"w_in": narrow}),
            (ValueError, f"w_out: expected a tensor on {where()}", {"w_out": w_out.to("meta")}),
        ]
        for mistake in mistakes:
            one_rank_errs(me, 0, group, lambda **given: xd.moe(plan, **given), good, mistake)
            assert torch.equal(xd.moe(plan, **good), expected)


@on_ranks(2)
def test_parts_of_a_plan_without_parts_are_refused(me: Rank) -> None:
    with joined() as comm:
        sizes = {"hidden": HIDDEN, "max_topk": 1, "max_tokens_per_rank": 8, "comm": comm}
        dtype = sizes["dtype"] = computed()
        matrices = (
            normal(1, 2, HIDDEN, 2 * FFN, dtype=dtype),
            normal(2, 2, FFN, HIDDEN, dtype=dtype),
        )
        group = xd.EpGroup(num_experts=4, **sizes)
        plan = group.prepare(torch.tensor([[0], [3]]))
        given = (plan, normal(3, 2, HIDDEN, dtype=dtype), None, *matrices)
        for overlap in (True, "auto"):
            text = f"moe: overlap: expected False or Overlap.1. with a plan of one .* {overlap!r}"
            with pytest.raises(ValueError, match=text):
                xd.moe(*given, overlap=overlap)
        expected = xd.moe(*given)
        assert torch.equal(xd.moe(*given, overlap=xd.Overlap(1)), expected)
        # One expert of a rank is one part.
        group = xd.EpGroup(num_experts=2, **sizes)
        plan = group.prepare(torch.tensor([[0], [1]]))
        given = (plan, given[1], None, *(one[:1] for one in matrices))
        assert torch.equal(xd.moe(*given, overlap=True), xd.moe(*given))


class Own(xd.GroupedExperts):
    """Experts whose forward pass is another."""


@on_ranks(2)
def test_what_cannot_overlap_is_refused_by_name(me: Rank) -> None:
    with joined() as comm:
        sizes = (5, HIDDEN, FFN)
        for text, wrong in (
            ("experts: expected None or a GroupedExperts", {"experts": torch.nn.Linear(1, 1)}),
            ("experts: expected None or a GroupedExperts", {"experts": Own(*sizes)}),
            (
                "experts: beside overlap, got bias",
                {"experts": xd.GroupedExperts(*sizes, bias=True)},
            ),
            (
                "experts: beside overlap, got 'silu', not gated",
                {"experts": xd.GroupedExperts(*sizes, gated=False)},
            ),
            (
                "experts: beside overlap, got 'gelu', gated",
                {"experts": xd.GroupedExperts(*sizes, activation="gelu")},
            ),
            ("overlap: expected at most 5 parts", {"overlap": xd.Overlap(6)}),
        ):
            with pytest.raises(ValueError, match=text):
                make_layer(comm, **{"overlap": True, **wrong})
        with pytest.raises(TypeError, match="overlap: expected a bool, 'auto' or an Overlap"):
            make_layer(comm, overlap=4)
        with pytest.raises(ValueError, match="ffn: expected rows of a multiple of 16 bytes"):
            torch.manual_seed(SEED)
            xd.MoELayer(HIDDEN, 6, 4, 2, comm=comm, max_tokens_per_rank=4, overlap=True)
    for wrong in ({"parts": 0}, {"parts": True}, {"sms": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected an int of"):
            xd.Overlap(**wrong)


@on_ranks(2)
def test_nothing_is_automatic_where_nothing_would_be_gained(me: Rank) -> None:
    with joined() as comm:
        layer = make_layer(comm, overlap="auto")
        assert layer.overlap is None
        assert make_layer(comm, overlap=True).overlap == xd.Overlap(4, 16)


@on_ranks(2)
def test_a_layer_shows_its_ranks_and_ways(me: Rank) -> None:
    with joined() as comm:
        shown = repr(make_layer(comm, overlap=True))
        assert "num_experts=10, topk=3, num_ranks=2, experts " in shown
        assert "combine_wire='same', overlap=Overlap(parts=4, sms=16)" in shown
        assert "overlap=False" in repr(make_layer(comm))


@on_ranks(2)
def test_transfers_beside_products_get_no_more_multiprocessors_than_the_group(me: Rank) -> None:
    with joined() as comm:
        group = xd.EpGroup(
            comm=comm,
            num_experts=10,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=16,
            dtype=torch.float32,
            num_sms=8,
        )
        chosen = xd.MoELayer(HIDDEN, FFN, 10, TOPK, group=group, overlap=xd.Overlap(2))
        assert chosen.overlap == xd.Overlap(2, 8)


def test_operators_pass_torchs_own_checks() -> None:
    with xd.init():
        group = xd.EpGroup(
            num_experts=3, hidden=HIDDEN, max_topk=2, max_tokens_per_rank=6, dtype=computed()
        )
        plan = group.prepare(torch.tensor([[0, 2], [1, -1], [2, 1]]), parts=2)
        given = [
            normal(1, 3, HIDDEN, dtype=computed()),
            torch.rand(3, 2),
            normal(2, 3, HIDDEN, 2 * FFN, dtype=computed()),
            normal(3, 3, FFN, HIDDEN, dtype=computed()),
        ]
        for one in given:
            one.requires_grad_()
        for weights in (given[1], None):
            tensors = (plan.data, plan.offsets, given[0], weights, *given[2:], plan.order)
            torch.library.opcheck(
                torch.ops.crossdock.moe_forward.default,
                (*tensors, group.handle, 0, 2, 0),
                # Rows behind the last zone are anything.
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )
