"""A mistake in a product of spread matrices is named, and the peers hear of it at once."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, Mismatch, Unsupported
from crossdock.torch import tp
from support import Rank, run_ranks
from tp_support import context, equal, settle, whole

K, N = 16, 8


def mistakes(me: Rank) -> None:
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
                "activation: expected one of 'gelu', 'relu', got 'silu'",
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
            (
                InvalidArgument,
                "a: has 5 tokens, expected at most max_tokens = 4",
                {"a": whole(1, 5, K)},
            ),
            (InvalidArgument, "bias: .*expected 8", {"bias": scales}),
        ]
        if comm.device.type == "cpu":
            device = torch.empty(4, K, device="meta")
            calls.append(
                (ValueError, "a: expected a tensor on cpu, got one on meta", {"a": device})
            )
        bad = me.num_ranks - 1
        for kind, text, changed in calls:
            start = time.monotonic()
            if me.rank == bad:
                with pytest.raises(kind, match=rf"{text}.*\[rank {bad} of {me.num_ranks}\]") as e:
                    tp.all_gather_matmul(**good | changed)
                assert "all_gather" in str(e.value)
            else:
                with pytest.raises(Mismatch) as raised:
                    tp.all_gather_matmul(**good)
                    settle(where)
                error = raised.value
                assert (error.peer, error.operation, error.fatal) == (bad, "gemm_all_gather", False)
            assert time.monotonic() - start < 20, "the peer was told late"
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
                where.status()
        out = tp.all_gather_matmul(**good)  # still usable
        equal("result", out, torch.cat([x] * me.num_ranks) @ weight.t())
        settle(where)


def test_a_mistake_is_named_and_the_peers_are_told():
    run_ranks(2, mistakes)


def refused(me: Rank) -> None:
    """What concerns no peer, or all ranks alike."""
    with xd.init():
        where = context((4,), K, torch.float32, operations=("all_gather",))
        x, weight = whole(1, 4, K), whole(2, N, K)
        with pytest.raises(TypeError, match="context: expected a TpContext, got NoneType"):
            tp.all_gather_matmul(x, weight.t(), None)
        with pytest.raises(Unsupported, match="config.operations"):
            tp.bulk_all_gather(x, where)
        if me.num_ranks > 1:
            with pytest.raises(Unsupported, match="FUSED"):
                tp.all_gather_matmul(x, weight.t(), where, algo="fused")
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


def test_what_no_peer_has_to_hear_of():
    run_ranks(1, refused)


def bad_contexts(me: Rank) -> None:
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
        ):
            with pytest.raises(kind if me.rank == bad else Mismatch) as raised:
                tp.TpContext(**good | (changed if me.rank == bad else {}))
            if me.rank == bad:
                raised.match(text)
        if me.num_ranks > 1:
            with pytest.raises(Mismatch, match="max_n"):
                tp.TpContext(**good | {"max_n": 8 + me.rank})
        where = tp.TpContext(**good)
        assert where.comm is comm and (where.rank, where.num_ranks) == (me.rank, me.num_ranks)


def test_a_bad_context_is_refused_on_all_ranks():
    run_ranks(2, bad_contexts)
