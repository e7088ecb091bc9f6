"""Wires of combine: sums that cross in another form, with the gradient of those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import Mismatch
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, ragged

SEED = 90
HIDDEN = 128
WIRES = ("float32", "fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0")


def results_of(batch: Batch, num_ranks: int) -> list[np.ndarray]:
    """Per rank [R,H] the experts' results, which no code of 8 bits has."""
    random = [np.random.default_rng((SEED, rank)) for rank in range(num_ranks)]
    return [
        one.standard_normal((batch.routing.total(rank), HIDDEN)).astype(np.float32)
        for rank, one in enumerate(random)
    ]


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@on_ranks(4)
def test_sums_and_their_gradient(me: Rank, layout: str) -> None:
    batch = Batch(SEED, ragged(me, HIDDEN), layout)
    rows = results_of(batch, me.num_ranks)
    weighted = layout == "expert_major"
    weights = [batch.routing.dispatch_weights(r, batch.weights) for r in range(me.num_ranks)]
    with xd.init():
        group = batch.group(torch.float32, wire_formats=WIRES)
        topk_idx, *_, grad_out = batch.local(me.rank)
        grads = {}
        for wire in ("same", *WIRES):
            plan = group.prepare(topk_idx)
            # Behind the rows there may be more.
            given = np.zeros((group.rows, HIDDEN), np.float32)
            given[: len(rows[me.rank])] = rows[me.rank]
            expert_out = torch.tensor(given).requires_grad_()
            factors = None
            if weighted:
                padded = np.zeros(group.rows, np.float32)
                padded[: len(weights[me.rank])] = weights[me.rank]
                factors = torch.tensor(padded).requires_grad_()
            out = xd.combine(plan, expert_out, factors, wire=wire)
            want = batch.routing.combine(me.rank, rows, weights if weighted else None, wire)
            assert_equal(wire, out, want)
            out.backward(grad_out)
            grads[wire] = expert_out.grad, None if factors is None else factors.grad
            for one, same in zip(grads[wire], grads["same"]):
                assert one is same is None or torch.equal(one, same)


@on_ranks(3)
def test_few_tokens_whole_and_in_halves(me: Rank) -> None:
    case = (4, 0, 6)[: me.num_ranks], 6, 3, HIDDEN
    batch = Batch(SEED, case)
    with xd.init():
        group = xd.LowLatencyGroup(
            num_experts=6,
            max_topk=3,
            max_tokens_per_rank=6,
            hidden=HIDDEN,
            receive="by_expert",
            dtype=torch.float32,
            wire_formats=["fp8"],
        )
        topk_idx = torch.tensor(batch.topk_idx[me.rank])
        received = xd.ll_dispatch(group, torch.tensor(batch.x[me.rank]).float(), topk_idx)
        rows = results_of(batch, me.num_ranks)
        want = batch.routing.combine(me.rank, rows, None, "fp8_block128")
        expert_out = torch.tensor(rows[me.rank])
        assert_equal("whole", xd.ll_combine(received.plan, expert_out, wire="fp8"), want)
        sent = xd.ll_combine_send(received.plan, expert_out, wire="fp8_block128")
        assert_equal("halves", sent.receive(), want)
        for call in (xd.ll_combine, xd.ll_combine_send):
            with pytest.raises(
                ValueError, match=r"wire: .* group's wire_formats = \('fp8',\), got "
            ):
                call(received.plan, expert_out, wire="float32")


@on_ranks(2)
def test_peers_are_told_of_a_wire_that_does_not_exist(me: Rank) -> None:
    batch = Batch(SEED, ragged(me, HIDDEN))
    with xd.init():
        group = batch.group(torch.float32, wire_formats=["fp8"])
        plan = group.prepare(batch.local(me.rank)[0])
        expert_out = torch.ones(group.rows, HIDDEN)
        problem = "wire: expected one of" if me.rank == 0 else "rank 0"
        with pytest.raises(ValueError if me.rank == 0 else Mismatch, match=problem):
            xd.combine(plan, expert_out, wire="logfmt" if me.rank == 0 else "fp8")
        text = (
            r"wire: expected 'same' or one of the group's wire_formats = \('fp8',\), got 'float32'"
        )
        with pytest.raises(ValueError, match=f"combine: {text}"):
            xd.combine(plan, expert_out, wire="float32")
        narrow = r"expert_out: expected a multiple of 128 columns with wire = 'fp8', got .* 64\)"
        with pytest.raises(ValueError, match=f"combine: {narrow}"):
            xd.combine(plan, expert_out[:, :64].contiguous(), wire="fp8")
        xd.combine(plan, expert_out, wire="fp8")


@on_ranks(1)
def test_a_compiled_combine_keeps_its_wire(me: Rank) -> None:
    batch = Batch(SEED, ragged(me, HIDDEN))
    rows = results_of(batch, me.num_ranks)
    with xd.init():
        group = batch.group(torch.float32, wire_formats=["fp8"])
        plan = group.prepare(batch.local(me.rank)[0])
        given = np.zeros((group.rows, HIDDEN), np.float32)
        given[: len(rows[0])] = rows[0]

        def combined(expert_out: torch.Tensor) -> torch.Tensor:
            return xd.combine(plan, expert_out, wire="fp8")

        compiled = torch.compile(combined, backend="eager", fullgraph=True)
        want = batch.routing.combine(0, rows, None, "fp8_block128")
        assert_equal("compiled", compiled(torch.tensor(given)), want)
