"""Products under torch's names, and collectives of compiled programs that become them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import joined
from tp_support import equal, whole


@on_ranks(2)
def test_names_and_signatures_of_torch(me: Rank) -> None:
    ranks, rank = me.num_ranks, me.rank
    with joined() as comm:
        name = dist.group.WORLD.group_name
        for dim in (0, 1, 2):
            parts = [whole(10 + r, 2, 4, 8) for r in range(ranks)]
            full = torch.cat(parts, dim)
            Bs = [whole(20 + n, full.shape[-1], n) for n in (4, 16, 8)]
            Bs[1] = Bs[1].t().contiguous().t()
            for return_A in (True, False):
                for call in (
                    tp.fused_all_gather_matmul,
                    torch.ops.crossdock.fused_all_gather_matmul,
                ):
                    A, outputs = call(parts[rank], Bs, dim, name, return_A=return_A)
                    assert (A is not None) == return_A
                    if return_A:
                        equal(f"A along {dim}", A, full)
                    for B, out in zip(Bs, outputs):
                        equal(f"product along {dim}", out, full @ B)
        halves = [whole(30 + r, 2 * ranks, 4 * ranks, 8) for r in range(ranks)]
        matrices = [whole(40 + r, 8, 8 * ranks) for r in range(ranks)]
        total = sum(half @ B for half, B in zip(halves, matrices))
        for dim in (0, 1, 2, -1):
            for reduce_op in ("sum", "avg"):
                out = tp.fused_matmul_reduce_scatter(
                    halves[rank], matrices[rank], reduce_op, dim, name
                )
                want = total.chunk(ranks, dim)[rank] / (1 if reduce_op == "sum" else ranks)
                equal(f"{reduce_op} along {dim}", out, want)
        x = halves[rank].clone().requires_grad_()
        with pytest.raises(RuntimeError, match="expected tensors that require no gradient"):
            tp.fused_matmul_reduce_scatter(x, matrices[rank], "sum", 0, name)
        for reduce_op, dim, text in (
            ("max", 0, "reduce_op: expected 'sum' or 'avg', got 'max'"),
            ("sum", 3, "scatter_dim: expected a dimension of"),
        ):
            with pytest.raises(ValueError, match=text):
                tp.fused_matmul_reduce_scatter(halves[rank], matrices[rank], reduce_op, dim, name)
        with pytest.raises(ValueError, match=r"Bs: expected shapes \[8, N\], got \(4, 4\)"):
            tp.fused_all_gather_matmul(whole(1, 4, 8), [whole(2, 4, 4)], 0, name)
        with pytest.raises(ValueError, match="Bs: expected one matrix or more"):
            tp.fused_all_gather_matmul(whole(1, 4, 8), [], 0, name)
        for context in comm.contexts.values():
            assert context.comm is comm


@on_ranks(1)
def test_operators_under_the_names_of_torch_tell_their_shapes(me: Rank) -> None:
    ops, only = torch.ops.crossdock, ("test_schema", "test_faketensor")
    with joined():
        name = dist.group.WORLD.group_name
        A, B = whole(1, 2, 4, 8), whole(2, 8, 16)
        for dim in (0, 1):
            for return_A in (True, False):
                torch.library.opcheck(
                    ops.fused_all_gather_matmul.default,
                    (A, [B, B[:, :8]], dim, name),
                    {"return_A": return_A},
                    test_utils=only,
                )
        for dim in (0, 1, 2):
            torch.library.opcheck(
                ops.fused_matmul_reduce_scatter.default, (A, B, "sum", dim, name), test_utils=only
            )
        fp8, one = torch.float8_e4m3fn, whole(3, 1)
        A, B = whole(1, 2, 16, 16).to(fp8), whole(2, 16, 16).to(fp8).t()
        beside = [None, None], [None, None], [torch.bfloat16, torch.float32], [False, False]
        for dim in (0, 1):
            torch.library.opcheck(
                ops.fused_all_gather_scaled_matmul.default,
                (A, [B, B], one, [one, one], dim, name, *beside),
                test_utils=only[1:],
            )
            torch.library.opcheck(
                ops.fused_scaled_matmul_reduce_scatter.default,
                (A, B, one, one, "sum", dim, 0, name, None, None, None, torch.bfloat16),
                test_utils=only[1:],
            )


@on_ranks(2)
def test_results_lie_in_memory_as_torchs_do(me: Rank) -> None:
    """By torch's own operators, which tell what tensors without elements would be."""
    import torch.distributed._symmetric_memory  # noqa: F401  (defines torch's)

    def without_elements(given: Any) -> Any:
        if isinstance(given, list):
            return [without_elements(one) for one in given]
        return given.to("meta") if isinstance(given, torch.Tensor) else given

    fp8, ranks = torch.float8_e4m3fn, me.num_ranks
    shape = (2 * ranks, 4 * ranks, 32)
    A, B, one = whole(1, *shape), whole(2, 16 * ranks, 32).t(), whole(3, 1)
    small = [one.to(torch.float32)] * 2, [None], [None], [torch.bfloat16], [False]
    with joined():
        name = dist.group.WORLD.group_name
        calls: list[tuple[str, list[Any]]] = []
        for dim in (0, 1, 2):
            columns = 32 * (ranks if dim == 2 else 1)
            wide = whole(4, 16, columns).t()
            calls += [
                ("fused_all_gather_matmul", [A, [wide], dim, name]),
                ("fused_matmul_reduce_scatter", [A, B, "sum", dim, name]),
                ("fused_matmul_reduce_scatter", [A, B, "avg", dim, name]),
            ]
        for dim in (0, 1):
            (scale, other), *beside = small
            calls += [
                (
                    "fused_all_gather_scaled_matmul",
                    [A.to(fp8), [B.to(fp8)], scale, [other], dim, name, *beside],
                ),
                (
                    "fused_scaled_matmul_reduce_scatter",
                    [A.to(fp8), B.to(fp8), scale, other, "sum", dim, dim, name]
                    + [[*shape[:-1], 16 * ranks], None, None, torch.bfloat16],
                ),
            ]
        for operator, given in calls:
            theirs = getattr(torch.ops.symm_mem, operator)(*without_elements(given))
            mine = getattr(torch.ops.crossdock, operator)(*given)
            for got, wanted in zip(_flat(mine), _flat(theirs), strict=True):
                place = (operator, given[2:5], got.shape)
                assert (got.shape, got.stride()) == (wanted.shape, wanted.stride()), place


def _flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [one for result in results for one in _flat(result)]


def test_signatures_are_those_of_torch() -> None:
    """The operators take what torch's take."""
    import torch.distributed._symmetric_memory  # noqa: F401  (defines torch's)

    for name in (
        "fused_all_gather_matmul",
        "fused_matmul_reduce_scatter",
        "fused_all_gather_scaled_matmul",
        "fused_scaled_matmul_reduce_scatter",
    ):
        mine = getattr(torch.ops.crossdock, name).default._schema
        theirs = getattr(torch.ops.symm_mem, name).default._schema
        for one, other in zip(mine.arguments, theirs.arguments, strict=True):
            assert (one.name, str(one.type), one.default_value, one.kwarg_only) == (
                other.name,
                str(other.type),
                other.default_value,
                other.kwarg_only,
            )
        assert [str(one.type) for one in mine.returns] == [str(one.type) for one in theirs.returns]


@pytest.mark.parametrize("first, rows", [(2, 16), (1, 1)])  # also one row of each rank
@on_ranks(2)
def test_fp8_under_the_names_of_torch(me: Rank, first: int, rows: int) -> None:
    fp8, ranks, rank = torch.float8_e4m3fn, me.num_ranks, me.rank
    with joined():
        name = dist.group.WORLD.group_name
        k = 32
        parts = [whole(50 + r, first, rows, k) for r in range(ranks)]
        for dim in (0, 1):
            full = torch.cat(parts, dim)
            Bs = [whole(60 + n, n, k).t() for n in (16, 48)]
            per_row = [torch.exp2(whole(70 + r, first, rows, 1)) for r in range(ranks)]
            kinds = {
                "tensor": (torch.full((), 2.0), torch.full((), 2.0), 2.0),
                "rows": (per_row[rank], torch.cat(per_row, dim), None),
                "replicated": (torch.cat(per_row, dim), torch.cat(per_row, dim), None),
            }
            for kind, (scale, whole_scale, _) in kinds.items():
                scale, whole_scale = scale.to(full.device), whole_scale.to(full.device)
                of_b = [torch.full((), scale, device=full.device) for scale in (0.25, 4.0)]
                if kind != "tensor":
                    of_b = [torch.exp2(whole(80 + n, 1, n)) for n in (16, 48)]
                beside = [None] * 2, [None] * 2, [torch.bfloat16] * 2, [False] * 2
                A, outputs = tp.fused_all_gather_scaled_matmul(
                    parts[rank].to(fp8), [B.to(fp8) for B in Bs], scale, of_b, dim, name, *beside
                )
                equal(f"A, {kind}", A.float(), full)
                for B, s, out in zip(Bs, of_b, outputs):
                    want = (full * whole_scale) @ (B * s)
                    equal(f"{kind} along {dim}", out, want.bfloat16())
            halves = [whole(90 + r, 2 * ranks, rows * ranks, k) for r in range(ranks)]
            B = whole(61, 16, k).t()
            of_a = [torch.full((), 2.0**r, device=full.device) for r in range(ranks)]
            of_b = torch.full((), 0.5, device=full.device)
            total = sum(half @ B * scale * of_b for half, scale in zip(halves, of_a))
            shape = [*halves[0].shape[:-1], 16]
            for A in (halves[rank], halves[rank].flatten(0, 1)):
                out = tp.fused_scaled_matmul_reduce_scatter(
                    *(A.to(fp8), B.to(fp8), of_a[rank], of_b, "sum", dim, 0, name, shape),
                    out_dtype=torch.bfloat16,
                )
                equal(f"scattered along {dim}", out, total.chunk(ranks, dim)[rank].bfloat16())


@contextmanager
def hiding() -> Iterator[None]:
    """Compiled programs have products in place of collectives, on ranks of torch.distributed."""
    torch._dynamo.reset()
    with joined():
        tp.enable_async_tp()
        try:
            yield
        finally:
            tp.disable_async_tp()
        assert torch._inductor.config.post_grad_custom_post_pass is None


def with_code(call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The result, and the code of the programs that were compiled for it."""
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(call, *args)
    return result, "\n".join(code)


def trained(block: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of a block, and the gradients of what it was given."""
    leaves = [one.clone().requires_grad_() for one in given]
    out = block(*leaves)
    out.sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


@on_ranks(2, timeout=400)
def test_collectives_of_compiled_programs_become_products(me: Rank) -> None:
    """Programs with functional collectives, forward and backward, beside eager ones."""
    ranks = me.num_ranks
    with hiding():
        for shape, dim in (((4 * ranks, 8), 0), ((2 * ranks, 4 * ranks, 8), 1)):

            def block(x, w_in, w_out, bias, dim=dim):
                rows = funcol.all_gather_tensor_autograd(x, dim, dist.group.WORLD)
                inner = torch.nn.functional.linear(rows, w_in, bias).relu()
                product = torch.nn.functional.linear(inner, w_out)
                return funcol.reduce_scatter_tensor_autograd(product, "sum", dim, dist.group.WORLD)

            part = whole(1, *shape).chunk(ranks, dim)[me.rank]
            given = [part, whole(2 + me.rank, 16, 8), whole(4 + me.rank, 8, 16), whole(9, 16)]
            got, code = with_code(trained, torch.compile(block, fullgraph=True), given)
            assert code.count("crossdock.fused_all_gather_matmul") >= 2, dim
            assert code.count("crossdock.fused_matmul_reduce_scatter") >= 2, dim
            assert "all_gather_into_tensor" not in code
            assert "reduce_scatter_tensor" not in code
            for one, want in zip(got, trained(block, given)):
                equal(f"{shape}, along {dim}", one, want)


FP8 = torch.float8_e4m3fn
# By their names of today, and of torch before 2.13.
gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def scaled_block(dim: int, as_bytes: bool):
    """Rows of fp8 that are gathered, two products of them, and a product that is scattered."""

    def multiply(rows, w, scale, of_w, bias=None):
        flat = torch._scaled_mm(
            rows.reshape(-1, rows.shape[-1]), w, scale, of_w, bias=bias, out_dtype=torch.float32
        )
        return flat.view(*rows.shape[:-1], -1)

    def block(x, scale, w_in, w_gate, of_w, bias, w_out):
        group = dist.group.WORLD
        if as_bytes:
            rows = gather(x.view(torch.uint8), dim, group).view(FP8)
        else:
            rows = gather(x, dim, group)
        inner = multiply(rows, w_in, scale, of_w) + multiply(rows, w_gate, scale, of_w, bias)
        half = inner.clamp(-2, 2).to(FP8)
        product = multiply(half, w_out, scale, of_w)
        out = scatter(product, "sum", dim, group)
        return out, rows.view(torch.uint8)[..., :1]

    return block


@on_ranks(2, timeout=400)
def test_scaled_products_of_compiled_programs_hide_their_collectives(me: Rank) -> None:
    """_scaled_mm in compiled programs, with scales of tensors and of rows."""
    k, ranks = 32, me.num_ranks
    with hiding():
        for shape, dim, of_rows, as_bytes in (
            ((4 * ranks, k), 0, True, True),
            ((2 * ranks, 8 * ranks, k), 1, False, True),
            ((2 * ranks, 8 * ranks, k), 1, True, False),
        ):
            torch._dynamo.reset()
            full = whole(1, *shape)
            part = full.chunk(ranks, dim)[me.rank].contiguous().to(FP8)
            scale, of_w = torch.full((), 2.0), torch.full((), 0.5)
            if of_rows:
                scale = torch.exp2(whole(5, math.prod(shape[:-1]), 1))
                of_w = torch.exp2(whole(6, 1, k))
            scale, of_w = scale.to(full.device), of_w.to(full.device)
            mats = [whole(7 + me.rank + n, k, k).to(FP8).t() for n in (0, 10, 20)]
            given = (part, scale, mats[0], mats[1], of_w, whole(9, k), mats[2])
            # Bytes are gathered where torch.distributed has no fp8.
            want = scaled_block(dim, True)(*given)
            got, code = with_code(
                torch.compile(scaled_block(dim, as_bytes), fullgraph=True), *given
            )
            assert "crossdock.fused_all_gather_scaled_matmul" in code
            assert "crossdock.fused_scaled_matmul_reduce_scatter" in code
            for other in ("all_gather_into_tensor", "reduce_scatter_tensor", "_scaled_mm"):
                assert other not in code
            for name, *pair in zip(("out", "rows"), got, want):
                equal(f"{name}, {shape}, scales of rows {of_rows}, bytes {as_bytes}", *pair)


@on_ranks(2, timeout=400)
def test_what_the_operators_do_not_compute_is_left_alone(me: Rank) -> None:
    """Products that the operators lack stay as they are: scales of blocks, sums in fp8, a bias."""

    def with_bias(x, w, one, bias):
        product = torch._scaled_mm(x, w, one, one, bias=bias, out_dtype=torch.bfloat16)
        return scatter(product.float(), "sum", 0, dist.group.WORLD)

    def other_scales(x, w, one, bias):
        rows = gather(x.view(torch.uint8), 0, dist.group.WORLD).view(FP8)
        # The scale follows from what is gathered.
        most = rows.to(torch.float32).abs().amax()
        return torch._scaled_mm(rows, w, most, one, out_dtype=torch.float32)

    with hiding():
        x, w = whole(1, 32, 32).to(FP8), whole(2, 32, 32).to(FP8).t()
        given = x, w, torch.ones((), device=x.device), whole(3, 32, dtype=torch.bfloat16)
        for block in (with_bias, other_scales):
            got, code = with_code(torch.compile(block, fullgraph=True), *given)
            assert "crossdock." not in code, block.__name__
            equal(block.__name__, got, block(*given))
