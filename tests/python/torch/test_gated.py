"""The gated activation between two products: values and gradients, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch.gated import FUSED, gated
from crossdock.torch.layers.experts import ACTIVATIONS
from torch_support import where

ROWS, COLUMNS, END = 7, 24, 5
EPSILON = {torch.float32: 2**-19, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return (2 * values).to(where(), dtype)


@pytest.fixture
def group():
    with xd.init():
        yield xd.EpGroup(num_experts=2, hidden=8, max_topk=1, max_tokens_per_rank=8)


def offsets() -> torch.Tensor:
    return torch.tensor([0, 2, END], dtype=torch.int32, device=where())


def test_every_activation_of_the_library_is_one_of_the_experts() -> None:
    assert set(FUSED) <= set(ACTIVATIONS)


def test_elements_that_are_negated_when_they_are_read_count_as_such(group) -> None:
    inner = drawn(ROWS, 2 * COLUMNS, seed=6)
    view = torch._neg_view(inner)
    got, wanted = (gated(x, offsets(), "silu", group=group.handle) for x in (view, view.clone()))
    assert torch.equal(got[:END], wanted[:END])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("activation", sorted(FUSED))
def test_values_and_gradients_are_those_of_float64(group, activation, dtype, weighted) -> None:
    inner = drawn(ROWS, 2 * COLUMNS, seed=1, dtype=dtype).requires_grad_()
    weights = drawn(ROWS, seed=2).requires_grad_() if weighted else None
    grad = drawn(ROWS, COLUMNS, seed=3, dtype=dtype)
    out = gated(inner, offsets(), activation, group=group.handle, weights=weights)
    out.backward(grad)

    wide = [None if t is None else t.detach().double().requires_grad_() for t in (inner, weights)]
    gate, up = wide[0].chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    if weighted:
        expected = expected * wide[1][:, None]
    expected.backward(grad.double())
    bound = {"rtol": EPSILON[dtype], "atol": 4 * EPSILON[dtype]}
    torch.testing.assert_close(out[:END].double(), expected[:END], **bound)
    torch.testing.assert_close(inner.grad[:END].double(), wide[0].grad[:END], **bound)
    if weighted:
        torch.testing.assert_close(
            weights.grad[:END].double(), wide[1].grad[:END], rtol=2**-18, atol=2**-14
        )


def test_rows_behind_the_last_zone_are_neither_read_nor_written(group) -> None:
    inner = drawn(ROWS, 2 * COLUMNS, seed=1)
    inner[END:] = float("nan")
    operators, number = torch.ops.crossdock, FUSED["silu"]
    out = operators.gated(inner, offsets(), None, number, group.handle)
    gate, up = inner.chunk(2, dim=-1)
    torch.testing.assert_close(out[:END], (F.silu(gate) * up)[:END])
    assert torch.equal(
        out[:END], operators.gated(inner[:END].clone(), offsets(), None, number, group.handle)
    )


def test_operators_pass_opcheck(group) -> None:
    all_rows = torch.tensor([0, ROWS], dtype=torch.int32, device=where())
    inner = drawn(ROWS, 2 * COLUMNS, seed=1).requires_grad_()
    weights, grad = drawn(ROWS, seed=2).requires_grad_(), drawn(ROWS, COLUMNS, seed=3)
    for given in (None, weights):
        arguments = (inner, all_rows, given, FUSED["silu"], group.handle)
        torch.library.opcheck(torch.ops.crossdock.gated.default, arguments)
        detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
        torch.library.opcheck(torch.ops.crossdock.gated_bwd.default, (grad, *detached))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"activation": "tanh"}, "gated: activation: expected one of .*, got 'tanh'"),
        ({"inner": torch.zeros(3, 5)}, r"gated: inner: expected shape \[rows, 2 F\], got \(3, 5\)"),
    ],
)
def test_a_bad_argument_is_named(group, change, text) -> None:
    arguments = {"inner": drawn(3, 4, seed=1), "offsets": offsets(), "activation": "silu"} | change
    with pytest.raises(ValueError, match=text):
        gated(**arguments, group=group.handle)
