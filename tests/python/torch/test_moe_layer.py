"""MoELayer over ranks against the same layer in one process, which shares no code with it."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import crossdock.torch as xd
from crossdock.errors import Mismatch
from support import Rank, run_ranks
from torch_support import joined, reported, where

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples" / "torch"))

from moe_lm.plain_moe import PlainMoE  # noqa: E402

HIDDEN, FFN, EXPERTS, TOPK = 16, 24, 8, 3
SEED = 20

DRAWN = torch.device("cpu")  # random numbers come from here, also in tests on GPUs


def make_layer(comm: xd.Comm, max_tokens: int = 16, **options: Any) -> xd.MoELayer:
    torch.manual_seed(SEED)
    options = {"aux_loss_weight": 0.5, "dtype": torch.float32} | options
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
    generator = torch.Generator().manual_seed(SEED + 1)
    with DRAWN:
        drawn = [torch.randn(sum(tokens_of_ranks), HIDDEN, generator=generator) for _ in range(2)]
    return tuple(tensor.to(where()) for tensor in drawn)


def mine(me: Rank, whole: torch.Tensor, tokens_of_ranks: tuple[int, ...]) -> torch.Tensor:
    return whole.split(tokens_of_ranks)[me.rank].clone()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # A GPU's products sum in another order where shapes differ.
    rtol, atol = (1e-4, 1e-5) if got.is_cuda else (2e-5, 2e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def check_against_plain(me: Rank, tokens_of_ranks: tuple[int, ...], aux: bool) -> None:
    tokens_of_ranks = tokens_of_ranks[: me.num_ranks]
    with joined() as comm:
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
            (output.hidden * mine(me, grad, tokens_of_ranks)).sum()
            + (output.aux_loss if aux else 0)
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


@pytest.mark.parametrize(
    "tokens_of_ranks, aux",
    [
        ((9,), True),
        ((8, 8), True),
        ((4, 4, 4, 4), True),
        ((5, 0, 1, 16), False),
        ((0, 0), False),
    ],
    ids=str,
)
def test_layer_is_that_of_one_process(tokens_of_ranks: tuple[int, ...], aux: bool) -> None:
    run_ranks(len(tokens_of_ranks), check_against_plain, tokens_of_ranks, aux)


def check_compiled(me: Rank, tokens_of_ranks: tuple[int, ...]) -> None:
    tokens_of_ranks = tokens_of_ranks[: me.num_ranks]
    with joined() as comm:
        layer = make_layer(comm, shared_experts=1)
        x, grad = (mine(me, whole, tokens_of_ranks) for whole in batch(tokens_of_ranks))
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            # All blocks that the pool has: what is not overwritten poisons what reads it.
            poison = [
                comm.empty_symmetric((rows, layer.group.rows), torch.float32).fill_(torch.nan)
                for rows in (1, FFN, HIDDEN, HIDDEN, HIDDEN, HIDDEN)
            ]
            del poison
            part = x.clone().requires_grad_()
            layer.zero_grad()
            output = function(part)
            ((output.hidden * grad).sum() + output.aux_loss).backward()
            results.append(
                [output.hidden.detach(), output.aux_loss.detach(), part.grad]
                + [xd.local_tensor(p.grad).clone() for p in layer.parameters()]
            )
        for eager, compiled in zip(*results):
            assert torch.isfinite(eager).all()
            close(compiled, eager)


@pytest.mark.parametrize("tokens_of_ranks", [(7,), (5, 0, 1, 16)], ids=str)
def test_compiled_layer_reads_no_garbage(tokens_of_ranks: tuple[int, ...]) -> None:
    run_ranks(len(tokens_of_ranks), check_compiled, tokens_of_ranks, timeout=120)


def check_side_by_side(me: Rank, tokens_of_ranks: tuple[int, ...]) -> None:
    """Two layers of one group that need nothing of each other, one after the other by `after`."""
    graphs: list[list[str]] = []

    def record(graph_module: torch.fx.GraphModule, _):
        operations = [
            node
            for node in graph_module.graph.nodes
            if str(node.target).startswith("crossdock.") and "grouped" not in str(node.target)
        ]
        for earlier, later in zip(operations, operations[1:]):
            assert depends(later, earlier), f"{later} does not depend on {earlier}"
        graphs.append([str(node.target).split(".")[1] for node in operations])
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    with joined() as comm:
        left = make_layer(comm)
        right = make_layer(comm, group=left.group)
        right.reset_parameters()  # other parameters than the left one's
        x, grad = (mine(me, whole, tokens_of_ranks) for whole in batch(tokens_of_ranks))

        def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one = left(x)
            other = right(x, after=one.order)
            return one.hidden, other.hidden, one.aux_loss + other.aux_loss

        results = []
        backend = aot_autograd(fw_compiler=record, bw_compiler=record)
        for function in (both, torch.compile(both, fullgraph=True, backend=backend)):
            part = x.clone().requires_grad_()
            for layer in (left, right):
                layer.zero_grad()
            *hidden, aux_loss = function(part)
            ((hidden[0] * grad).sum() + (hidden[1] * grad.flip(-1)).sum() + aux_loss).backward()
            results.append(
                [*hidden, aux_loss, part.grad]
                + [
                    xd.local_tensor(p.grad).clone()
                    for layer in (left, right)
                    for p in layer.parameters()
                ]
            )
        for eager, compiled in zip(*results):
            close(compiled, eager)
        assert graphs == [
            ["prepare", "dispatch", "combine"] * 2,
            ["combine_bwd", "dispatch_bwd"] * 2,
        ]


def depends(later: torch.fx.Node, earlier: torch.fx.Node) -> bool:
    """Whether `later` comes after `earlier` in any order that the data allows."""
    found, todo = set(), [later]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return earlier in found


@pytest.mark.parametrize("tokens_of_ranks", [(7, 3), (5, 0)], ids=str)
def test_compiled_layers_side_by_side_are_one_chain(tokens_of_ranks: tuple[int, ...]) -> None:
    run_ranks(2, check_side_by_side, tokens_of_ranks, timeout=200)


def check_bfloat16(me: Rank) -> None:
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


def test_bfloat16_layer_pads_zones_and_is_near_float32() -> None:
    run_ranks(2, check_bfloat16)


def check_autocast(me: Rank) -> None:
    with joined() as comm:
        layer = make_layer(comm)
        x = mine(me, batch((5, 3))[0], (5, 3))
        expected = layer(x)
        with torch.autocast(where().type, dtype=torch.bfloat16):
            output = layer(x)
        for name, got, wanted in zip(output._fields, output, expected):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted), name


def test_autocast_does_not_reach_into_the_layer() -> None:
    run_ranks(2, check_autocast)


def check_default_device(me: Rank) -> None:
    with joined() as comm:
        expected = make_layer(comm)
        with torch.device("meta"):  # one that nothing could be computed on
            layer = make_layer(comm)
        for got, wanted in zip(layer.parameters(), expected.parameters(), strict=True):
            assert torch.equal(got, wanted)


def test_parameters_do_not_depend_on_the_default_device() -> None:
    run_ranks(1, check_default_device)


def check_average(me: Rank) -> None:
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


def test_gradients_are_averaged_and_those_of_experts_scaled() -> None:
    run_ranks(4, check_average)


def check_without_distributed(me: Rank) -> None:
    with xd.init(device=where()) as comm:  # from the environment
        layer = make_layer(comm)
        x = torch.ones(me.rank, HIDDEN)
        assert layer(x).hidden.shape == x.shape
        with pytest.raises(RuntimeError, match="expected torch.distributed to be initialised"):
            xd.average_gradients(layer)
        with pytest.raises(ValueError, match="model: expected a MoELayer in it, or .*; got none"):
            xd.average_gradients(torch.nn.Linear(1, 1))


def test_averaging_without_torch_distributed_is_refused() -> None:
    run_ranks(2, check_without_distributed)


def check_refusals(me: Rank) -> None:
    with joined() as comm:
        group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=16,
            dtype=torch.float32,
            comm=comm,
        )
        rank_major = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=16,
            layout="rank_major",
            dtype=torch.float32,
            comm=comm,
        )

        def refused(text: str, *sizes: int, **options: Any) -> None:
            with pytest.raises(ValueError, match=text):
                xd.MoELayer(*sizes, **options)

        refused("max_tokens_per_rank: expected a number", HIDDEN, FFN, EXPERTS, TOPK, comm=comm)
        refused("num_experts: expected the group's 8, got 4", HIDDEN, FFN, 4, TOPK, group=group)
        refused(
            "hidden: expected at most the group's 16, got 32", 32, FFN, EXPERTS, TOPK, group=group
        )
        refused("topk: expected at most the group's 3, got 4", HIDDEN, FFN, EXPERTS, 4, group=group)
        refused(
            "dtype: expected the group's torch.float32",
            HIDDEN,
            FFN,
            EXPERTS,
            TOPK,
            group=group,
            dtype=torch.bfloat16,
        )
        refused(
            "layout 'expert_major', got 'rank_major'", HIDDEN, FFN, EXPERTS, TOPK, group=rank_major
        )


def test_what_does_not_fit_the_group_is_named() -> None:
    run_ranks(2, check_refusals)


def check_bad_inputs(me: Rank) -> None:
    """Each mistake of rank 0 is named there; rank 1 hears of it at once, and the layer goes on."""
    with joined() as comm:
        layer = make_layer(comm)
        good = torch.ones(3, HIDDEN)
        expected = layer(good).hidden
        bad: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"x": torch.ones(4, 4 * HIDDEN)}, ValueError, r"x: .*\[..., 16\], got \(4, 64\)"),
            ({"x": torch.ones(4, HIDDEN // 2)}, ValueError, r"x: .*\[..., 16\], got \(4, 8\)"),
            ({"x": torch.ones(())}, ValueError, r"x: expected shape \[..., 16\], got \(\)"),
            ({"x": good.long()}, TypeError, "x: expected a floating-point dtype, got torch.int64"),
            ({"x": good.to("meta")}, ValueError, f"x: expected a tensor on {where()}, got one"),
            ({"x": [1.0]}, TypeError, r"x: expected a tensor, got list \[1.0\]"),
            ({"x": good, "after": torch.ones(2)}, ValueError, r"after: .* of shape \(2,\)"),
            ({"x": good, "after": 3}, TypeError, "after: expected a tensor, got int 3"),
        ]
        for arguments, kind, text in bad:
            if me.rank == 1:
                arguments, kind, text = {"x": good}, Mismatch, "rank 0: its call failed"
            with reported(layer.group, kind, text):
                layer(**arguments)
            assert torch.equal(layer(good).hidden, expected)
        layer.bfloat16()
        with pytest.raises(TypeError, match="fixed when the layer is made, by MoELayer.dtype"):
            layer(good)


def test_a_bad_input_is_named_and_the_peers_hear_of_it() -> None:
    run_ranks(2, check_bad_inputs)
