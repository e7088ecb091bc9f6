"""A block with a router and experts of real numbers against one process that has all tokens."""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
from support import Rank, run_ranks
from torch_support import where

SEED, HIDDEN, EXPERTS, TOPK = 23, 32, 8, 3
TOKENS = (7, 0, 4, 1)  # of four ranks; two have the first two's


def _parameters(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Router [H, E] and experts [E, H, H]."""
    random = torch.Generator().manual_seed(SEED)
    router = _normal(random, HIDDEN, EXPERTS)
    experts = _normal(random, EXPERTS, HIDDEN, HIDDEN) / 6
    return router.to(dtype).requires_grad_(), experts.to(dtype).requires_grad_()


def _normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    """float64, the same on every device."""
    return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(where())


def _tokens(rank: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(SEED + 1 + rank)
    return _normal(random, TOKENS[rank], HIDDEN).to(dtype).requires_grad_()


def _route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, topk_idx = torch.topk((x @ router).softmax(-1), TOPK)
    return weights, topk_idx


def _loss(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() * torch.arange(1, HIDDEN + 1)).sum()


def _reference(num_ranks: int, dtype: torch.dtype = torch.float64):
    """Gradients of (x of each rank, router, experts) of the sum of the ranks' losses."""
    router, experts = _parameters(dtype)
    inputs = [_tokens(rank, dtype) for rank in range(num_ranks)]
    loss = torch.zeros((), dtype=dtype)
    for x in inputs:
        weights, topk_idx = _route(x, router)
        rows = torch.einsum("th,tkhj->tkj", x, experts[topk_idx]).tanh()
        loss = loss + _loss((rows * weights[:, :, None]).sum(1))
    loss.backward()
    return [x.grad for x in inputs], router.grad, experts.grad


def _block(me: Rank, layout: str):
    """This rank's gradients of (x, router, its experts) through crossdock."""
    router, experts = _parameters(torch.float32)
    x = _tokens(me.rank, torch.float32)
    local = EXPERTS // me.num_ranks
    first = me.rank * local
    with xd.init():
        group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=max(TOKENS),
            layout=layout,
            dtype=torch.float32,
        )
        weights, topk_idx = _route(x, router)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        if layout == "expert_major":
            rows = torch.cat(
                [
                    (received.tokens[begin:end] @ experts[first + e]).tanh()
                    for e, (begin, end) in enumerate(
                        zip(plan.offsets.tolist(), plan.offsets.tolist()[1:])
                    )
                ]
            )
            out = xd.combine(plan, rows, received.weights)
        else:
            every = torch.einsum("rh,ehj->rej", received.tokens, experts[first : first + local])
            mask = received.topk_idx[:, :, None] == torch.arange(local)
            scale = (mask * received.weights[:, :, None]).sum(1)
            out = xd.combine(plan, (every.tanh() * scale[:, :, None]).sum(1))
        _loss(out).backward()
    return x.grad.cpu(), router.grad.cpu(), experts.grad[first : first + local].cpu()


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_gradients_agree_with_one_process(layout):
    per_rank = run_ranks(len(TOKENS), _block, layout)
    inputs, router, experts = _reference(len(per_rank))

    def agree(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        # float32 sums of up to some hundred terms, against float64.
        torch.testing.assert_close(
            got.double(),
            expected.cpu(),
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text: f"{name} (seed {SEED}): {text}",
        )

    for rank, (grad_x, _, _) in enumerate(per_rank):
        agree(f"x of rank {rank}", grad_x, inputs[rank])
    agree("router", torch.stack([grads[1] for grads in per_rank]).sum(0), router)
    agree("experts", torch.cat([grads[2] for grads in per_rank]), experts)


def _second_derivative(me: Rank, part: str) -> None:
    with xd.init():
        group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=max(TOKENS),
            dtype=torch.float32,
        )
        x = _tokens(me.rank, torch.float32)
        weights = torch.ones(TOKENS[me.rank], TOPK, requires_grad=True)
        topk_idx = torch.arange(TOPK).expand(TOKENS[me.rank], -1).contiguous()
        plan = group.prepare(topk_idx)
        if part == "dispatch":
            received = xd.dispatch(plan, x, weights)
            loss, inputs = received.tokens.pow(2).sum(), x
        else:
            # Linear in the rows, whose gradient so depends on nothing but saved weights.
            rows = torch.ones(group.rows, HIDDEN, requires_grad=True)
            beside = torch.ones(group.rows, requires_grad=True)
            loss, inputs = xd.combine(plan, rows, beside).sum(), rows
        (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (again,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert torch.equal(grad, again)
        with pytest.raises(RuntimeError, match="second derivative of one of crossdock.torch's"):
            grad.pow(2).sum().backward()


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_second_derivatives_are_refused(part):
    run_ranks(len(TOKENS), _second_derivative, part)
