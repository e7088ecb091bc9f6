"""Linear layers whose operands are made fp8 on the way, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import settle
from tp_support import RAGGED, Spread, context, equal, whole

OPS = torch.ops.crossdock
K, N = 32, 16


def linear(spread: Spread, where: tp.TpContext, weight, **options) -> torch.Tensor:
    x, _, bias = spread
    call = {"all_gather": tp.column_parallel_linear, "reduce_scatter": tp.row_parallel_linear}
    return call[spread.operation](
        x, weight, bias, where, fp8=True, tokens_per_rank=spread.tokens, **options
    )


@on_ranks(2, timeout=200)
def test_layers_in_fp8_and_their_gradients_are_exact_for_whole_numbers(me: Rank) -> None:
    """Whole numbers are exact in fp8, whatever their scale, which differs between ranks."""
    sizes = RAGGED[me.num_ranks]
    for compiled in (False, True):
        torch._dynamo.reset()
        with xd.init():
            where = context(sizes, K, torch.bfloat16)
            for operation in ("all_gather", "reduce_scatter"):
                ways = [{}, {"fused_wgrad": True}]
                if operation == "all_gather":
                    ways.append({"save_gathered": False})
                for options in ways[:1] if compiled else ways:
                    options_of_x = {"dtype": torch.bfloat16, "factors": (0.5, 2)}
                    spread = Spread(me, operation, k=K, n=N, **options_of_x)
                    weight = spread.leaves[1]
                    if "fused_wgrad" in options:
                        weight.main_grad = torch.ones(N, K, device=weight.device)

                    def call(weight, spread=spread, options=options):
                        return linear(spread, where, weight, **options)

                    if compiled:
                        call = torch.compile(call, fullgraph=True, backend="aot_eager")
                    out = call(weight)
                    assert out.dtype == torch.bfloat16
                    out.backward(spread.grad)
                    settle(where)
                    if "fused_wgrad" in options:
                        assert weight.grad is None
                        weight.grad = (weight.main_grad - 1).to(weight.dtype)
                    spread.check(out, f"{operation} {options}")


@on_ranks(2)
def test_operands_are_rounded_once(me: Rank) -> None:
    """Other numbers are rounded once, by a scale for the largest."""
    torch.manual_seed(7)
    rows = 8 * me.num_ranks

    def in_fp8(x: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.floor(torch.log2(448 / x.abs().max())))
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    with xd.init() as comm:
        where = context((8,), K, torch.float32)
        x = torch.randn(rows, K, device="cpu").to(comm.device) * 1000
        weight = torch.randn(N, K, device="cpu").to(comm.device) / 100
        parts = x.chunk(me.num_ranks)
        want = F.linear(torch.cat([in_fp8(part) for part in parts]), in_fp8(weight))
        with torch.no_grad():
            out = tp.column_parallel_linear(parts[me.rank], weight, None, where, fp8=True)
        close = {"rtol": 1e-3, "atol": 1e-2}
        torch.testing.assert_close(out, want, **close)
        with torch.no_grad():
            zeros = tp.column_parallel_linear(
                torch.zeros_like(parts[0]), weight, None, where, fp8=True
            )
        equal("zeros", zeros, torch.zeros_like(want))
        module = tp.SequenceParallelMLP(K, 64, fp8=True, context=where)
        out = module(parts[me.rank] / 1000)
        out.sum().backward()
        settle(where)
        assert out.isfinite().all() and module.linear_in.weight.grad.isfinite().all()
        with pytest.raises(ValueError, match="fp8: expected False without sequence_parallel"):
            tp.column_parallel_linear(x, weight, None, where, fp8=True, sequence_parallel=False)


@on_ranks(2)
def test_what_is_not_finite_becomes_nan(me: Rank) -> None:
    """An infinity or NaN stays one: no scale makes it a number that a sum could hide."""
    with xd.init():
        where = context((4,), 16, torch.bfloat16)
        weight = whole(2, 16, 16, dtype=torch.bfloat16)
        for value in (torch.inf, -torch.inf, torch.nan):
            x = whole(1, 4, 16, dtype=torch.bfloat16)
            x[1, 2] = value
            options = {"fp8": True}
            out = tp.column_parallel_linear(x, weight, None, where, **options)
            settle(where)
            assert out.isnan().all(), value
            bad = weight.clone()
            bad[0, 0] = value
            out = tp.row_parallel_linear(
                x.nan_to_num(0, 0, 0).repeat(me.num_ranks, 1), bad, None, where, **options
            )
            settle(where)
            assert out.isnan().all(), value


@on_ranks(2)
def test_gradients_beside_small_and_large_numbers_of_float16(me: Rank) -> None:
    """Numbers of float16 at both its ends, whose scales float16 does not have."""
    sizes = RAGGED[me.num_ranks]
    with xd.init():
        where = context(sizes, K, torch.float16)
        for operation in ("all_gather", "reduce_scatter"):
            for factor in (2.0**-20, 2.0**-22, 2.0**8):  # of numbers up to 1
                options = {"dtype": torch.float16, "bias": False, "factors": (factor, 2 * factor)}
                spread = Spread(me, operation, k=K, n=N, **options)
                out = linear(spread, where, spread.leaves[1])
                out.backward(spread.grad)
                settle(where)
                spread.check(out, f"{operation} {factor}")


def test_opcheck_of_fp8_layers():
    with xd.init():
        where = context((16,), K, torch.float32)
        a = whole(1, 16, K).requires_grad_()
        b = whole(2, N, K).requires_grad_().t()
        only = ("test_autograd_registration", "test_faketensor")
        for keep in (True, False):
            arguments = (a, b, None, None, where.order, where.handle, None, 0, keep, 3)
            torch.library.opcheck(OPS.tp_fp8_all_gather_matmul.default, arguments, test_utils=only)
        torch.library.opcheck(
            OPS.tp_fp8_matmul_reduce_scatter.default, (*arguments[:-2], 3), test_utils=only
        )
