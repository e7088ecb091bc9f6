"""Products over the zones of a receive tensor: values, gradients, and what they must never read."""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
from crossdock.torch import grouped_mm
from support import Rank, on_ranks
from torch_support import where

# Rows of each of four zones; three more rows belong to no zone.
COUNTS = (3, 0, 5, 1)
TAIL = 3
INNER, OUTER = 8, 6


def small_integers(*shape: int, seed: int) -> torch.Tensor:
    """Numbers that are exact in float32 for any order of sums."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device="cpu").float().to(where())


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with a poisoned tail, matrices, offsets."""
    x = small_integers(sum(COUNTS) + TAIL, INNER, seed=1)
    x[-TAIL:] = float("nan")
    weight = small_integers(len(COUNTS), INNER, OUTER, seed=2)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0).to(torch.int32)
    return x.requires_grad_(), weight.requires_grad_(), offsets


def zones(offsets: torch.Tensor) -> list[slice]:
    bounds = offsets.tolist()
    return [slice(first, end) for first, end in zip(bounds, bounds[1:])]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_zone_is_multiplied_by_its_own_matrix(compiled: bool) -> None:
    x, weight, offsets = operands()
    function = (
        torch.compile(grouped_mm, fullgraph=True, backend="aot_eager") if compiled else grouped_mm
    )
    y = function(x, weight, offsets)
    grad = small_integers(*y.shape, seed=3)
    grad[-TAIL:] = float("nan")
    y.backward(grad)
    assert y.shape == (sum(COUNTS) + TAIL, OUTER)
    for rows, matrix, matrix_grad in zip(zones(offsets), weight, weight.grad):
        assert torch.equal(y[rows], x[rows] @ matrix)
        assert torch.equal(x.grad[rows], grad[rows] @ matrix.t())
        assert torch.equal(matrix_grad, x[rows].t() @ grad[rows])


def test_gradients_of_transposed_matrices_are_their_own() -> None:
    x, weight, offsets = operands()
    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_()
    grad = small_integers(x.shape[0], OUTER, seed=4)
    grouped_mm(x, stored.transpose(1, 2), offsets).backward(grad)
    for rows, matrix_grad in zip(zones(offsets), stored.grad):
        assert torch.equal(matrix_grad, (x[rows].t() @ grad[rows]).t())


def test_operators_pass_opcheck() -> None:
    x, weight, offsets = operands()
    offsets[-1] = x.shape[0]  # no tail: it may hold anything, which opcheck would compare
    x = x.detach().nan_to_num().requires_grad_()
    operators = torch.ops.crossdock
    torch.library.opcheck(operators.grouped_mm.default, (x, weight, offsets, False, 0, 0))
    y = small_integers(x.shape[0], OUTER, seed=5)
    torch.library.opcheck(operators.grouped_mm.default, (y, weight, offsets, True, 0, 0))
    torch.library.opcheck(operators.grouped_outer.default, (x.detach(), y, offsets, 0))


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            {"weight": torch.zeros(4, INNER, OUTER, dtype=torch.bfloat16)},
            TypeError,
            "weight: expected dtype torch.float32 as x has, got torch.bfloat16",
        ),
        (
            {"offsets": torch.zeros(5, dtype=torch.int64)},
            TypeError,
            "offsets: expected dtype torch.int32, got torch.int64",
        ),
        (
            {"offsets": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"offsets: expected shape \[5\], got \(4,\)",
        ),
        (
            {"weight": torch.zeros(4, INNER + 1, OUTER)},
            ValueError,
            r"weight: expected shape \[experts, 8, columns\], got \(4, 9, 6\)",
        ),
        ({"x": torch.zeros(12, 1, INNER)}, ValueError, r"x: expected 2 dimensions"),
    ],
)
def test_wrong_operands_are_named(change: dict, error: type[Exception], text: str) -> None:
    arguments = dict(zip(("x", "weight", "offsets"), operands())) | change
    with pytest.raises(error, match=f"^grouped_mm: {text}"):
        grouped_mm(**arguments)


@on_ranks(2)
def test_an_error_of_a_product_names_the_rank(me: Rank) -> None:
    x, weight, offsets = operands()
    place = rf"\[rank {me.rank} of 2\]$"
    with xd.init(), pytest.raises(ValueError, match=f"grouped_mm: x: .* {place}"):
        grouped_mm(x[None], weight, offsets)
    with xd.init() as comm:
        group = xd.EpGroup(num_experts=2, hidden=16, max_topk=1, max_tokens_per_rank=1, comm=comm)
        with pytest.raises(TypeError, match=f"grouped_mm_fp8: offsets: .* {place}"):
            xd.grouped_mm_fp8(x, weight, offsets.long(), grad_group=group.handle)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_on_the_cpu_multiplies_by_the_library(me: Rank, dtype: torch.dtype) -> None:
    x, weight, offsets = (value.detach().cpu() for value in operands())
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    grad = small_integers(x.shape[0], OUTER, seed=3).cpu().to(dtype)
    grad[-TAIL:] = float("nan")
    every_other = torch.stack([weight, weight], -1)[..., 0]  # no stride of it is 1

    def by_torch(*_: object, **__: object) -> None:
        raise AssertionError("torch multiplied")

    with xd.init(device="cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", by_torch)
        y = grouped_mm(x, every_other, offsets)
        y.backward(grad)
    for rows, matrix, matrix_grad in zip(zones(offsets), weight, weight.grad):
        assert torch.equal(y[rows], x[rows] @ matrix)
        assert torch.equal(x.grad[rows], grad[rows] @ matrix.t())
        assert torch.equal(matrix_grad, x[rows].t() @ grad[rows])
