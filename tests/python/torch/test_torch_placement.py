"""Groups with logical experts on torch tensors: what the binding adds to those of NumPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import Mismatch
from support import Rank, on_ranks

LOGICAL, SLOTS, HIDDEN, TOKENS = 6, 4, 16, 5  # slots of each of 2 ranks
OLD = [[0, 1, 2, -1], [3, 4, 5, -1]]
NEW = [[0, 1, 3, 5], [3, 4, 2, 0]]


def served(
    groups: tuple[xd.EpGroup, xd.LowLatencyGroup], weights: torch.Tensor, seed: int
) -> list[torch.Tensor]:
    """A batch through the experts, each of which multiplies by its weights, on both ways."""
    bulk, few = groups
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(TOKENS, LOGICAL, generator=generator).argsort(dim=1)[:, :2].contiguous()
    tokens = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).float()
    plan = bulk.prepare(ids)
    received = xd.dispatch(plan, tokens)
    slots = plan.row_experts().clamp(min=0)
    out = xd.combine(plan, received.tokens * weights[slots])
    rows = xd.ll_dispatch(few, tokens, ids)
    results = rows.tokens * weights[:, None]
    expected = tokens * (1 + ids).sum(dim=1, keepdim=True)
    return [out, xd.ll_combine(rows.plan, results), expected]


@on_ranks(2)
def test_experts_move_while_both_kinds_of_groups_serve_them(me: Rank) -> None:
    with xd.init(device="cpu", heap_bytes=1 << 20) as comm, torch.no_grad():
        sizes = {"num_experts": 2 * SLOTS, "num_logical_experts": LOGICAL, "max_topk": 2}
        sizes |= {"max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "dtype": torch.float32}
        bulk, few = groups = xd.EpGroup(**sizes), xd.LowLatencyGroup(**sizes)
        for group in groups:
            group.set_placement(OLD)
        weights = comm.empty_symmetric((SLOTS, HIDDEN), torch.float32)
        weights.copy_(torch.tensor(OLD[me.rank])[:, None].add(1))
        out, decoded, expected = served(groups, weights, me.rank)
        assert torch.equal(out, expected)
        assert torch.equal(decoded, expected)
        assert bulk.loads(clear=True).sum() == 2 * 2 * TOKENS
        xd.move_experts(groups, [weights], OLD, NEW)
        assert weights[:, 0].tolist() == [1 + expert for expert in NEW[me.rank]]
        out, decoded, expected = served(groups, weights, 7 + me.rank)
        assert torch.equal(out, expected)
        assert torch.equal(decoded, expected)
        for group in groups:
            wrong = NEW if me.rank == 0 else NEW[:1]
            kind = Mismatch if me.rank == 0 else ValueError
            with pytest.raises(kind, match="rank 1|expected the expert of each of 8 slots"):
                group.set_placement(wrong)
        move = functools.partial(xd.move_experts, bulk, old=NEW, new=OLD)
        for tensor in (weights.t(), weights[:, ::2]):
            with pytest.raises(Mismatch if me.rank == 0 else ValueError):
                move([weights if me.rank == 0 else tensor])


@on_ranks(2)
def test_a_layer_that_is_rebalanced_gives_the_same_bits(me: Rank) -> None:
    with xd.init(device="cpu"), torch.inference_mode():
        sizes = {"num_experts": 2 * SLOTS, "num_logical_experts": LOGICAL, "max_topk": 2}
        sizes |= {"max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "dtype": torch.float32}
        group = xd.EpGroup(**sizes)
        torch.manual_seed(3)
        # Only experts 0 to 3 are chosen, which are in the slots of rank 0 at first. One choice has
        # all the weight, so that its sum has one term however experts lie.
        ids = torch.tensor([[0, 1], [2, 0], [3, 0], [0, 3], [1, 0]])

        def router(tokens: torch.Tensor) -> xd.Routing:
            weights = torch.tensor([1.0, 0.0]).expand(len(tokens), 2).contiguous()
            return xd.Routing(ids[: len(tokens)], weights)

        layer = xd.MoELayer(
            HIDDEN, 8, LOGICAL, 2, group=group, router=router, decode_tokens=2
        ).eval()
        x = torch.randn(TOKENS, HIDDEN)
        before = [layer(x).hidden, layer(x[:2], decode=True).hidden]
        moves = xd.rebalance(layer)
        assert len(moves) > 0 or me.rank == 0
        assert group.placement is not None
        assert np.isin(group.placement[1], [0, 1, 2, 3]).any()
        assert torch.equal(before[1], before[0][:2])
        after = [layer(x).hidden, layer(x[:2], decode=True).hidden]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(ValueError, match="expected one in eval mode"):
            xd.rebalance(layer.train())
