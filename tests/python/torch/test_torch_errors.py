"""Mistakes are named where they are made, before a row moves; the peers hear of them at once."""

from __future__ import annotations

import re
import time
import weakref

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import (
    CapacityOverflow,
    InvalidArgument,
    Mismatch,
    OutOfMemory,
    PeerLost,
    Unsupported,
)
from support import Rank, run_ranks
from torch_support import Batch, assert_equal, layer, ragged, reported, settle

SEED = 4711


def bad_rank(batch: Batch) -> int:
    """The rank that makes the mistake: that with nine tokens."""
    return batch.tokens.index(9)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


# The bad rank's call, the error that it gets, and words that the text must have.
MISTAKES = {
    "x is not contiguous": (
        lambda plan, x, w: xd.dispatch(plan, _narrow(x), w),
        ValueError,
        r"dispatch: tokens: expected a contiguous tensor, got shape \(9, 32\) .* \(64, 2\)",
    ),
    "x is float64": (
        lambda plan, x, w: xd.dispatch(plan, x.double(), w),
        TypeError,
        r"dispatch: tokens: expected a dtype of torch.bfloat16, torch.float16, torch.float32, "
        r"torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8; got torch.float64",
    ),
    "x is no tensor": (
        lambda plan, x, w: xd.dispatch(plan, x.tolist()[:0], w),
        TypeError,
        r"dispatch: tokens: expected a tensor, got list \[\]",
    ),
    "x has another number of tokens": (
        lambda plan, x, w: xd.dispatch(plan, x[1:], w),
        ValueError,
        r"dispatch: tokens: expected the plan's 9 tokens, got shape \(8, 32\)",
    ),
    "x has one dimension": (
        lambda plan, x, w: xd.dispatch(plan, x[:, 0].contiguous(), w),
        ValueError,
        r"dispatch: tokens: expected 2 dimensions, got shape \(9,\)",
    ),
    "weights are bfloat16": (
        lambda plan, x, w: xd.dispatch(plan, x, w.bfloat16()),
        TypeError,
        r"dispatch: topk_weights: expected a dtype of torch.float32; got torch.bfloat16",
    ),
    "weights are not contiguous": (
        lambda plan, x, w: xd.dispatch(plan, x, _narrow(w)),
        ValueError,
        r"dispatch: topk_weights: expected a contiguous tensor",
    ),
    "rows to be quantised are float32": (
        lambda plan, x, w: xd.dispatch(plan, torch.zeros(9, 128), w, quantise=True),
        ValueError,
        r"dispatch: tokens: expected bfloat16 .* 128 columns.*; got torch.float32 .*\(9, 128\)",
    ),
    "rows to be quantised have 32 columns": (
        lambda plan, x, w: xd.dispatch(plan, x.bfloat16(), w, quantise=True),
        ValueError,
        r"dispatch: tokens: expected bfloat16 .* 128 columns.*; got torch.bfloat16 .*\(9, 32\)",
    ),
    "no such way to quantise": (
        lambda plan, x, w: xd.dispatch(plan, x.bfloat16(), w, quantise="fp4"),
        ValueError,
        r"dispatch: quantise: expected a bool or one of fp8_block128, .*mxfp8, got 'fp4'",
    ),
    "rows to be quantised to mxfp8 have 24 columns": (
        lambda plan, x, w: xd.dispatch(plan, torch.zeros(9, 24).bfloat16(), quantise="mxfp8"),
        ValueError,
        r"dispatch: tokens: expected bfloat16 with .* 32 columns.*; got .*\(9, 24\)",
    ),
    "rows are longer than the group's": (
        lambda plan, x, w: xd.dispatch(plan, torch.zeros(9, 36), w),
        ValueError,
        r"dispatch: tokens: expected rows of .* at most the group's 128, got 144: .*\(9, 36\)",
    ),
    "rows are no multiple of 16 bytes": (
        lambda plan, x, w: xd.dispatch(plan, torch.zeros(9, 3), w),
        ValueError,
        r"dispatch: tokens: expected rows of a positive multiple of 16 .*, got 12: .*\(9, 3\)",
    ),
    "x is on the meta device": (
        lambda plan, x, w: xd.dispatch(plan, x.to("meta"), w),
        ValueError,
        r"dispatch: tokens: expected a tensor on (cpu|cuda:\d), got one on meta",
    ),
    "x is sparse": (
        lambda plan, x, w: xd.dispatch(plan, x.to_sparse(), w),
        ValueError,
        r"dispatch: tokens: expected a dense tensor, got one of layout torch.sparse_coo",
    ),
    "weights are sparse rows": (
        lambda plan, x, w: xd.dispatch(plan, x, w.to_sparse_csr()),
        ValueError,
        r"dispatch: topk_weights: expected a dense tensor, got one of layout torch.sparse_csr",
    ),
    "scales are float16": (
        lambda plan, x, w: xd.dispatch(plan, x, w, scales=torch.zeros(9, 1).half()),
        TypeError,
        r"dispatch: scales: expected a dtype of torch.float32, [^;]*torch.uint8; got "
        r"torch.float16",
    ),
    "scales have too many columns": (
        lambda plan, x, w: xd.dispatch(plan, x, w, scales=torch.zeros(9, 2)),
        ValueError,
        r"dispatch: scales: expected rows of 1 to 4 bytes, got 8: torch.float32 .* \(9, 2\)",
    ),
    "scales have no columns": (
        lambda plan, x, w: xd.dispatch(plan, x, w, scales=torch.zeros(9, 0)),
        ValueError,
        r"dispatch: scales: expected rows of 1 to 4 bytes, got 0: torch.float32 .* \(9, 0\)",
    ),
}


def _dispatch_mistake(me: Rank, name: str) -> None:
    batch = Batch(SEED, ragged(me))
    wrong, kind, words = MISTAKES[name]
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        began, bad = time.monotonic(), bad_rank(batch)
        if me.rank == bad:
            with reported(group, kind, words) as raised:
                wrong(plan, x, weights)
            assert re.search(rf"rank {bad} of {me.num_ranks}", str(raised.value)), raised.value
        else:
            with reported(group, Mismatch) as raised:
                xd.dispatch(plan, x, weights)
            assert raised.value.peer == bad or f"rank {bad}" in str(raised.value)
        assert time.monotonic() - began < 10
        assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_of_dispatch(name):
    run_ranks(4, _dispatch_mistake, name)


def _other_mistakes(me: Rank) -> None:
    batch = Batch(SEED + 1, ragged(me))
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        bad = me.rank == bad_rank(batch)
        kind, words = (TypeError, "prepare: topk_idx: expected a dtype") if bad else (Mismatch, "")
        with reported(group, kind, words):
            group.prepare(topk_idx.double() if bad else topk_idx)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        rows = received.tokens.t().contiguous().t() if bad else received.tokens
        words = "combine: expert_out: expected a contiguous" if bad else ""
        kind = ValueError if bad else Mismatch
        with reported(group, kind, words):
            xd.combine(plan, rows, received.weights)
        assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])


def test_bad_arguments_of_prepare_and_combine():
    run_ranks(4, _other_mistakes)


def _rank_major_weights(me: Rank) -> None:
    batch = Batch(SEED + 2, ragged(me), "rank_major")
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        words = r"combine: weights: expected None in rank_major, .* got shape "
        for wrong in (received.weights, received.weights[:, 0].contiguous()):
            shape = re.escape(str(tuple(wrong.shape)))
            with reported(group, ValueError, words + shape):
                xd.combine(plan, received.tokens, wrong)


def test_rank_major_rows_take_no_weights():
    run_ranks(4, _rank_major_weights)


def _bad_ids(me: Rank) -> None:
    batch = Batch(SEED + 3, ragged(me))
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        wrong = topk_idx.clone()
        bad = bad_rank(batch)
        if me.rank == bad:
            wrong[0, 0] = 8
        words = f"lowest rank with some is {bad}"
        if x.is_cuda:  # the call cannot know
            group.prepare(wrong)
            torch.cuda.synchronize()
        with pytest.raises(InvalidArgument, match=words) as raised:
            group.check() if x.is_cuda else group.prepare(wrong)
        assert raised.value.operation == "prepare"
        assert raised.value.peer == bad
        assert group.errors() == 1
        group.check()
        assert group.status()["status"] == "XD_SUCCESS"
        assert_equal("out", layer(group.prepare(topk_idx), x, weights), batch.expected(me.rank)[0])


def test_expert_ids_out_of_range_are_reported_everywhere():
    run_ranks(4, _bad_ids)


def _overflow(me: Rank) -> None:
    batch = Batch(SEED + 4, ragged(me))
    with xd.init(), torch.no_grad():
        group = batch.group(recv_capacity=2)
        topk_idx, *_ = batch.local(me.rank)
        with reported(group, CapacityOverflow, "2"):
            group.prepare(topk_idx)


def test_more_rows_than_the_capacity():
    run_ranks(4, _overflow)


def _configs(me: Rank) -> None:
    with xd.init():
        if me.rank == 1:
            with pytest.raises(InvalidArgument, match="max_topk"):
                xd.EpGroup(num_experts=8, hidden=32, max_topk=33, max_tokens_per_rank=16)
        else:
            with pytest.raises(Mismatch, match="rank 1"):
                xd.EpGroup(num_experts=8, hidden=32, max_topk=3, max_tokens_per_rank=16)
        with pytest.raises(Mismatch, match="hidden|row"):
            xd.EpGroup(
                num_experts=8,
                hidden=32 + 16 * (me.rank == me.num_ranks - 1),
                max_topk=3,
                max_tokens_per_rank=16,
            )
        for name, value, kind, text in (
            ("layout", "rows", ValueError, "layout: expected 'expert_major' or .*, got 'rows'"),
            ("recv_capacity", -1, ValueError, "recv_capacity: expected .* from 0 .*, got -1"),
            ("alignment", 1.5, TypeError, ""),
        ):  # found before the library is asked, and the peers know at once
            bad = me.rank == 1
            with pytest.raises(kind if bad else Mismatch, match=text if bad else "rank 1"):
                xd.EpGroup(
                    num_experts=8,
                    hidden=32,
                    max_topk=3,
                    max_tokens_per_rank=16,
                    **({name: value} if bad else {}),
                )
        xd.EpGroup(num_experts=8, hidden=32, max_topk=3, max_tokens_per_rank=16)


def test_group_of_bad_or_different_sizes():
    run_ranks(4, _configs)


def _out_of_memory(me: Rank, kind: type[Exception]) -> None:
    batch = Batch(SEED + 7, ragged(me))
    with xd.init(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)

        def no_memory(wanted):
            raise kind(f"no memory for {list(wanted)}")

        bad = me.rank == bad_rank(batch)
        if bad:
            patch.setattr(group.comm.pool, "tensors", no_memory)
        expected, words = (kind, "no memory for") if bad else (Mismatch, "")
        with reported(group, expected, words):
            xd.dispatch(plan, x, weights)
        patch.undo()
        assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])  # GPUs; the CPU
def test_rank_without_memory_for_its_rows_tells_its_peers(kind):
    run_ranks(4, _out_of_memory, kind)


def _left(me: Rank) -> None:
    batch = Batch(SEED + 6, ((5, 2), 8, 3, 32))
    with xd.init() as comm:
        topk_idx, x, weights, grad_out = batch.local(me.rank)
        group = batch.group()
        out = layer(group.prepare(topk_idx), x, weights)
        settle(group)
        comm.barrier()
        if me.rank == 1:
            return
        with reported(group, PeerLost) as raised:
            out.backward(grad_out)
        error = raised.value
        assert (error.peer, error.operation, error.fatal) == (1, "combine_bwd", True)
        with pytest.raises(PeerLost):
            batch.group()


def test_rank_that_left_is_missed_in_the_backward_pass():
    run_ranks(2, _left)


def _gone(me: Rank) -> None:
    batch = Batch(SEED + 5, ((5, 2), 8, 3, 32))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        out = layer(plan, x, weights)
        handle, alive = group.handle, weakref.ref(group)
        del group, plan
        out.sum().backward()  # autograd's graph keeps the group
        del out
        deadline = time.monotonic() + 10
        while alive() and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of autograd, as GPUs have, may drop its reference later
        with pytest.raises(RuntimeError, match="handle of a living EpGroup"):
            torch.ops.crossdock.prepare(topk_idx, torch.zeros(1), handle, 0)
        group = batch.group()
        plan = group.prepare(topk_idx)
        group.close()
        group.close()
        with pytest.raises(InvalidArgument, match="closed"):
            xd.dispatch(plan, x)


def test_groups_are_freed_when_nobody_refers_to_them():
    run_ranks(2, _gone)


def test_no_communicator():
    with pytest.raises(RuntimeError, match="call crossdock.torch.init"):
        xd.EpGroup(num_experts=8, hidden=32, max_topk=3, max_tokens_per_rank=16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout: expected seconds above 0"),
        ({"device": "meta"}, "device: expected a CPU or CUDA device, got meta"),
    ],
)
def test_bad_arguments_of_init(options, words):
    with pytest.raises(ValueError, match=words):
        xd.init(**options)


def _bad_sizes_of_groups(me: Rank, name: str, value: object, words: str, told: str) -> None:
    bad = me.rank == 1
    sizes = {"num_experts": 8, "hidden": 32, "max_topk": 3, "max_tokens_per_rank": 16}
    with xd.init() as comm:
        began = time.monotonic()
        expected = (TypeError, ValueError) if bad else Mismatch
        with pytest.raises(expected, match=words if bad else f"rank 1 failed: .*{told}"):
            xd.EpGroup(**(sizes | {name: value} if bad else sizes))
        assert time.monotonic() - began < 10
        comm.barrier()
        xd.EpGroup(**sizes)


@pytest.mark.parametrize(
    ("name", "value", "words", "told"),
    [
        (
            "symmetric_tensors",
            -1,
            "symmetric_tensors: expected a whole number from 0 .*, got -1",
            "",
        ),
        ("symmetric_tensors", "4", "symmetric_tensors: expected a whole number, got '4'", ""),
        ("num_experts", "8", "num_experts: expected a whole number, got '8'", "config.num_experts"),
        ("hidden", 32.0, "hidden: expected a whole number, got 32.0", "config.hidden"),
        (
            "max_tokens_per_rank",
            2**40,
            "max_tokens_per_rank: expected .*, got 1099511627776",
            "config.max_tokens_per_rank",
        ),
        ("max_topk", None, "max_topk: expected a whole number, got None", "config.max_topk"),
        (
            "dtype",
            torch.int32,
            r"dtype: expected one of \[torch.bfloat16, torch.float16, "
            r"torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8\], "
            "got torch.int32",
            "config.dtype",
        ),
        ("staging", True, "staging: expected 'auto' or 'none', got True", "config.staging"),
        ("layout", "rows", "layout: expected 'expert_major' or .*, got 'rows'", "config.layout"),
    ],
)
def test_bad_sizes_of_a_group_are_named_on_every_rank(name, value, words, told):
    run_ranks(2, _bad_sizes_of_groups, name, value, words, told)


def _bad_growths(me: Rank) -> None:
    with xd.init() as comm:
        total = comm.core.mem_info()["total_bytes"]
        for value, kind, words in (
            (-5, ValueError, "num_bytes: expected 0 to .*, got -5"),
            (4.5, TypeError, "num_bytes: expected a whole .*, got 4.5"),
        ):
            began = time.monotonic()
            bad = me.rank == 1
            with pytest.raises(kind if bad else Mismatch, match=words if bad else "rank 1 failed"):
                comm.reserve(value if bad else 4096)
            assert time.monotonic() - began < 10
        assert comm.core.mem_info()["total_bytes"] == total
        comm.reserve(4096)
        assert comm.core.mem_info()["total_bytes"] >= total + 4096


def test_bad_growth_of_memory_is_named_on_every_rank():
    run_ranks(2, _bad_growths)


def _growths_that_fail(me: Rank) -> None:
    with xd.init():
        bad = me.rank == 1
        with pytest.raises(OutOfMemory if bad else Mismatch):
            xd.EpGroup(
                num_experts=8,
                hidden=32,
                max_topk=3,
                max_tokens_per_rank=16,
                symmetric_tensors=2**30 if bad else 4,
            )
        xd.EpGroup(num_experts=8, hidden=32, max_topk=3, max_tokens_per_rank=16)


def test_group_that_found_no_memory_is_not_provided_for_later():
    run_ranks(2, _growths_that_fail)


def _foreign_dtypes(me: Rank) -> None:
    batch = Batch(SEED + 8, ragged(me))
    bad = me.rank == bad_rank(batch)
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        # int8 is a dtype of tokens: what is suggested for ids must do for ids.
        words = "prepare: topk_idx: expected a dtype of torch.int32, torch.int64; got torch.int8"
        with reported(group, TypeError if bad else Mismatch, words if bad else ""):
            group.prepare(topk_idx.to(torch.int8) if bad else topk_idx)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        rows = received.tokens.to(torch.int8) if bad else received.tokens
        words = (
            "combine: expert_out: expected a dtype of torch.bfloat16, torch.float16, "
            "torch.float32; got torch.int8"
        )
        with reported(group, TypeError if bad else Mismatch, words if bad else ""):
            xd.combine(plan, rows, received.weights)
        assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])


def test_dtypes_that_are_suggested_are_those_of_the_argument():
    run_ranks(4, _foreign_dtypes)


def test_no_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(Unsupported, match=rf"device: {device}: .* can use no CUDA device here"):
            xd.init(device=device)


def test_local_rank_of_the_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ValueError, match="LOCAL_RANK in the environment: .* got 'x'"):
        xd.init()


def test_more_choices_than_experts():
    with xd.init():
        for topk in (0, 9):
            group = xd.EpGroup(
                num_experts=8, hidden=32, max_topk=16, max_tokens_per_rank=4, dtype=torch.float32
            )
            with pytest.raises(ValueError, match=f"topk: expected 1 to 8, the experts, got {topk}"):
                xd.MoELayer(32, 16, 8, topk, group=group)


def test_bad_arguments_of_empty_symmetric():
    with xd.init(heap_bytes=1 << 20) as comm:
        with pytest.raises(TypeError, match="dtype: expected one of .*; got torch.float64"):
            comm.empty_symmetric((2, 3), torch.float64)
        with pytest.raises(ValueError, match=r"shape: expected sizes from 0 on, got \(2, -1\)"):
            xd.empty_symmetric((2, -1))
        assert xd.empty_symmetric((2, 0)).shape == (2, 0)
