"""Grouped products of rows and matrices that are fp8 already, with scales of two forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument
from crossdock.torch.gated import gated
from support import Rank, on_ranks
from torch_support import joined, normal, where

FP8 = torch.float8_e4m3fn
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


@on_ranks(1)
def test_activations_in_fp8_are_those_of_float32_in_blocks(me: Rank) -> None:
    ffn = 256
    with joined():
        inner = normal(11, sum(COUNTS) + TAIL, 2 * ffn, dtype=torch.bfloat16)
        inner[1, :128] = 0
        offsets = torch.tensor([0, *COUNTS], device=where()).cumsum(0).to(torch.int32)
        weights = normal(12, len(inner), dtype=torch.float32)
        group = xd.EpGroup(num_experts=4, max_topk=1, max_tokens_per_rank=8, hidden=16)
        wide = gated(inner.float(), offsets, "silu", weights=weights, group=group.handle)
        wide = wide[:-TAIL].unflatten(1, (-1, 128))
        compiled: Any = torch.compile(xd.gated_fp8, fullgraph=True, backend="aot_eager")
        for function, powers in ((xd.gated_fp8, False), (compiled, True)):
            codes, scales = function(inner, offsets, weights=weights, powers=powers)
            assert codes.dtype == torch.float8_e4m3fn and scales.shape == (len(inner), 2)
            most = wide.abs().amax(-1)
            # Torch multiplies by the inverse of a number on GPUs; it divides by a tensor.
            wanted = torch.where(most == 0, 1.0, most / torch.full_like(most, 448))
            if powers:  # the least that is no smaller
                part, exponent = torch.frexp(wanted)
                wanted = torch.ldexp(torch.ones_like(part), exponent - (part == 0.5).int())
            assert torch.equal(scales[:-TAIL], wanted)
            numbers = (wide * (1 / wanted)[..., None]).to(torch.float8_e4m3fn).flatten(1)
            assert torch.equal(codes[:-TAIL].view(torch.uint8), numbers.view(torch.uint8))
        for change, text in (
            ({"activation": "tanh"}, "activation: expected one of"),
            (
                {"inner": inner[:, :192]},
                "inner: expected 2 F columns, F a multiple of 128, got 192",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                xd.gated_fp8(**{"inner": inner, "offsets": offsets} | change)


@on_ranks(2)
def test_a_layer_of_fp8_is_near_that_of_bfloat16(me: Rank) -> None:
    """Rows travel as fp8, and all products are of fp8; results come back in bfloat16."""
    hidden, ffn, blocks = 256, 128, (2, 2, 2)  # scales of matrices [L, 2 F / 128, H / 128]
    with joined():
        sizes = {"num_experts": 4, "max_topk": 2, "max_tokens_per_rank": 8, "hidden": hidden}
        group = xd.EpGroup(dtype=torch.bfloat16, **sizes)
        x = normal(5 + me.rank, 8, hidden, dtype=torch.bfloat16)
        ids = torch.tensor([[t % 4, (t + 1) % 4] for t in range(8)], device=where())
        weights = torch.full(ids.shape, 0.5, device=where())
        w_in = (normal(20 + me.rank, 2, 2 * ffn, hidden, dtype=torch.float32) / 16).to(FP8)
        w_out = (normal(30 + me.rank, 2, hidden, ffn, dtype=torch.float32) / 11).to(FP8)
        plan = group.prepare(ids)

        plain = xd.dispatch(plan, x, weights)
        inner = xd.grouped_mm(plain.tokens, w_in.bfloat16().transpose(1, 2), plan.offsets)
        gate, up = inner.chunk(2, dim=-1)
        rows = xd.grouped_mm(
            torch.nn.functional.silu(gate) * up, w_out.bfloat16().transpose(1, 2), plan.offsets
        )
        wanted = xd.combine(plan, rows, plain.weights)

        received = xd.dispatch(plan, x, weights, quantise=True)
        ones = torch.ones(blocks, device=where())
        inner = xd.grouped_mm_scaled(
            received.tokens, w_in.transpose(1, 2), plan.offsets, received.scales, ones
        )
        codes, scales = xd.gated_fp8(inner, plan.offsets)
        rows = xd.grouped_mm_scaled(
            codes, w_out.transpose(1, 2), plan.offsets, scales, ones[:, :, :1]
        )
        got = xd.combine(plan, rows, received.weights)
        near = wanted.float().abs().max().item() / 16
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=near)
