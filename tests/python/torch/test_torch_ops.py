"""dispatch and combine between processes: values and gradients, exactly, in both layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, layer, poison, ragged, where

LAYOUTS = ("expert_major", "rank_major")
SEED = 20261121


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_rows_lie_where_the_routing_puts_them(me: Rank, layout: str) -> None:
    batch = Batch(SEED, ragged(me), layout, 4 if layout == "expert_major" else 1)
    routing = batch.routing
    with xd.init() as comm:
        group = batch.group()
        poison(comm)
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx.to(torch.int32))
        received = xd.dispatch(plan, x, weights)
        exact = xd.dispatch(plan, x, weights, exact=True)
    rows = routing.total(me.rank)

    def padded(values: np.ndarray, fill: int = 0) -> np.ndarray:
        tail = np.full((group.rows - rows, *values.shape[1:]), fill, np.float32)
        return np.concatenate([values.astype(np.float32), tail])

    tokens = routing.dispatch(me.rank, batch.x)
    beside = routing.dispatch_weights(me.rank, batch.weights)
    assert_equal("tokens", received.tokens, padded(tokens))
    assert_equal("weights", received.weights, padded(beside))
    # Rows that are trimmed are as many as the batch has.
    assert_equal("exact tokens", exact.tokens, tokens)
    assert_equal("exact weights", exact.weights, beside)
    if layout == "rank_major":
        assert_equal("topk_idx", received.topk_idx, padded(routing.recv_topk_idx(me.rank), -1))
    else:
        assert received.topk_idx is None
        assert plan.offsets.tolist() == routing.offsets(me.rank)
        assert plan.padded_counts.tolist() == routing.padded_counts(me.rank)
    assert received.scales is None
    assert plan.counts.tolist() == routing.counts(me.rank)
    assert plan.total.tolist() == [rows]
    assert plan.rank_rows.tolist() == routing.rank_rows().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(dtype, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    + [(torch.float32, {"exact": True})],
    ids=str,
)
@on_ranks(4)
def test_layer_and_its_gradients_are_exact(
    me: Rank, layout: str, dtype: torch.dtype, options: dict
) -> None:
    batch = Batch(SEED + 1, ragged(me), layout)
    with xd.init() as comm:
        group = batch.group(dtype)
        poison(comm)
        for step in range(2):  # the second step finds blocks that the first has used
            batch.check_layer(me.rank, group, f"in step {step}", dtype=dtype, **options)


@on_ranks(4)
def test_unweighted_sum_and_its_gradient_are_exact(me: Rank) -> None:
    batch = Batch(SEED + 2, ragged(me))
    with xd.init() as comm:
        group = batch.group()
        poison(comm)
        topk_idx, x, _, grad_out = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x)
        assert received.weights is None
        factor = plan.row_experts(torch.int32) + 1
        out = xd.combine(plan, received.tokens * factor[:, None])
        out.backward(grad_out)
        expected, grad_x, _ = batch.expected(me.rank, weighted=False)
        assert_equal("out", out, expected)
        assert_equal("gradient of x", x.grad, grad_x)


@on_ranks(4)
def test_gradient_of_one_input_alone(me: Rank) -> None:
    batch = Batch(SEED + 3, ragged(me))
    with xd.init():
        group = batch.group()
        for wanted in (0, 1):
            topk_idx, x, weights, grad_out = batch.local(me.rank)
            inputs = x, weights
            inputs[1 - wanted].requires_grad_(False)
            layer(group.prepare(topk_idx), x, weights).backward(grad_out)
            assert_equal("gradient", inputs[wanted].grad, batch.expected(me.rank)[1 + wanted])
            assert inputs[1 - wanted].grad is None


def _slice_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same, contiguous, beginning where no multiple of 16 bytes lies."""
    flat = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    assert tensor.numel() == 0 or flat.data_ptr() % 16 != 0
    return flat.copy_(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_slices_may_begin_anywhere(me: Rank, layout: str) -> None:
    batch = Batch(SEED + 9, ragged(me), layout)
    with xd.init():
        topk_idx, x, weights, grad_out = (_slice_of(part.detach()) for part in batch.local(me.rank))
        x.requires_grad_()
        weights.requires_grad_()
        out = layer(batch.group().prepare(topk_idx), x, weights)
        out.backward(grad_out)
        batch.check(me.rank, out, x, weights)


@on_ranks(4)
def test_gradients_of_any_strides_are_taken(me: Rank) -> None:
    """Gradients as autograd makes them: expanded, transposed, at odd addresses."""
    batch = Batch(SEED + 4, ragged(me))
    with xd.init():
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = batch.group().prepare(topk_idx)
        wide = torch.zeros(grad_out.shape[1], grad_out.shape[0] + 1).t()[1:]
        odd = torch.zeros(grad_out.numel() + 1)[1:].view(grad_out.shape)
        for strange in (wide, odd):
            strange.copy_(grad_out)
            (got,) = torch.autograd.grad(layer(plan.detach(), x, weights), x, strange)
            assert_equal("gradient of x", got, batch.expected(me.rank)[1])
        (got,) = torch.autograd.grad(layer(plan.detach(), x, weights).sum(), x)
        scale = (batch.factors(me.rank) * batch.weights[me.rank]).sum(1, keepdims=True)
        assert_equal("gradient of x", got, np.broadcast_to(scale, got.shape))


@on_ranks(4)
def test_dropped_rows_have_no_output_and_no_gradient(me: Rank) -> None:
    capacity = 7  # of about ten rows that every rank receives
    batch = Batch(SEED + 5, ragged(me))
    with xd.init() as comm:
        group = batch.group(recv_capacity=capacity, overflow="drop")
        poison(comm)
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        assert received.tokens.shape[0] == capacity
        out = xd.combine(plan, received.tokens, received.weights)
        out.backward(grad_out)
    kept = np.zeros(batch.topk_idx[me.rank].shape, bool)
    for rank in range(me.num_ranks):
        for row in batch.routing.rows(rank)[:capacity]:
            if row and row.source == me.rank:
                kept[row.token, row.choices[0]] = True
    scale = (batch.weights[me.rank] * kept).sum(1, keepdims=True)
    dots = (batch.x[me.rank] * batch.grad_out[me.rank]).sum(1, keepdims=True)
    assert_equal("out", out, batch.x[me.rank] * scale)
    assert_equal("gradient of x", x.grad, batch.grad_out[me.rank] * scale)
    assert_equal("gradient of topk_weights", weights.grad, kept * dots)


@on_ranks(4)
def test_inference_keeps_nothing(me: Rank) -> None:
    batch = Batch(SEED + 6, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        for grad_mode in (torch.no_grad(), torch.inference_mode()):
            with grad_mode:
                out = layer(group.prepare(topk_idx), x, weights)
            assert not out.requires_grad
            assert_equal("out", out, batch.expected(me.rank)[0])
        # With grad mode on and nothing ever differentiated, steps do not pile up either.
        for _ in range(50):
            layer(group.prepare(topk_idx), x, weights)
        live = len(group.comm.pool._live)
        assert live <= 8, f"{live} blocks are alive after 50 steps"


def test_one_rank_needs_nothing_around_it():
    """A world of one: no process group, no environment."""
    batch = Batch(SEED + 7, ((6,), 8, 3, 32))
    with xd.init() as comm:
        assert (comm.rank, comm.num_ranks, comm.device) == (0, 1, where())
        batch.check_layer(0, batch.group())


@pytest.mark.parametrize("part", ["dispatch", "combine"])
@on_ranks(4)
def test_second_derivatives_are_refused(me: Rank, part: str) -> None:
    batch = Batch(SEED + 8, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        if part == "dispatch":
            loss, inputs = xd.dispatch(plan, x, weights).tokens.pow(2).sum(), x
        else:
            # Linear in the rows, whose gradient so depends on nothing but saved weights.
            inputs = torch.ones(group.rows, batch.hidden, requires_grad=True)
            beside = torch.ones(group.rows, requires_grad=True)
            loss = xd.combine(plan, inputs, beside).sum()
        (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (again,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert torch.equal(grad, again)
        with pytest.raises(RuntimeError, match="second derivative of one of crossdock.torch's"):
            grad.pow(2).sum().backward()
