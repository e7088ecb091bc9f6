"""MoELayer over ranks against the same layer in one process, which shares no code with it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import crossdock.torch as xd
from moe_lm.plain_moe import PlainMoE
from support import Rank, on_ranks
from torch_support import eager_and_compiled, joined, normal, one_rank_errs, recording, where

HIDDEN, FFN, EXPERTS, TOPK = 16, 24, 8, 3
SEED = 20

DRAWN = torch.device("cpu")  # parameters are drawn here, also in tests on GPUs


def make_layer(comm: xd.Comm, max_tokens: int = 16, **options: Any) -> xd.MoELayer:
    torch.manual_seed(SEED)
    options = {"aux_loss_weight": 0.5, "dtype": torch.float32, "global_load": True} | options
    return xd.MoELayer(
        HIDDEN, FFN, EXPERTS, TOPK, comm=comm, max_tokens_per_rank=max_tokens, **options
    )


def make_plain() -> PlainMoE:
    torch.manual_seed(SEED)
    with DRAWN:
        plain = PlainMoE(HIDDEN, FFN, EXPERTS, TOPK, aux_loss_weight=0.5)
    return plain.to(where())


def batch(tokens_of_ranks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' tokens, and the gradient of all outputs."""
    return tuple(normal(SEED + 1 + part, sum(tokens_of_ranks), HIDDEN) for part in range(2))


def mine(me: Rank, whole: torch.Tensor, tokens_of_ranks: tuple[int, ...]) -> torch.Tensor:
    return whole.split(tokens_of_ranks)[me.rank].clone()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # A GPU's products sum in another order where shapes differ.
    rtol, atol = (1e-4, 1e-5) if got.is_cuda else (2e-5, 2e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


# By the number of ranks: the tokens of each, and whether the auxiliary loss is trained.
CASES = {
    1: [((9,), True)],
    2: [((8, 8), True), ((0, 0), False)],
    4: [((4, 4, 4, 4), True), ((5, 0, 1, 16), False), ((0,) * 4, False)],
}


@on_ranks(1, 4)
def test_layer_is_that_of_one_process(me: Rank) -> None:
    with joined() as comm:
        for tokens_of_ranks, aux in CASES[me.num_ranks]:
            check_against_plain(me, comm, tokens_of_ranks, aux)


def check_against_plain(
    me: Rank, comm: xd.Comm, tokens_of_ranks: tuple[int, ...], aux: bool
) -> None:
    layer, plain = make_layer(comm), make_plain()
    here = slice(layer.first_expert, layer.first_expert + layer.num_local_experts)
    assert torch.equal(layer.router.weight, plain.router.weight)
    assert torch.equal(xd.local_tensor(layer.experts.w_in), plain.experts["w_in"][here])
    assert torch.equal(xd.local_tensor(layer.experts.w_out), plain.experts["w_out"][here])

    x, grad = batch(tokens_of_ranks)
    whole = x.clone().requires_grad_()
    expected, expected_aux, expected_load = plain(whole)
    # The layers' auxiliary losses are means over ranks: as large as one process's together.
    ((expected * grad).sum() + (me.num_ranks * expected_aux if aux else 0)).backward()

    part = mine(me, x, tokens_of_ranks).requires_grad_()
    output = layer(part)
    (
        (output.hidden * mine(me, grad, tokens_of_ranks)).sum() + (output.aux_loss if aux else 0)
    ).backward()

    close(output.hidden, mine(me, expected, tokens_of_ranks))
    close(output.load, expected_load.nan_to_num())  # 0 / 0 where no rank has tokens
    close(part.grad, mine(me, whole.grad, tokens_of_ranks))
    close(xd.local_tensor(layer.experts.w_in.grad), plain.experts["w_in"].grad[here])
    close(xd.local_tensor(layer.experts.w_out.grad), plain.experts["w_out"].grad[here])
    dist.all_reduce(layer.router.weight.grad)
    close(layer.router.weight.grad, plain.router.weight.grad)
    mean_aux = output.aux_loss.detach().clone()
    dist.all_reduce(mean_aux)
    if aux:
        close(mean_aux / me.num_ranks, expected_aux)


@on_ranks(1, 2, timeout=120)
def test_compiled_layer_reads_no_garbage(me: Rank) -> None:
    tokens_of_ranks = (5, 0)[: me.num_ranks]
    with joined() as comm:
        layer = make_layer(comm, shared_experts=1)
        x, grad = (mine(me, whole, tokens_of_ranks) for whole in batch(tokens_of_ranks))

        def poison() -> None:
            """Fills all blocks that the pool has: what is not overwritten spoils its readers."""
            for rows in (1, FFN, HIDDEN, HIDDEN, HIDDEN, HIDDEN):
                held.append(comm.empty_symmetric((rows, layer.group.rows), torch.float32))
                held[-1].fill_(torch.nan)
            held.clear()

        held: list[torch.Tensor] = []
        for eager, compiled in eager_and_compiled(
            lambda x: layer(x)[:2],
            [layer],
            x,
            lambda found: (found[0] * grad).sum() + found[1],
            before=poison,
        ):
            assert torch.isfinite(eager).all()
            close(compiled, eager)


@on_ranks(2, timeout=200)
def test_compiled_layers_side_by_side_are_one_chain(me: Rank) -> None:
    """Two layers of one group that need nothing of each other, one after the other by `after`."""
    tokens_of_ranks = (7, 0)
    chains: list[list[str]] = []
    with joined() as comm:
        left = make_layer(comm)
        right = make_layer(comm, group=left.group)
        right.reset_parameters()  # other parameters than the left one's
        x, grad = (mine(me, whole, tokens_of_ranks) for whole in batch(tokens_of_ranks))

        def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one = left(x)
            other = right(x, after=one.order)
            return one.hidden, other.hidden, one.aux_loss + other.aux_loss

        def loss(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return (found[0] * grad).sum() + (found[1] * grad.flip(-1)).sum() + found[2]

        pairs = eager_and_compiled(both, [left, right], x, loss, recording(chains))
        for eager, compiled in pairs:
            close(compiled, eager)
        assert chains == [
            ["prepare", "dispatch", "combine"] * 2,
            ["combine_bwd", "dispatch_bwd"] * 2,
        ]


@on_ranks(2)
def test_bfloat16_layer_pads_zones_and_is_near_float32(me: Rank) -> None:
    with joined() as comm:
        layer, plain = make_layer(comm, dtype=torch.bfloat16), make_plain()
        x, _ = batch((8, 8))
        output = layer(mine(me, x, (8, 8)).bfloat16())
        assert output.hidden.dtype == torch.bfloat16
        torch.testing.assert_close(
            output.hidden.float(),
            mine(me, plain(x.bfloat16().float())[0], (8, 8)),
            rtol=0.05,
            atol=0.05,
        )


@on_ranks(2)
def test_a_pass_exchanges_no_statistics_unless_asked(me: Rank) -> None:
    """Loads are this rank's; with global_load, in training, they are those of all."""
    tokens_of_ranks = (5, 3)
    used = mock.patch.object(dist, "all_reduce", side_effect=AssertionError("all_reduce was used"))
    with joined() as comm:
        layer = make_layer(comm)
        x = mine(me, batch(tokens_of_ranks)[0], tokens_of_ranks)
        trained = layer(x)
        with torch.no_grad():
            repeated = layer(x)  # as activation checkpointing does
        assert torch.equal(repeated.load, trained.load)
        assert torch.equal(repeated.aux_loss, trained.aux_loss)
        chosen = xd.route(x @ layer.router.weight.t(), TOPK).topk_idx
        own = torch.bincount(chosen.reshape(-1), minlength=EXPERTS) / chosen.numel()
        assert not torch.equal(own, trained.load)
        with used:
            for training, mode in ((False, torch.no_grad), (True, torch.inference_mode)):
                layer.train(training)
                with mode():
                    output = layer(x)
                assert torch.equal(output.hidden, trained.hidden)
                close(output.load, own)
                assert output.aux_loss > 0
            with pytest.raises(AssertionError, match="was used"):
                layer(x)
            layer = make_layer(comm, global_load=False, router=xd.RouterOptions(bias=True))
            output = layer(x)
            assert torch.equal(output.hidden, trained.hidden)
            close(output.load, own)
            (output.hidden.sum() + output.aux_loss).backward()
            assert torch.equal(layer.router.load, torch.bincount(chosen.flatten(), minlength=8))


@on_ranks(1)
def test_parameters_do_not_depend_on_the_default_device(me: Rank) -> None:
    with joined() as comm:
        expected = make_layer(comm)
        with torch.device("meta"):  # one that nothing could be computed on
            layer = make_layer(comm)
        for got, wanted in zip(layer.parameters(), expected.parameters(), strict=True):
            assert torch.equal(got, wanted)


@on_ranks(4)
def test_gradients_are_averaged_and_those_of_experts_scaled(me: Rank) -> None:
    with joined() as comm:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), make_layer(comm))
        unused, used = model[0].bias, model[0].weight
        used.grad = torch.full_like(used, float(me.rank))
        model[1].experts.w_in.grad = torch.full_like(model[1].experts.w_in, 8.0)
        xd.average_gradients(model)
        assert torch.equal(used.grad, torch.full_like(used, (me.num_ranks - 1) / 2))
        assert torch.equal(unused.grad, torch.zeros_like(unused))
        experts = xd.local_tensor(model[1].experts.w_in.grad)
        assert torch.equal(experts, torch.full_like(experts, 8.0 / me.num_ranks))


@on_ranks(2)
def test_averaging_without_torch_distributed_is_refused(me: Rank) -> None:
    with xd.init(device=where()) as comm:  # from the environment
        layer = make_layer(comm)
        x = torch.ones(me.rank, HIDDEN)
        assert layer(x).hidden.shape == x.shape
        with pytest.raises(RuntimeError, match="expected torch.distributed to be initialised"):
            xd.average_gradients(layer)
        with pytest.raises(ValueError, match="model: expected a MoELayer in it, or .*; got none"):
            xd.average_gradients(torch.nn.Linear(1, 1))


@on_ranks(2)
def test_what_does_not_fit_the_group_is_named(me: Rank) -> None:
    with joined() as comm:
        sizes = {
            "num_experts": EXPERTS,
            "hidden": HIDDEN,
            "max_topk": TOPK,
            "max_tokens_per_rank": 16,
            "dtype": torch.float32,
        }
        group = xd.EpGroup(**sizes, comm=comm)
        rank_major = xd.EpGroup(**sizes, layout="rank_major", comm=comm)
        good = {"hidden": HIDDEN, "ffn": FFN, "num_experts": EXPERTS, "topk": TOPK, "group": group}
        for text, wrong in (
            ("max_tokens_per_rank: expected a number", {"group": None, "comm": comm}),
            ("num_experts: expected the group's 8, got 4", {"num_experts": 4}),
            ("hidden: expected at most the group's 16, got 32", {"hidden": 32}),
            ("topk: expected at most the group's 3, got 4", {"topk": 4}),
            ("dtype: expected the group's torch.float32", {"dtype": torch.bfloat16}),
            ("layout 'expert_major', got 'rank_major'", {"group": rank_major}),
        ):
            with pytest.raises(ValueError, match=text):
                xd.MoELayer(**good | wrong)


@on_ranks(2)
def test_a_bad_input_is_named_and_the_peers_hear_of_it(me: Rank) -> None:
    """Each mistake of rank 0 is named there; rank 1 hears of it at once, and the layer goes on."""
    with joined() as comm:
        layer = make_layer(comm)
        good = torch.ones(3, HIDDEN)
        expected = layer(good).hidden
        mistakes: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, r"x: .*\[..., 16\], got \(4, 64\)", {"x": torch.ones(4, 4 * HIDDEN)}),
            (ValueError, r"x: .*\[..., 16\], got \(4, 8\)", {"x": torch.ones(4, HIDDEN // 2)}),
            (ValueError, r"x: expected shape \[..., 16\], got \(\)", {"x": torch.ones(())}),
            (TypeError, "x: expected a floating-point dtype, got torch.int64", {"x": good.long()}),
            (ValueError, f"x: expected a tensor on {where()}, got one", {"x": good.to("meta")}),
            (TypeError, r"x: expected a tensor, got list \[1.0\]", {"x": [1.0]}),
            (ValueError, r"after: .* of shape \(2,\)", {"after": torch.ones(2)}),
            (TypeError, "after: expected a tensor, got int 3", {"after": 3}),
        ]
        for mistake in mistakes:
            one_rank_errs(me, 0, layer.group, layer, {"x": good}, mistake)
            assert torch.equal(layer(good).hidden, expected)
