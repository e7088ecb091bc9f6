"""Products of spread matrices between processes: results and every gradient, exactly."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import settle
from tp_support import RAGGED, Spread, context, equal, rows_of, whole

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


OPERATIONS = {
    "all_gather": tp.all_gather_matmul,
    "reduce_scatter": tp.matmul_reduce_scatter,
    "all_reduce": tp.matmul_all_reduce,
}


def run(spread: Spread, where: tp.TpContext, **options) -> torch.Tensor:
    """The operation of `spread`, of which options may replace b."""
    x, weight, bias = spread
    given = {"b": weight.t(), "bias": bias, "activation": spread.activation}
    if spread.operation != "all_reduce":
        given["tokens_per_rank"] = spread.tokens
    return OPERATIONS[spread.operation](x, context=where, **given | options)


def ways_of(operation: str) -> list[dict]:
    """Options that decide what a call keeps for its backward pass."""
    return [{}, {"save_gathered": False}] if operation == "all_gather" else [{}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@on_ranks(4)
def test_products_and_their_gradients_are_exact(
    me: Rank, operation: str, dtype: torch.dtype
) -> None:
    sizes = RAGGED[me.num_ranks]
    ways = [
        {"tokens": sizes, "activation": "relu"},
        {"tokens": (3,) * me.num_ranks, "bias": False},
        {"tokens": (0,) * me.num_ranks},
    ]
    with xd.init(), torch.enable_grad():
        where = context(sizes, 16, dtype)
        for way in ways:
            spread = Spread(me, operation, dtype=dtype, **way)
            for options in ways_of(operation):
                out = run(spread, where, **options)
                assert out.dtype == dtype
                out.backward(spread.grad)
                settle(where)
                spread.check(out, f"{operation} {way} {options}")


@on_ranks(2)
def test_any_inputs_may_require_gradients(me: Rank) -> None:
    """Whichever inputs require gradients, the ranks agree about what runs backward."""
    with xd.init():
        where = context(RAGGED[me.num_ranks], 16, torch.float32)
        for operation in OPERATIONS:
            for needed in ((0,), (1,), (2,), (0, 2), (1, 2)):
                spread = Spread(me, operation)
                for number, leaf in enumerate(spread.leaves):
                    leaf.requires_grad_(number in needed)
                for options in ways_of(operation):
                    out = run(spread, where, **options)
                    out.backward(spread.grad)
                    got = [leaf.grad is not None for leaf in spread.leaves]
                    assert got == [number in needed for number in range(3)]
                    spread.check(out, f"of {operation}, where {needed} are needed")
        settle(where)


@on_ranks(2)
def test_b_may_have_any_strides(me: Rank) -> None:
    """b of any strides, gradients that are expanded, and main_grad in either layout."""
    with xd.init():
        where = context(RAGGED[me.num_ranks], 16, torch.float32)
        for operation in OPERATIONS:
            spread = Spread(me, operation, activation=None)
            _, weight, _ = spread
            want, (_, grad_weight, _) = spread.expected()
            strided = torch.stack((weight.t(), weight.t()), 2)[:, :, 0]
            for b in (weight.t(), weight.t().contiguous(), strided):
                b = b.detach().requires_grad_()
                name = f"{operation}, strides {b.stride()}"
                for grad in (spread.grad, spread.grad.t().contiguous().t()):
                    out = run(spread, where, b=b)
                    equal(operation, out, want)
                    b.grad = None
                    out.backward(grad)
                    equal(f"gradient, {name} and {grad.stride()}", b.grad, grad_weight.t())
                ones = []
                for expanded in (False, True):
                    out = run(spread, where, b=b)
                    b.grad = None
                    out.sum().backward() if expanded else out.backward(torch.ones_like(out))
                    ones.append(b.grad)
                equal(f"gradient of the sum, {name}", *ones)


@on_ranks(2)
def test_weight_gradients_are_added_to_main_grad(me: Rank) -> None:
    for dtype, wide in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        with xd.init():
            where = context(RAGGED[me.num_ranks], 16, dtype)
            for operation in OPERATIONS:
                spread = Spread(me, operation, dtype=dtype)
                main = torch.full((8, 16), 3.0, dtype=wide, device=where.comm.device)
                for options in ways_of(operation):
                    out = run(spread, where, main_grad=main, **options)
                    out.backward(spread.grad)
                    assert spread.leaves[1].grad is None
                    want = spread.expected()[1][1]
                    equal(f"main_grad of {operation}", main, want + 3)
                    main.fill_(3)
            settle(where)


@on_ranks(2)
def test_tokens_of_any_dimensions(me: Rank) -> None:
    """Ranks follow one another along any dimension but the last."""
    ranks, rank = me.num_ranks, me.rank
    with xd.init():
        where = context((24 * ranks,), 16, torch.float32)
        for dim in (0, 1, -2, 2):
            shape = [2, 3, 4, 8]
            parts = [whole(40 + r, *shape) for r in range(ranks)]
            full = torch.cat(parts, dim)
            weight = whole(50, 8, 8)
            leaf = parts[rank].clone().requires_grad_()
            out, gathered = tp.all_gather_matmul(
                leaf, weight.t(), where, gather_dim=dim, return_gathered=True
            )
            equal(f"gathered along {dim}", gathered, full)
            equal(f"all_gather along {dim}", out, F.linear(full, weight))
            assert not gathered.requires_grad
            grad = whole(60, *out.shape)
            out.backward(grad)
            summed = ranks * (grad @ weight)
            share = summed.tensor_split(ranks, dim)[rank]
            equal(f"gradient along {dim}", leaf.grad, share)

            leaf = full.clone().requires_grad_()
            out = tp.matmul_reduce_scatter(leaf, weight.t(), where, scatter_dim=dim)
            equal(
                f"reduce_scatter along {dim}",
                out,
                ranks * F.linear(full, weight).tensor_split(ranks, dim)[rank],
            )
            out.backward(torch.ones_like(out))
            equal(f"gradient of it along {dim}", leaf.grad, torch.ones_like(full) @ weight)
        leaf = full.clone().requires_grad_()
        out = tp.matmul_all_reduce(leaf, weight.t(), where)
        equal("all_reduce", out, ranks * F.linear(full, weight))
        # Tokens per rank along an inner dimension.
        sizes = RAGGED[ranks]
        full = whole(70, 3, sum(sizes), 8)
        own = rows_of(sizes, rank)
        out = tp.all_gather_matmul(
            full[:, own], weight.t(), where, gather_dim=1, tokens_per_rank=sizes
        )
        equal("uneven", out, F.linear(full, weight))
        out = tp.matmul_reduce_scatter(
            full, weight.t(), where, scatter_dim=1, tokens_per_rank=sizes
        )
        equal("uneven, scattered", out, ranks * F.linear(full, weight)[:, own])
        settle(where)


@on_ranks(2)
def test_gelu_is_that_of_torch(me: Rank) -> None:
    torch.manual_seed(3)
    with xd.init() as comm:
        where = context((4,), 16, torch.float32)
        rows = 4 * me.num_ranks
        x = torch.randn(rows, 16, device=comm.device)
        weight = torch.randn(8, 16, device=comm.device)
        leaf = x[4 * me.rank : 4 * me.rank + 4].clone().requires_grad_()
        out = tp.all_gather_matmul(leaf, weight.t(), where, activation="gelu")
        reference = x.clone().requires_grad_()
        want = F.gelu(F.linear(reference, weight), approximate="tanh")
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        out.sum().backward()
        (want.sum() * me.num_ranks).backward()
        part = reference.grad[4 * me.rank : 4 * me.rank + 4]
        torch.testing.assert_close(leaf.grad, part, rtol=1e-4, atol=1e-4)


@on_ranks(1)
def test_one_rank_is_a_linear_layer_bit_for_bit(me: Rank) -> None:
    """One rank: what torch computes, bit for bit."""
    torch.manual_seed(1)
    with xd.init() as comm:
        where = context((5,), 32, torch.float32)
        x = torch.randn(5, 32, device=comm.device)
        linear = torch.nn.Linear(32, 24, device=comm.device)
        for call in (tp.all_gather_matmul, tp.matmul_reduce_scatter, tp.matmul_all_reduce):
            leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            out = call(leaf, linear.weight.t(), where, bias=linear.bias)
            want = linear(other)
            assert torch.equal(out, want)
            grads = torch.autograd.grad(out.square().sum(), (leaf, *linear.parameters()))
            wants = torch.autograd.grad(want.square().sum(), (other, *linear.parameters()))
            assert all(map(torch.equal, grads, wants))
        activated = tp.all_gather_matmul(x, linear.weight.t(), where, activation="gelu")
        assert torch.equal(activated, F.gelu(F.linear(x, linear.weight), approximate="tanh"))


@on_ranks(2)
def test_fp8_with_scales_of_each_kind(me: Rank) -> None:
    """fp8 with scales of each kind, which are powers of two: products are exact."""
    fp8, ranks, rank = torch.float8_e4m3fn, me.num_ranks, me.rank
    rows, k, n = 16, 256, 128
    kinds = {"tensor": ((1,), (1,)), "rows": ((rows, 1), (1, n))}
    with xd.init() as comm:
        device = comm.device
        if device.type == "cpu":  # not there yet on CUDA
            kinds["blocks"] = ((rows, k // 128), (k // 128, n // 128))
        where = context((rows,), k, torch.bfloat16)
        for kind, (shape_a, shape_b) in kinds.items():
            a = [whole(80 + r, rows, k) for r in range(ranks)]
            halves = [whole(90 + r, rows * ranks, k) for r in range(ranks)]
            weight = whole(100, n, k)

            def powers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
                return torch.exp2(whole(seed, *shape))

            # Of each rank others, and of b others than of a, so that exchanged ones would be seen.
            scales = [powers(110 + r, shape_a) * 2.0**r for r in range(ranks)]
            of_b = powers(120, shape_b) / 2

            def widened(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
                blocks = scale.dim() == 2 and scale.shape[1] not in (1, n)
                return matrix * (scale.repeat_interleave(128, 1) if blocks else scale)

            wide_b = weight.t() * (
                of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
                if kind == "blocks"
                else of_b
            )
            options = {"scale_b": of_b, "out_dtype": torch.float32}
            out, gathered = tp.all_gather_scaled_matmul(
                a[rank].to(fp8),
                weight.to(fp8).t(),
                where,
                scale_a=scales[rank],
                return_gathered=True,
                **options,
            )
            want = torch.cat([widened(*pair) for pair in zip(a, scales)]) @ wide_b
            equal(kind, out, want)
            equal(f"gathered, {kind}", gathered.float(), torch.cat(a))
            if kind != "tensor":
                continue
            want = sum(widened(half, scale) @ wide_b for half, scale in zip(halves, scales))
            options = {"scale_a": scales[rank], "scale_b": of_b, "out_dtype": torch.bfloat16}
            out = tp.scaled_matmul_reduce_scatter(
                halves[rank].to(fp8), weight.to(fp8).t(), where, **options
            )
            part = want[rank * rows : (rank + 1) * rows]
            equal("reduce_scatter", out, part.bfloat16())
            out = tp.scaled_matmul_all_reduce(
                halves[rank].to(fp8), weight.to(fp8).t(), where, **options
            )
            equal("all_reduce", out, want.bfloat16())
        settle(where)


@on_ranks(2)
def test_transfers_beside_a_product(me: Rank) -> None:
    sizes = RAGGED[me.num_ranks]
    own = rows_of(sizes, me.rank)
    with xd.init():
        where = context(sizes, 16, torch.float32)
        array = whole(130, sum(sizes), 8)
        a, b = whole(131, 12, 16), whole(132, 16, 8)
        out, product = tp.bulk_all_gather(array[own], where, a, b, tokens_per_rank=sizes)
        equal("gathered", out, array)
        equal("product", product, a @ b)
        total = torch.ones_like(product)
        terms = [whole(140 + r, sum(sizes), 8) for r in range(me.num_ranks)]
        out, nothing = tp.bulk_reduce_scatter(
            terms[me.rank], where, a, b, accumulate=total, tokens_per_rank=sizes
        )
        assert nothing is None
        equal("summed", out, sum(terms)[own])
        equal("added", total, a @ b + 1)
        out, nothing = tp.bulk_all_gather(array[own].long(), where, tokens_per_rank=sizes)
        assert nothing is None
        equal("numbers", out, array)
        settle(where)


@on_ranks(2)
def test_a_context_explains_what_a_call_would_do(me: Rank) -> None:
    with xd.init():
        where = context((8,), 16, torch.float32)
        plan = where.explain("reduce_scatter", torch.ones(16, 16), torch.ones(16, 8))
        assert plan.algo != "auto" and "SPLIT" in plan.text and plan.estimate_us > 0
        assert "max_tokens=8" in repr(where)
