"""Mistakes are named where they are made, before a row moves; the peers hear of them at once."""

from __future__ import annotations

import re
import time
import weakref

import numpy as np
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
from crossdock.torch import _calls
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, layer, one_rank_errs, ragged, reported, settle

SEED = 4711


def bad_rank(batch: Batch) -> int:
    """The rank that makes the mistake: that with nine tokens."""
    return batch.tokens.index(9)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def mistakes_of_dispatch(x: torch.Tensor, w: torch.Tensor) -> dict[type, list[tuple]]:
    """By the error of the bad rank: what it gives instead of x or w, and what was expected."""
    return {
        TypeError: [
            (
                "tokens",
                x.double(),
                "a dtype of torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, "
                "torch.float8_e5m2, torch.int8, torch.uint8[^;]*; got torch.float64",
            ),
            ("tokens", [], r"a tensor, got list \[\]"),
            ("topk_weights", w.bfloat16(), "a dtype of torch.float32; got torch.bfloat16"),
            (
                "scales",
                torch.zeros(9, 1).half(),
                "a dtype of .*32, [^;]*uint8[^;]*; got torch.float16",
            ),
        ],
        ValueError: [
            ("tokens", _narrow(x), r"a contiguous tensor, got shape \(9, 32\) .* \(64, 2\)"),
            ("tokens", x[1:], r"the plan's 9 tokens, got shape \(8, 32\)"),
            ("tokens", x[:, 0].contiguous(), r"2 dimensions, got shape \(9,\)"),
            (
                "tokens",
                torch.zeros(9, 36),
                r"rows of .* 128 \(the group's 32 .* of torch.float32\), got 144: .*\(9, 36\)",
            ),
            ("tokens", torch.zeros(9, 3), r"rows of a positive multiple of 16 .*, got 12: .*3\)"),
            ("tokens", x.to("meta"), r"a tensor on (cpu|cuda:\d), got one on meta"),
            ("tokens", x.to_sparse(), "a dense tensor, got one of layout torch.sparse_coo"),
            ("topk_weights", _narrow(w), "a contiguous tensor"),
            ("topk_weights", w.to_sparse_csr(), "a dense tensor, got one of .* torch.sparse_csr"),
            (
                "scales",
                torch.zeros(9, 2),
                r"rows of 1 to 4 bytes, .*, got 8: .*float32 .* \(9, 2\)",
            ),
            (
                "scales",
                torch.zeros(9, 0),
                r"rows of 1 to 4 bytes, .*, got 0: .*float32 .* \(9, 0\)",
            ),
        ],
    }


def mistakes_of_quantising(x: torch.Tensor) -> list[tuple]:
    """Tokens, the way to quantise them, and the text of the error."""
    columns = "tokens: expected bfloat16 .* {} columns.*; got .*{}"
    return [
        (torch.zeros(9, 128), True, columns.format(128, r"torch.float32 .*\(9, 128\)")),
        (x.bfloat16(), True, columns.format(128, r"torch.bfloat16 .*\(9, 32\)")),
        (torch.zeros(9, 24).bfloat16(), "mxfp8", columns.format(32, r"\(9, 24\)")),
        (x.bfloat16(), "fp4", "quantise: expected .* one of fp8_block128, .*mxfp8, got 'fp4'"),
    ]


def mistakes_of_others(ids: torch.Tensor, rows: torch.Tensor) -> list[tuple]:
    """Operation, error, wrong argument, and what was expected."""
    floats = "a dtype of torch.bfloat16, torch.float16, torch.float32; got torch.int8"
    return [
        ("prepare", TypeError, "topk_idx", ids.double(), "a dtype"),
        # int8 is a dtype of tokens: what is suggested for ids must do for ids.
        ("prepare", TypeError, "topk_idx", ids.char(), "a .* of torch.int32, torch.int64; got .*8"),
        ("combine", ValueError, "expert_out", rows.t().contiguous().t(), "a contiguous"),
        ("combine", TypeError, "expert_out", rows.char(), floats),
    ]


def all_mistakes(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor):
    """Operation, error, wrong arguments, and the text of the error behind the operation's name."""
    for kind, mistakes in mistakes_of_dispatch(x, w).items():
        for name, value, text in mistakes:
            yield "dispatch", kind, {name: value}, f"{name}: expected {text}"
    for tokens, way, text in mistakes_of_quantising(x):
        yield "dispatch", ValueError, {"tokens": tokens, "quantise": way}, text
    for operation, kind, name, value, text in mistakes_of_others(ids, rows):
        yield operation, kind, {name: value}, f"{name}: expected {text}"


@on_ranks(4)
def test_bad_arguments_are_named_and_told_to_the_peers(me: Rank) -> None:
    batch = Batch(SEED, ragged(me))
    with xd.init(), torch.no_grad():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        calls = {
            "prepare": (group.prepare, {"topk_idx": topk_idx}),
            "dispatch": (xd.dispatch, {"plan": plan, "tokens": x, "topk_weights": weights}),
            "combine": (
                xd.combine,
                {"plan": plan, "expert_out": received.tokens, "weights": received.weights},
            ),
        }
        bad = bad_rank(batch)
        for name, kind, wrong, words in all_mistakes(x, weights, topk_idx, received.tokens):
            text = rf"(?s){name}: {words}.*rank {bad} of {me.num_ranks}"
            one_rank_errs(me, bad, group, *calls[name], (kind, text, wrong))
            assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])


@on_ranks(4)
def test_rank_major_rows_take_no_weights(me: Rank) -> None:
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


@on_ranks(4)
def test_expert_ids_out_of_range_are_reported_everywhere(me: Rank) -> None:
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


@on_ranks(4)
def test_more_rows_than_the_capacity(me: Rank) -> None:
    batch = Batch(SEED + 4, ragged(me))
    with xd.init(), torch.no_grad():
        group = batch.group(recv_capacity=2)
        topk_idx, *_ = batch.local(me.rank)
        with reported(group, CapacityOverflow, "2"):
            group.prepare(topk_idx)


SIZES = {"num_experts": 8, "hidden": 32, "max_topk": 3, "max_tokens_per_rank": 16}
# An argument of a group that is wrong, its error, the text of that, and what the peers are told.
BAD_SIZES = [
    ("max_topk", 33, InvalidArgument, " = 33, expected 1 to 32", "config.max_topk"),
    ("max_topk", None, TypeError, "expected a whole number, got None", "config.max_topk"),
    ("num_experts", "8", TypeError, "expected a whole number, got '8'", "config.num_experts"),
    ("hidden", 32.0, TypeError, "expected a whole number, got 32.0", "config.hidden"),
    (
        "max_tokens_per_rank",
        2**40,
        ValueError,
        "expected .*, got 1099511627776",
        "config.max_tokens_per_rank",
    ),
    (
        "dtype",
        torch.int32,
        ValueError,
        r"expected one of \[torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, "
        r"torch.float8_e5m2, torch.int8, torch.uint8.*\], got torch.int32",
        "config.dtype",
    ),
    ("staging", True, ValueError, "expected 'auto' or 'none', got True", "config.staging"),
    ("layout", "rows", ValueError, "expected 'expert_major' or .*, got 'rows'", "config.layout"),
    ("recv_capacity", -1, ValueError, "expected .* from 0 .*, got -1", ""),
    ("alignment", 1.5, TypeError, "", ""),
    ("symmetric_tensors", -1, ValueError, "expected a whole number from 0 .*, got -1", ""),
    ("symmetric_tensors", "4", TypeError, "expected a whole number, got '4'", ""),
    ("symmetric_tensors", 2**30, OutOfMemory, "", ""),
]


@on_ranks(2)
def test_bad_sizes_of_a_group_are_named_on_every_rank(me: Rank) -> None:
    bad = me.rank == 1
    with xd.init() as comm:
        for name, value, kind, words, told in BAD_SIZES:
            began = time.monotonic()
            words = f"{name}.*{words}" if words else ""
            with pytest.raises(
                kind if bad else Mismatch, match=words if bad else f"rank 1 failed: .*{told}"
            ):
                xd.EpGroup(**(SIZES | {name: value} if bad else SIZES))
            assert time.monotonic() - began < 10
            comm.barrier()
            xd.EpGroup(**SIZES)  # which finds memory also where the one before has found none
        with pytest.raises(Mismatch, match="hidden|row"):
            xd.EpGroup(**SIZES | {"hidden": 48 if bad else 32})
        xd.EpGroup(**SIZES)
        total = comm.core.mem_info()["total_bytes"]
        for value, kind, words in (
            (-5, ValueError, "num_bytes: expected 0 to .*, got -5"),
            (4.5, TypeError, "num_bytes: expected a whole .*, got 4.5"),
        ):
            began = time.monotonic()
            with pytest.raises(kind if bad else Mismatch, match=words if bad else "rank 1 failed"):
                comm.reserve(value if bad else 4096)
            assert time.monotonic() - began < 10
        assert comm.core.mem_info()["total_bytes"] == total
        comm.reserve(4096)
        assert comm.core.mem_info()["total_bytes"] >= total + 4096


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])  # GPUs; the CPU
@on_ranks(4)
def test_rank_without_memory_for_its_rows_tells_its_peers(me: Rank, kind: type[Exception]) -> None:
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


@on_ranks(2)
def test_rank_that_left_is_missed_in_the_backward_pass(me: Rank) -> None:
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


@on_ranks(2)
def test_groups_are_freed_when_nobody_refers_to_them(me: Rank) -> None:
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


def test_no_communicator():
    with pytest.raises(RuntimeError, match="call crossdock.torch.init"):
        xd.EpGroup(**SIZES)


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
            group = xd.EpGroup(**SIZES | {"max_topk": 16}, dtype=torch.float32)
            with pytest.raises(ValueError, match=f"topk: expected 1 to 8, the experts, got {topk}"):
                xd.MoELayer(32, 16, 8, topk, group=group)


def test_bad_arguments_of_empty_symmetric():
    with xd.init(heap_bytes=1 << 20) as comm:
        with pytest.raises(TypeError, match="dtype: expected one of .*; got torch.float64"):
            comm.empty_symmetric((2, 3), torch.float64)
        with pytest.raises(ValueError, match=r"shape: expected sizes from 0 on, got \(2, -1\)"):
            xd.empty_symmetric((2, -1))
        assert xd.empty_symmetric((2, 0)).shape == (2, 0)


NO_NUMBERS = (True, 1.0, "1", -1, 1 << 31, np.int64(1), None, torch.tensor(1))


def mistakes_of_results(received: xd.Dispatched, out: torch.Tensor):
    """Operation, error, a wrong `out`, and what was expected."""
    rows = received.tokens
    leaf = torch.zeros_like(rows).requires_grad_()
    with torch.no_grad():
        view = leaf.view(rows.shape)
    shape = re.escape(str(tuple(rows.shape)))
    for wrong, got in (
        (received[:1], "tuple of 1"),
        (tuple(received) * 2, "tuple of 10"),
        (list(received), "list"),
        (rows, "Tensor"),
        (5, "int"),
    ):
        yield "dispatch", TypeError, wrong, f"out: expected what part 1 .* of 5 .*; got a {got}"
    for name, wrong, kind, words in (
        ("weights", None, ValueError, "torch.float32 of shape .*, got None"),
        ("scales", rows, ValueError, "None, got a Tensor"),
        ("link", rows, ValueError, "None, got a Tensor"),
        ("tokens", [1], TypeError, r"a tensor, got list \[1\]"),
        ("tokens", rows.cpu().numpy(), TypeError, "a tensor, got ndarray"),
        ("tokens", rows.to(torch.complex64), ValueError, f"torch.float32 of shape {shape}, got"),
        ("tokens", rows.bfloat16(), ValueError, f"torch.float32 of shape {shape}, got .*bfloat16"),
        ("tokens", rows[1:], ValueError, f"torch.float32 of shape {shape}, got"),
        ("tokens", rows[0], ValueError, f"torch.float32 of shape {shape}, got"),
        ("tokens", _narrow(rows), ValueError, "a contiguous tensor, got strides"),
        ("tokens", rows.to("meta"), ValueError, "a tensor on .*, got one on meta"),
        ("tokens", rows.to_sparse(), ValueError, "a dense tensor"),
        ("tokens", leaf, ValueError, "a tensor that does not require grad, and is no view"),
        ("tokens", view, ValueError, "a tensor that does not require grad, and is no view"),
    ):
        changed = received._replace(**{name: wrong})
        yield "dispatch", kind, changed, f"out.{name}: expected {words}"
    yield "combine", TypeError, (out,), "out: expected a tensor, got tuple"
    yield "combine", ValueError, rows, "out: expected torch.float32 of shape"
    yield "combine", ValueError, out.half(), "out: expected torch.float32 of shape .*float16"
    yield "combine", ValueError, out.clone().requires_grad_(), "out: .* does not require grad"


@on_ranks(2, timeout=120)
def test_bad_parts_are_named_and_told_to_the_peers(me: Rank) -> None:
    batch = Batch(SEED + 8, ragged(me))
    with xd.init():
        group = batch.group()
        topk_idx, x, weights, _ = batch.local(me.rank)
        x, weights = x.detach(), weights.detach()
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, weights)
        out = xd.combine(plan, received.tokens, received.weights)
        moved = {"plan": plan, "tokens": x, "topk_weights": weights, "out": received}
        summed = {"expert_out": received.tokens, "weights": received.weights, "out": out}
        calls = {
            "prepare": (group.prepare, {"topk_idx": topk_idx}),
            "dispatch": (xd.dispatch, moved),
            "combine": (xd.combine, {"plan": plan} | summed),
        }
        mistakes = [
            (
                operation,
                ValueError,
                {name: value},
                f"{name}: expected .*got {re.escape(repr(value))}",
            )
            for value in NO_NUMBERS
            for operation, name in (
                ("dispatch", "part"),
                ("dispatch", "num_sms"),
                ("combine", "part"),
                ("prepare", "parts"),
                ("prepare", "alignment"),
            )
            if not (name == "alignment" and value is None)
        ]
        mistakes += [
            (operation, kind, {"out": wrong}, words)
            for operation, kind, wrong, words in mistakes_of_results(received, out)
        ]
        bad = bad_rank(batch)
        with pytest.MonkeyPatch.context() as patch:
            if me.rank == bad:
                patch.setattr(_calls, "run", {}.__getitem__)  # which takes other arguments
            mistake = (TypeError, "__getitem__", {"out": None})
            one_rank_errs(me, bad, group, xd.dispatch, moved, mistake)
        for name, kind, wrong, words in mistakes:
            text = rf"(?s){name}: {words}.*rank {bad} of {me.num_ranks}"
            one_rank_errs(me, bad, group, *calls[name], (kind, text, wrong))
        assert_equal("out", layer(plan, x, weights), batch.expected(me.rank)[0])
