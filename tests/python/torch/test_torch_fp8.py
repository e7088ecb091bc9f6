"""fp8 rows: quantised on the way with a straight-through gradient, or given with their scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from reference import QUANTISE_WAYS, quantised
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, ragged, where

SEED = 70
HIDDEN = 256
LAYOUTS = ("expert_major", "rank_major")


def rule(x: torch.Tensor, name: str = "fp8_block128") -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that the library makes of bfloat16 rows."""
    elements, scales = quantised(x.float().numpy(), name)
    narrow = torch.from_numpy(elements.view(np.uint8)).view(torch.float8_e4m3fn)
    return narrow, torch.from_numpy(scales.astype(np.float32))


def _placed(batch: Batch, rank: int, values: list[torch.Tensor]) -> np.ndarray:
    """The rows that `rank` receives of all ranks' values, as float32."""
    return batch.routing.dispatch(rank, [value.float().numpy() for value in values])


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("expert_major", "fp8_block128"),
        ("rank_major", "fp8_block128"),
        ("expert_major", "fp8_block128_pow2"),
        ("rank_major", "fp8_block128_e8m0"),
        ("expert_major", "mxfp8"),
    ],
)
@on_ranks(4)
def test_quantised_rows_and_their_gradient(me: Rank, layout: str, name: str) -> None:
    batch = Batch(SEED, ragged(me, HIDDEN), layout)
    inputs = []
    for rank in range(me.num_ranks):
        random = torch.Generator().manual_seed(SEED + rank)
        x = torch.randn(batch.tokens[rank], HIDDEN, generator=random, device="cpu")
        inputs.append(x.to(torch.bfloat16))
    pairs = [rule(x, name) for x in inputs]
    block = QUANTISE_WAYS[name][0]
    tokens, scales = (_placed(batch, me.rank, values) for values in zip(*pairs))
    with xd.init():
        group = batch.group(torch.bfloat16)
        topk_idx, _, weights, _ = batch.local(me.rank)
        x = inputs[me.rank].to(where()).requires_grad_()
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights, quantise=name)
        rows = len(tokens)
        assert received.tokens.dtype == torch.float8_e4m3fn
        assert not received.tokens.requires_grad
        assert_equal("tokens", received.tokens[:rows], tokens)
        assert received.scales.dtype == getattr(torch, QUANTISE_WAYS[name][2])
        assert_equal("scales", received.scales[:rows].float(), scales)
        wide = xd.dequantise(received, torch.float32)
        assert_equal("rows", wide[:rows], tokens * np.repeat(scales, block, 1))
        assert int(torch.count_nonzero(wide[rows:])) == 0

        # The gradient of a row is a small integer: its source and its place in the row.
        grads = [
            np.zeros((batch.routing.total(r), HIDDEN), np.float32) for r in range(me.num_ranks)
        ]
        for rank, grad in enumerate(grads):
            grad[:] = (np.arange(len(grad)) % 5 + rank)[:, None] - 3
        grad = torch.zeros_like(wide)
        grad[:rows] = torch.from_numpy(grads[me.rank])
        wide.backward(grad)
        assert x.grad.dtype == torch.bfloat16
        assert_equal("gradient of x", x.grad, batch.routing.combine(me.rank, grads))
        assert int(torch.count_nonzero(weights.grad)) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_given_scales_travel_with_their_rows(me: Rank, layout: str) -> None:
    batch = Batch(SEED + 1, ragged(me, HIDDEN), layout)
    pairs = [rule(torch.from_numpy(x).bfloat16()) for x in batch.x]
    tokens, scales = (_placed(batch, me.rank, values) for values in zip(*pairs))
    with xd.init():
        group = batch.group(torch.bfloat16)
        topk_idx, _, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        elements, beside = (part.to(where()) for part in pairs[me.rank])
        elements.requires_grad_()  # fp8 has no gradient: that is ignored
        received = xd.dispatch(plan, elements, weights, scales=beside)
        assert_equal("tokens", received.tokens[: len(tokens)], tokens)
        assert_equal("scales", received.scales[: len(tokens)], scales)
        columns = xd.dispatch(plan, elements, weights, scales=beside.t().contiguous().t())
        assert_equal("scales by columns", columns.scales[: len(tokens)], scales)
        assert received.link is None
        with pytest.raises(ValueError, match="quantise=True"):
            xd.dequantise(received)
        # Weights have a gradient although the rows have none.
        received.weights.sum().backward()
        assert elements.grad is None
        ones = [
            np.ones_like(batch.routing.dispatch_weights(r, batch.weights))
            for r in range(me.num_ranks)
        ]
        assert_equal(
            "gradient of topk_weights",
            weights.grad,
            batch.routing.dispatch_bwd_weights(me.rank, ones),
        )


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.8 has FP4 rows")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numbers", [16, 32], ids=["nvfp4", "mxfp4"])
@on_ranks(2)
def test_rows_of_fp4_travel_with_their_scales(me: Rank, layout: str, numbers: int) -> None:
    """As the same bytes do without that name."""
    batch = Batch(SEED + 4, ragged(me, HIDDEN), layout)
    kind = torch.float8_e4m3fn if numbers == 16 else torch.float8_e8m0fnu
    generator = torch.Generator().manual_seed(SEED + me.rank)
    tokens, columns = batch.tokens[me.rank], HIDDEN // numbers
    shapes = (tokens, HIDDEN // 2), (tokens, columns)
    rows, scales = (
        torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
        for shape in shapes
    )
    rows, scales = rows.to(where()), scales.to(where())
    with xd.init(), torch.no_grad():
        group = batch.group(torch.bfloat16, max_scale_bytes=columns)
        topk_idx, *_ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        plain = xd.dispatch(plan, rows, scales=scales)
        named = xd.dispatch(plan, rows.view(torch.float4_e2m1fn_x2), scales=scales.view(kind))
        assert named.tokens.dtype == torch.float4_e2m1fn_x2
        assert named.scales is not None and plain.scales is not None
        assert named.scales.dtype == kind
        used = int(plan.total)
        for one, other in ((named.tokens, plain.tokens), (named.scales, plain.scales)):
            assert torch.equal(one.view(torch.uint8)[:used], other[:used])
        wrong = scales[:, 1:].contiguous().view(kind)
        with pytest.raises(ValueError, match="one for 16 or for 32 numbers"):
            xd.dispatch(plan, rows.view(torch.float4_e2m1fn_x2), scales=wrong)
