"""Grouped products of rows and matrices that are fp8 already, with scales of two forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument
from support import Rank, on_ranks
from torch_support import joined, normal, where

COUNTS, TAIL = (3, 0, 5, 8), 4  # rows of each of four zones; rows of nobody


@on_ranks(1)
@pytest.mark.parametrize("by", ["blocks", "rows"])
def test_products_of_fp8_take_its_scales(me: Rank, by: str) -> None:
    """Scales are powers of two and elements small whole numbers, so that sums are exact."""
    inner, outer = 272, 144  # two blocks and a part; one and a part
    with joined():
        generator = torch.Generator("cpu").manual_seed(7)

        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator, device="cpu").to(
                torch.float8_e4m3fn
            )

        def powers(*shape: int) -> torch.Tensor:
            return 2.0 ** torch.randint(-2, 2, shape, generator=generator, device="cpu")

        x, weight = whole(sum(COUNTS) + TAIL, inner), whole(len(COUNTS), outer, inner)
        offsets = torch.tensor([0, *COUNTS], device="cpu").cumsum(0).to(torch.int32)
        if by == "blocks":
            x_scales, weight_scales = powers(len(x), 3), powers(len(COUNTS), 2, 3)
            of_x = x_scales.repeat_interleave(128, 1)[:, :inner]
            of_weight = weight_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
            of_weight = of_weight[:, :outer, :inner]
        else:
            x_scales, weight_scales = powers(len(x)), powers(len(COUNTS), outer)
            of_x, of_weight = x_scales[:, None], weight_scales[:, :, None]
        given = [one.to(where()) for one in (x, weight, offsets, x_scales, weight_scales)]
        given[1] = given[1].transpose(1, 2)
        compiled: Any = torch.compile(xd.grouped_mm_scaled, fullgraph=True, backend="aot_eager")
        for product in (xd.grouped_mm_scaled, compiled):
            y = product(*given).cpu()
            assert y.dtype == torch.bfloat16 and y.shape == (len(x), outer)
            for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
                rows = slice(first, end)
                matrix = (weight[expert].float() * of_weight[expert]).T
                expected = (x[rows].float() * of_x[rows]) @ matrix
                assert torch.equal(y[rows], expected.bfloat16())
        for change, error, text in (
            ({0: given[0].float()}, TypeError, "weight: expected dtype torch.float32"),
            ({0: given[0].bfloat16(), 1: given[1].bfloat16()}, TypeError, "x: expected dtype"),
            ({3: given[3].double()}, TypeError, "x_scales: expected a float32 tensor, got"),
            ({4: None}, TypeError, "weight_scales: expected a float32 tensor, got NoneType"),
            ({1: given[1].contiguous()}, InvalidArgument, "b: has stride 144 along K, expected 1"),
            ({3: given[3][:-1]}, InvalidArgument, "a_scale: has 19 rows, expected 20"),
        ):
            with pytest.raises(error, match=text):
                xd.grouped_mm_scaled(*(change.get(i, one) for i, one in enumerate(given)))


@on_ranks(2)
def test_rows_that_dispatch_brings_in_fp8_are_multiplied_as_they_are(me: Rank) -> None:
    with joined():
        hidden, outer = 256, 128
        group = xd.EpGroup(
            num_experts=4, max_topk=2, max_tokens_per_rank=8, hidden=hidden, dtype=torch.bfloat16
        )
        x = normal(5 + me.rank, 8, hidden, dtype=torch.bfloat16)
        ids = torch.tensor([[t % 4, (t + 1) % 4] for t in range(8)], device=where())
        plan = group.prepare(ids)
        plain = xd.dispatch(plan, x).tokens
        received = xd.dispatch(plan, x, quantise=True)
        weight = normal(9, 2, outer, hidden, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        ones = torch.ones(2, 1, 2, device=where())
        y = xd.grouped_mm_scaled(
            received.tokens, weight.transpose(1, 2), plan.offsets, received.scales, ones
        )
        for expert in range(2):
            rows = slice(int(plan.offsets[expert]), int(plan.offsets[expert + 1]))
            wanted = plain[rows].float() @ weight[expert].float().T
            near = wanted.abs().max().item() / 32
            torch.testing.assert_close(y[rows].float(), wanted, rtol=0, atol=near)
