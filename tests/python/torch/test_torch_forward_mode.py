"""There are no derivatives in forward mode: a tangent is refused, and does not end in silence."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import Batch, normal, one_rank_errs
from tp_support import context

SEED = 2718


@on_ranks(2)
def test_tangents_are_refused_and_the_peers_are_told(me: Rank) -> None:
    batch = Batch(SEED, ([5, 9], 4, 2, 16))
    with xd.init(), torch.no_grad(), forward_ad.dual_level():
        group = batch.group()
        ids, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(ids)
        received = xd.dispatch(plan, x, weights)
        slots_group = xd.LowLatencyGroup(
            num_experts=4, max_topk=2, max_tokens_per_rank=4, hidden=16, dtype=torch.float32
        )
        few, few_ids = normal(1, 4, 16), torch.tensor([[0, 1]] * 4, device=x.device)
        slots = xd.ll_dispatch(slots_group, few, few_ids)
        products = context((4,), 16, torch.float32)
        a, b = normal(2, 4, 16), normal(3, 16, 8)
        calls = [
            (group, xd.dispatch, {"plan": plan, "tokens": x, "topk_weights": weights}),
            (
                group,
                xd.combine,
                {"plan": plan, "expert_out": received.tokens, "weights": received.weights},
            ),
            (
                slots_group,
                xd.ll_dispatch,
                {"group": slots_group, "tokens": few, "topk_idx": few_ids},
            ),
            (slots_group, xd.ll_combine, {"plan": slots.plan, "expert_out": slots.tokens}),
            (products, tp.all_gather_matmul, {"a": a, "b": b, "context": products}),
            (products, tp.matmul_reduce_scatter, {"a": a, "b": b, "context": products}),
        ]
        for of, call, good in calls:
            for name, value in good.items():
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    continue
                dual = forward_ad.make_dual(value, torch.ones_like(value))
                text = rf"{name}: expected a tensor without a tangent.*rank 1 of {me.num_ranks}"
                one_rank_errs(me, 1, of, call, good, (NotImplementedError, text, {name: dual}))
            call(**good)  # all goes on
