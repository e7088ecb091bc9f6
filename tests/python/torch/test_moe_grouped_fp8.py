"""Grouped products of fp8: what is rounded and what is not, gradients, and torch's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crossdock.torch as xd
from crossdock.torch import grouped_fp8
from support import Rank, on_ranks
from torch_support import joined, normal, where

COUNTS, TAIL = (3, 0, 5, 8), 4  # rows of each of four zones; rows of nobody
INNER, OUTER = 32, 48


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return normal(seed, *shape, dtype=torch.bfloat16)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and columns of very different sizes, rows of zeros and a poisoned tail."""
    x = drawn(sum(COUNTS) + TAIL, INNER, seed=1)
    x *= torch.logspace(-8, 8, len(x), base=2, device=where())[:, None].to(x.dtype)
    x[2] = 0
    x[-TAIL:] = float("nan")
    weight = drawn(len(COUNTS), INNER, OUTER, seed=2)
    weight *= torch.logspace(-8, 8, OUTER, base=2, device=where()).to(x.dtype)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0).to(torch.int32)
    return x.requires_grad_(), weight.requires_grad_(), offsets


def zones() -> list[slice]:
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    return [slice(end - rows, end) for end, rows in zip(ends, COUNTS)]


def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By the definition: scaled by the largest power of two that fits, and rounded."""
    most = x.float().abs().amax(dim, keepdim=True)
    scale = torch.where(most > 0, 2.0 ** torch.floor(torch.log2(448 / most)), 1.0)
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_elements_alone_are_rounded_and_gradients_are_those_before(compiled: bool) -> None:
    x, weight, offsets = operands()
    product: Any = xd.grouped_mm_fp8
    if compiled:
        product = torch.compile(product, fullgraph=True, backend="aot_eager")
    y = product(x, weight, offsets)
    grad = drawn(*y.shape, seed=3)
    y.backward(grad)
    plain = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
    xd.grouped_mm(*plain, offsets).backward(grad)
    torch.testing.assert_close(weight.grad, plain[1].grad, rtol=0, atol=0)
    for rows, matrix in zip(zones(), weight.detach()):
        expected = rounded(x.detach()[rows], 1) @ rounded(matrix, 0)
        torch.testing.assert_close(y[rows].float(), expected, rtol=2**-8, atol=1e-4)
        assert torch.equal(x.grad[rows], plain[0].grad[rows])


def test_torchs_kernel_takes_the_operands_as_they_are_given() -> None:
    x, weight, offsets = operands()
    rows, matrices, row_scales, column_scales = (
        tensor.detach().to("meta") for tensor in grouped_fp8.in_fp8(x, weight)
    )
    # Torch checks types, strides and sizes of scales alike for its kernel and for "meta".
    y = torch._scaled_grouped_mm(
        rows,
        matrices,
        row_scales,
        column_scales,
        offs=offsets[1:].to("meta"),
        out_dtype=torch.bfloat16,
    )
    assert y.shape == (len(x), OUTER) and y.dtype == torch.bfloat16


def test_operator_passes_opcheck() -> None:
    x, weight, offsets = operands()
    x = x.detach().nan_to_num().requires_grad_()
    offsets[-1] = x.shape[0]  # no tail: it may hold anything, which opcheck would compare
    torch.library.opcheck(torch.ops.crossdock.grouped_mm_fp8.default, (x, weight, offsets, 0))


def test_an_infinite_element_spoils_its_row_alone() -> None:
    x, weight, offsets = operands()
    x = x.detach()
    x[0, 1] = float("inf")
    y = xd.grouped_mm_fp8(x, weight.detach(), offsets)
    assert y[0].isnan().all() and y[1:3].isfinite().all()


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"dtype": torch.float32}, TypeError, "x: expected dtype torch.bfloat16, got torch.float"),
        ({"inner": 24}, ValueError, r"multiples of 16, got \(4, 24, 48\)"),
        ({"outer": 40}, ValueError, r"multiples of 16, got \(4, 32, 40\)"),
    ],
)
def test_what_the_kernel_has_not_is_refused(change: dict, error: Any, text: str) -> None:
    sizes: dict[str, Any] = {"inner": INNER, "outer": OUTER, "dtype": torch.bfloat16} | change
    x = torch.zeros(16, sizes["inner"], dtype=sizes["dtype"])
    weight = torch.zeros(4, sizes["inner"], sizes["outer"], dtype=sizes["dtype"])
    with pytest.raises(error, match=text):
        xd.grouped_mm_fp8(x, weight, torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32))


@pytest.mark.parametrize(
    "sizes, dtype, text",
    [
        ((16, 24), torch.bfloat16, "hidden and ffn in multiples of 16, got 16 and 24"),
        (
            (32, 32),
            torch.float16,
            "expected dtype torch.bfloat16 or torch.float32, got torch.float16",
        ),
    ],
)
def test_experts_refuse_it_when_they_are_made(sizes: Any, dtype: torch.dtype, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        xd.GroupedExperts(2, *sizes, fp8=True, dtype=dtype, device="cpu")


HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 32, 48, 4, 2, 24


@on_ranks(1, 2)
def test_a_layer_with_fp8_experts_is_near_to_one_without(me: Rank) -> None:
    """The layer learns alike with both kinds of products."""
    with joined() as comm:
        layers = []
        for fp8 in (False, True):
            torch.manual_seed(3)
            place: Any = {"dtype": torch.bfloat16, "device": where()}
            experts = xd.GroupedExperts(EXPERTS // me.num_ranks, HIDDEN, FFN, fp8=fp8, **place)
            options: Any = {"experts": experts, "dtype": torch.bfloat16, "comm": comm}
            options["max_tokens_per_rank"] = TOKENS
            layers.append(xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, **options))
        x = drawn(TOKENS, HIDDEN, seed=7 + me.rank)
        plain, rough = (layer(x).hidden for layer in layers)
        assert not torch.equal(plain, rough)
        error = (rough - plain).float().norm() / plain.float().norm()
        assert error < 0.1, error  # an element of fp8 has 4 significant bits
        for layer in layers:
            layer(x).hidden.float().square().sum().backward()
        for one, other in zip(*(layer.experts.parameters() for layer in layers)):
            one, other = (xd.local_tensor(tensor.grad).float() for tensor in (one, other))
            assert (other - one).norm() < 0.15 * one.norm()
