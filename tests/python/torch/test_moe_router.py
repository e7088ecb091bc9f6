"""The choice of experts by hand-made numbers, its losses, its capacity, and the router's bias."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import crossdock.torch as xd
from crossdock._router import capacity_of, capacity_rows
from crossdock.errors import PeerLost
from support import Rank, on_ranks
from torch_support import joined, normal, where

E, K, HIDDEN = 8, 2, 16


def test_sigmoid_scores_are_chosen_within_the_best_groups_and_scaled() -> None:
    # Groups of two: the sums of their scores are largest in groups 1 and 3, whose best experts are
    # 2, 6 and 7. Expert 0 has the largest score of all.
    scores = torch.tensor([[0.9, 0.1, 0.7, 0.6, 0.5, 0.4, 0.8, 0.75]])
    options = xd.RouterOptions("sigmoid", scale=3.0, num_groups=4, topk_groups=2)
    routing = xd.route(torch.logit(scores), 3, options)
    assert routing.topk_idx.tolist() == [[6, 7, 2]]
    weights = torch.tensor([[0.8, 0.75, 0.7]])
    torch.testing.assert_close(routing.topk_weights, 3 * weights / weights.sum())
    torch.testing.assert_close(routing.probabilities, scores / scores.sum())
    # By their best expert alone, group 0 is one of the two.
    by_max = xd.RouterOptions("sigmoid", num_groups=4, topk_groups=2, group_score="max")
    assert xd.route(torch.logit(scores), 3, by_max).topk_idx.tolist() == [[0, 6, 7]]


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
    bias = torch.tensor([0.0, -1.0, 0.0, 0.5])
    options = xd.RouterOptions("sigmoid", normalize=False)
    logits = torch.logit(scores).requires_grad_()
    routing = xd.route(logits, 2, options, bias)
    assert routing.topk_idx.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.topk_weights, torch.tensor([[0.2, 0.5]]))
    routing.topk_weights.sum().backward()
    slope = scores * (1 - scores) * torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(logits.grad, slope)


def test_softmax_weights_may_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    probabilities = logits.softmax(-1)
    whole = xd.route(logits, 2, xd.RouterOptions(normalize=False))
    torch.testing.assert_close(whole.topk_weights, probabilities[:, [1, 2]])
    scaled = xd.route(logits, 2)
    torch.testing.assert_close(scaled.topk_weights, logits[:, [1, 2]].softmax(-1))


def test_losses_are_their_formulas() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    torch.testing.assert_close(
        xd.z_loss(logits), (logits.logsumexp(-1) ** 2).mean(), rtol=1e-6, atol=0
    )
    assert xd.z_loss(torch.zeros(0, 4)).item() == 0
    even = torch.full((5, 4), 0.25)
    torch.testing.assert_close(xd.balance_loss(even, even[0]), torch.tensor(1.0))


def test_an_expert_keeps_its_heaviest_tokens() -> None:
    idx = torch.tensor([[0, 1], [0, 2], [0, -1], [1, 0]])
    weights = torch.tensor([[0.2, 0.8], [0.7, 0.3], [0.7, 0.0], [0.6, 0.4]])
    kept = xd.drop_over_capacity(xd.Routing(idx, weights), 3, 2)
    # Expert 0 has 0.2, 0.7, 0.7 and 0.4; the others have no more than two.
    assert kept.topk_idx.tolist() == [[-1, 1], [0, 2], [0, -1], [1, -1]]
    wanted = torch.tensor([[0.0, 0.8], [0.7, 0.3], [0.7, 0.0], [0.6, 0.0]])
    torch.testing.assert_close(kept.topk_weights, wanted)
    one = xd.drop_over_capacity(xd.Routing(idx, weights), 3, 1)  # of two alike, the earlier token
    assert one.topk_idx.tolist() == [[-1, 1], [0, 2], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    "options, sizes, text",
    [
        ({"scores": "tanh"}, None, "scores: expected one of"),
        ({"scale": 0.0}, None, "scale: expected a positive number"),
        ({"num_groups": 2, "topk_groups": 3}, None, "topk_groups: expected 1 to num_groups = 2"),
        ({"num_groups": 3}, (8, 2), "num_groups: expected equal groups .* got 3"),
        ({"num_groups": 8, "topk_groups": 8}, (8, 2), "groups of at least 2 .* got 8"),
        ({"num_groups": 4}, (8, 3), "topk: expected 1 to 2, the experts of 1 of 4 groups, got 3"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict, sizes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made = xd.RouterOptions(**options)
        if sizes is not None:
            made.check(*sizes)


def make_layer(comm: xd.Comm, **options: Any) -> xd.MoELayer:
    torch.manual_seed(3)
    options = {"max_tokens_per_rank": 16, "dtype": torch.float32, "aux_loss_weight": 0} | options
    return xd.MoELayer(HIDDEN, 8, E, K, comm=comm, **options)


def tokens(me: Rank, count: int = 16) -> torch.Tensor:
    return normal(100 + me.rank, count, HIDDEN)


class Given(torch.nn.Module):
    """A router that knows its answer."""

    def __init__(self, routing: xd.Routing) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, tokens: torch.Tensor) -> xd.Routing:
        return self.routing


@on_ranks(2)
def test_a_capacity_factor_bounds_experts_and_memory(me: Rank) -> None:
    with joined() as comm:
        layer = make_layer(comm, capacity_factor=1.0)
        free = make_layer(comm)
        with torch.no_grad():
            for one in (layer, free):
                one.router.weight[1:3] += 5 * one.router.weight[0].sign()  # favours 1 and 2
        x = tokens(me).abs() * layer.router.weight[1].sign()
        # A rank receives an even share of rows at most: as many as fit.
        assert layer.group.rows == 16 * K == capacity_rows(1.0, 16, K, E, me.num_ranks)
        assert free.group.rows > layer.group.rows
        routing = layer.router(x)
        limited = xd.drop_over_capacity(routing, E, capacity_of(1.0, 16, K, E))
        assert (limited.topk_idx == -1).sum() > K
        free.router = Given(limited)
        output = layer(x)
        torch.testing.assert_close(output.hidden, free(x).hidden)
        chosen = torch.bincount(routing.topk_idx.flatten(), minlength=E).float()
        torch.testing.assert_close(output.load, chosen / chosen.sum())  # before any was dropped


@on_ranks(2)
def test_a_bias_evens_out_the_load_alike_on_all_ranks(me: Rank) -> None:
    with xd.init(device=where()) as comm:  # without torch.distributed
        layer = make_layer(comm, router=xd.RouterOptions("sigmoid", bias=True))
        assert "router.bias" in layer.state_dict() and "router.load" not in layer.state_dict()
        bias = layer.router.bias
        bias[:2] = 1  # all tokens go to these two
        start = bias.clone()
        before = layer(tokens(me)).load
        assert before.tolist() == [0.5, 0.5] + [0] * 6
        layer.eval()
        layer(tokens(me))  # not counted
        layer.train()
        layer(tokens(me))
        xd.update_router_bias(layer, rate=0.25)
        torch.testing.assert_close(bias, start + 0.25 * torch.sign(before.mean() - before))
        assert not layer.router.load.any()
        for _ in range(20):
            layer(tokens(me))
            xd.update_router_bias(layer, rate=0.05)
        assert layer(tokens(me)).load.max() < 0.3
        gathered = comm.all_gather(bias.detach().cpu().numpy().tobytes())
        assert all(one == gathered[0] for one in gathered)
        with pytest.raises(ValueError, match="RouterOptions.bias=True., got none"):
            xd.update_router_bias(make_layer(comm))


@on_ranks(2, loses=1, fresh=True)  # other tests keep their processes
def test_a_rank_that_has_ended_does_not_hold_up_a_bias(me: Rank) -> None:
    with xd.init(device=where(), on_peer_loss="mask") as comm:
        layer = make_layer(comm, router=xd.RouterOptions(bias=True))
        layer(tokens(me))
        comm.barrier()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = layer.router.bias.clone(), layer.router.load.clone()
        with pytest.raises(PeerLost, match="rank 1 has been lost") as lost:
            xd.update_router_bias(layer)
        assert not lost.value.fatal
        after = layer.router.bias, layer.router.load
        assert all(torch.equal(one, other) for one, other in zip(before, after))


@on_ranks(2)
def test_the_layer_adds_its_losses(me: Rank) -> None:
    with joined() as comm:
        x = tokens(me)
        layer = make_layer(comm, aux_loss_weight=0.5, z_loss_weight=0.25)
        output = layer(x)
        logits = x @ layer.router.weight.T
        expected = 0.5 * xd.balance_loss(logits.softmax(-1), output.load) + 0.25 * xd.z_loss(logits)
        torch.testing.assert_close(output.aux_loss, expected)
        output.aux_loss.backward()
        assert layer.router.weight.grad.abs().sum() > 0
        with pytest.raises(ValueError, match="z_loss_weight: expected 0 beside a router"):
            make_layer(comm, router=lambda x: None, z_loss_weight=1.0)
