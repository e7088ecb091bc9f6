"""A mistake in a product of spread matrices is named, and the peers hear of it at once."""

from __future__ import annotations

import copy
import functools
import pickle
import time
from collections.abc import Callable

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, Mismatch, Unsupported
from crossdock.torch import tp
from support import Rank, on_ranks
from torch_support import settle
from tp_support import context, equal, whole

K, N = 16, 8


def read_status(where: tp.TpContext) -> None:
    """On a GPU reads the error that this rank's own calls have met, so that it is told once."""
    if where.comm.device.type == "cuda":
        torch.cuda.synchronize()
        where.status()


def told_to_all(where: tp.TpContext, call: Callable[[], object]) -> Mismatch:
    """Every rank's call raises Mismatch, before the timeout."""
    start = time.monotonic()
    with pytest.raises(Mismatch) as raised:
        call()
        settle(where)
    assert time.monotonic() - start < 20, "told late"
    read_status(where)
    return raised.value


def named(where: tp.TpContext, call: Callable[[], object], kind: type[Exception], text: str) -> str:
    """This rank's call raises that error; returns its text."""
    with pytest.raises(kind, match=text) as raised:
        call()
    read_status(where)
    return str(raised.value)


@on_ranks(2)
def test_a_mistake_is_named_and_the_peers_are_told(me: Rank) -> None:
    with xd.init() as comm:
        where = context((4,), K, torch.float32)
        x, weight = whole(1, 4, K), whole(2, N, K)
        scales = torch.ones(2, device=comm.device)
        good = {"a": x, "b": weight.t(), "context": where}
        calls = [
            (TypeError, "a: expected a tensor, got list", {"a": [1]}),
            (TypeError, "b: expected a tensor, got NoneType", {"b": None}),
            (ValueError, "a: expected 2 or more dimensions, got shape \\(16,\\)", {"a": x[0]}),
            (ValueError, "b: expected 2 dimensions, got shape", {"b": weight[None]}),
            (ValueError, "gather_dim: expected a dimension .*, 0 to 0, got 1", {"gather_dim": 1}),
            (ValueError, "gather_dim: .* got -1", {"gather_dim": -1}),
            (
                ValueError,
                "activation: .*'gelu', 'relu', got 'silu'",
                {"activation": "silu"},
            ),
            (ValueError, "algo: expected one of 'auto', .*, got 'ring'", {"algo": "ring"}),
            (TypeError, "tokens_per_rank: expected a sequence", {"tokens_per_rank": 4}),
            (
                ValueError,
                f"tokens_per_rank: expected the tokens of {me.num_ranks} ranks, got 5",
                {"tokens_per_rank": [4] * 5},
            ),
            (TypeError, "expected a dtype of .*float64", {"a": x.double()}),
            (InvalidArgument, "b: is float16, expected float32", {"b": weight.t().half()}),
            (InvalidArgument, "b: has K = 12, expected 16", {"b": weight[:, :12].t()}),
            (InvalidArgument, "a: has 5 tokens, .* at most max_tokens = 4", {"a": whole(1, 5, K)}),
            (InvalidArgument, "bias: .*expected 8", {"bias": scales}),
        ]
        if comm.device.type == "cpu":
            elsewhere = {"a": torch.empty(4, K, device="meta")}
            calls.append((ValueError, "a: expected a tensor on cpu, got one on meta", elsewhere))
        bad = me.num_ranks - 1
        for kind, text, changed in calls:
            call = functools.partial(
                tp.all_gather_matmul, **good | (changed if me.rank == bad else {})
            )
            if me.rank == bad:
                text = rf"{text}.*\[rank {bad} of {me.num_ranks}\]"
                assert "all_gather" in named(where, call, kind, text)
            else:
                error = told_to_all(where, call)
                assert (error.peer, error.operation, error.fatal) == (bad, "gemm_all_gather", False)
        out = tp.all_gather_matmul(**good)  # still usable
        equal("result", out, torch.cat([x] * me.num_ranks) @ weight.t())
        settle(where)


@on_ranks(1)
def test_what_no_peer_has_to_hear_of(me: Rank) -> None:
    """Mistakes that concern no peer, or all ranks alike."""
    with xd.init():
        where = context((4,), K, torch.float32, operations=("all_gather",))
        x, weight = whole(1, 4, K), whole(2, N, K)
        with pytest.raises(TypeError, match="context: expected a TpContext, got NoneType"):
            tp.all_gather_matmul(x, weight.t(), None)
        with pytest.raises(Unsupported, match="config.operations"):
            tp.bulk_all_gather(x, where)
        if me.num_ranks > 1:
            with pytest.raises(Unsupported, match="DIRECT"):
                tp.all_gather_matmul(x, weight.t(), where, algo="direct")
        with pytest.raises(ValueError, match="a and b: expected both or none"):
            tp.bulk_all_gather(x, where, x)
        leaf = x.clone().requires_grad_()
        with pytest.raises(
            RuntimeError, match="tp_bulk: expected tensors that require no gradient"
        ):
            tp.bulk_all_gather(leaf, where)
        assert copy.deepcopy(where) is where
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(where)
        where.close()
        with pytest.raises(InvalidArgument, match="this context has been closed"):
            torch.ops.crossdock.tp_bulk(x, None, None, None, where.order, where.handle, None, False)
        where.close()
        handle = where.handle
        del where
        with pytest.raises(RuntimeError, match="context: expected the handle of a living"):
            torch.ops.crossdock.tp_bulk(x, None, None, None, torch.zeros(1), handle, None, False)


@on_ranks(2)
def test_a_bad_context_is_refused_on_all_ranks(me: Rank) -> None:
    good = {"max_tokens": 4, "max_k": 8, "max_n": 8}
    with xd.init() as comm:
        bad = me.num_ranks - 1
        for kind, text, changed in (
            (TypeError, "max_tokens: expected a whole number, got 'many'", {"max_tokens": "many"}),
            (ValueError, "dtype: expected one of .*, got torch.int8", {"dtype": torch.int8}),
            (ValueError, "algo: expected one of .*, got 'ring'", {"algo": "ring"}),
            (ValueError, "operations: expected one of", {"operations": ("gather",)}),
            (TypeError, "operations: expected a sequence", {"operations": "bulk"}),
            (InvalidArgument, "config.max_tokens = 0, expected 1", {"max_tokens": 0}),
            (TypeError, "nccl_comm: expected", {"nccl_comm": "mine"}),
        ):
            with pytest.raises(kind if me.rank == bad else Mismatch) as raised:
                tp.TpContext(**good | (changed if me.rank == bad else {}))
            if me.rank == bad:
                raised.match(text)
        if me.num_ranks > 1:
            with pytest.raises(Mismatch, match="max_n"):
                tp.TpContext(**good | {"max_n": 8 + me.rank})
        if comm.device.type == "cpu":
            with pytest.raises(Unsupported, match="nccl_comm asks for cuBLASMp, which needs CUDA"):
                tp.TpContext(**good, nccl_comm=64)
            with pytest.raises(Mismatch if me.num_ranks > 1 else Unsupported, match="nccl_comm"):
                tp.TpContext(**good, nccl_comm=64 if me.rank == bad else None)
        where = tp.TpContext(**good)
        assert where.comm is comm and (where.rank, where.num_ranks) == (me.rank, me.num_ranks)


@on_ranks(2)
def test_ranks_that_want_other_gradients_are_told(me: Rank) -> None:
    """Ranks that want other gradients would run other operations in the backward pass."""
    with xd.init() as comm:
        where = context((4,), K, torch.float32)
        odd = me.rank == me.num_ranks - 1
        x, weight = whole(1, 4, K), whole(2, K, K)
        ranks = comm.num_ranks
        calls = {
            "column": lambda x, w: tp.column_parallel_linear(x, w, None, where),
            "row": lambda x, w: tp.row_parallel_linear(x.repeat(ranks, 1), w, None, where),
            "column fp8": lambda x, w: tp.column_parallel_linear(x, w, None, where, fp8=True),
            "row fp8": lambda x, w: tp.row_parallel_linear(
                x.repeat(ranks, 1), w, None, where, fp8=True
            ),
            "all-reduce": lambda x, w: tp.matmul_all_reduce(x, w.t(), where),
            # Of the first nothing travels: the second finds it.
            "replicated": lambda x, w: tp.matmul_all_reduce(
                tp.column_parallel_linear(x, w, None, where, sequence_parallel=False).detach(),
                weight.t(),
                where,
            ),
        }
        for call in calls.values():
            for wanted in ((True, odd), (odd, True), (not odd, False)):
                leaves = [t.clone().requires_grad_(w) for t, w in zip((x, weight), wanted)]
                told_to_all(where, lambda call=call, leaves=leaves: call(*leaves))
        # Whether gathered rows are kept decides it as well, where there are gradients.
        leaf = x.clone().requires_grad_()
        held = weight.clone().requires_grad_()
        gather = lambda w: tp.all_gather_matmul(leaf, w.t(), where, save_gathered=odd)  # noqa: E731
        told_to_all(where, lambda: gather(held))
        with torch.no_grad():
            equal("result", gather(held), x.repeat(ranks, 1) @ weight.t())
        settle(where)


@on_ranks(2)
def test_products_of_one_rank_are_compared_by_the_next_operation(me: Rank) -> None:
    """Products of which nothing travels, before the operation that compares them."""
    with xd.init() as comm:
        where = context((4,), K, torch.float32)
        weight = whole(2, K, K)

        def start(first: bool = True) -> list[torch.Tensor]:
            x = whole(1, 4, K)
            return [
                tp.column_parallel_linear(
                    x.clone().requires_grad_(first or turn > 0),
                    weight.clone().requires_grad_(),
                    None,
                    where,
                    sequence_parallel=False,
                )
                for turn in range(9)
            ]

        def end(activation: str | None = None) -> torch.Tensor:
            x = whole(3, 4, K)
            return tp.matmul_all_reduce(x, weight.t(), where, activation=activation)

        odd = me.rank == me.num_ranks - 1
        start(first=not odd)
        told_to_all(where, end)
        # A call that this rank refuses has used up what came before, as the others' call has.
        start()
        if odd:
            named(where, lambda: end("silu"), ValueError, "activation: expected")
        else:
            told_to_all(where, end)
        start()
        equal("result", end(), comm.num_ranks * (whole(3, 4, K) @ weight.t()))
        settle(where)


@on_ranks(2)
def test_main_grad_is_checked_first(me: Rank) -> None:
    """A tensor that gradients cannot be added to is found before the forward pass."""
    with xd.init() as comm:
        where = context((4,), K, torch.float32)
        x, weight = whole(1, 4, K).requires_grad_(), whole(2, N, K).requires_grad_()
        bad = me.rank == me.num_ranks - 1
        good = torch.zeros(N, K, device=comm.device)
        cases = [
            (ValueError, r"shape \(8, 16\), .*got \(16, 8\)", good.t().contiguous()),
            (ValueError, "shape .*contiguous", good.t().contiguous().t()),
            (TypeError, "torch.float32 or torch.float32, got", good.half()),
            (TypeError, "a tensor, got int", 3),
            (ValueError, "a tensor on .*, got one on meta", good.to("meta")),
        ]
        for fp8 in (False, True):
            for kind, text, main in cases:
                weight.main_grad = main if bad else good

                def call(fp8=fp8):
                    return tp.column_parallel_linear(
                        x, weight, None, where, fused_wgrad=True, fp8=fp8
                    )

                if bad:
                    named(where, call, kind, f"main_grad: expected {text}")
                else:
                    told_to_all(where, call)
        assert not good.any()


@on_ranks(2)
def test_a_bad_layer_is_refused_on_all_ranks(me: Rank) -> None:
    """Layers that make their context: mistakes and bounds of one rank are told to all."""
    with xd.init() as comm:
        bad = me.rank == me.num_ranks - 1
        good = {"in_features": 16, "out_features": 16, "max_tokens": 4, "dtype": torch.float32}
        mlp = {"hidden": 16, "ffn": 16, "max_tokens": 4, "dtype": torch.float32}
        heads = {"hidden": 16, "num_heads": 4, "max_tokens": 4, "dtype": torch.float32}
        kinds = (
            (tp.ColumnParallelLinear, good),
            (tp.RowParallelLinear, good),
            (tp.SequenceParallelMLP, mlp),
            (tp.TensorParallelAttentionProjections, heads),
        )
        multiple = f"features: expected a multiple of {me.num_ranks} ranks"
        cases = [
            (kinds[0], ValueError, f"out_{multiple}", {"out_features": 17}),
            (kinds[1], ValueError, f"in_{multiple}", {"in_features": 17}),
            (kinds[0], ValueError, "max_tokens: expected a number, as no", {"max_tokens": None}),
            (kinds[0], TypeError, "max_tokens: expected a whole number", {"max_tokens": "4"}),
            (kinds[0], ValueError, "dtype: expected one of", {"dtype": torch.int8}),
            (
                kinds[2],
                ValueError,
                "activation: expected 'gelu', 'relu' or 'swiglu'",
                {"activation": "silu"},
            ),
            (
                kinds[3],
                ValueError,
                "num_kv_heads: expected a divisor of num_heads = 4",
                {"num_kv_heads": 3},
            ),
        ]
        for (layer, sizes), kind, text, changed in cases:
            told = text if bad else f"rank {me.num_ranks - 1} failed: .*{text}"
            with pytest.raises(kind if bad else Mismatch, match=told):
                layer(**sizes | (changed if bad else {}))
        if me.num_ranks > 1:
            for changed in ({"max_tokens": 5}, {"in_features": 32}, {"dtype": torch.float16}):
                with pytest.raises(Mismatch, match=f"{'dtype' if 'dtype' in changed else 'max_'}"):
                    tp.ColumnParallelLinear(**good | (changed if bad else {}))
        first = tp.ColumnParallelLinear(**good)
        assert tp.ColumnParallelLinear(**good).context is first.context
        # With a context of the caller's no peer is waiting.
        if bad:
            with pytest.raises(ValueError, match="activation: expected"):
                tp.SequenceParallelMLP(16, 16, activation="silu", context=first.context)
        comm.barrier()
