"""The Buffer's low-latency calls on the CPU, compared bit by bit with a plain reference."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import low_latency_cases as cases
from crossdock.deep_ep import Buffer
from deep_ep_cases import Mistake, new_buffer, on_buffers, one_rank_errs, process_group
from support import Apart, Rank, run_ranks

SEED = 110
LATE_MS = 3000  # until a rank that does not come is left out
# Keywords by which DeepEP's forks combine while x is still being computed.
SIGNALS = {
    "packed_recv_count": torch.zeros(1),
    "comp_signal": torch.zeros(1),
    "block_m": 64,
    "threshold": 2,
    "num_sms": 4,
    "src_signals": None,
    "src_signal_expect_value": 0,
}


@on_buffers(1, 2, 4, Apart(3), **cases.LOW_LATENCY)
def test_calls_equal_reference(buffer: Buffer) -> None:
    for name in cases.CASES:
        getattr(cases, name)(buffer, SEED)


@on_buffers(3, **cases.SHRINKING)
def test_a_rank_is_left_out_and_comes_back(buffer: Buffer) -> None:
    cases.left_out(buffer, SEED)
    cases.plain(buffer, SEED)


@on_buffers(2, **cases.SHRINKING)
def test_masks_hold_for_sizes_to_come(buffer: Buffer) -> None:
    """The caller's last word about a rank holds for sizes that come after it."""
    other = 1 - buffer.rank
    status = torch.zeros(2, dtype=torch.int32)
    for hidden, masked in ((128, True), (256, False), (384, True)):
        if masked:
            buffer.low_latency_update_mask_buffer(other, True)
        else:
            buffer.low_latency_clean_mask_buffer()
        batch = cases.Batch(SEED, buffer, hidden)
        _, _, handle, _, _ = batch.dispatch(buffer)
        rows = handle[1] & 0xFFFFFFFF
        want = batch.routing.source_ranges(buffer.rank) & 0xFFFFFFFF
        if masked:
            want[:, other] = 0
        np.testing.assert_array_equal(rows.numpy(), want)
        buffer.low_latency_query_mask_buffer(status)
        assert status[other] == masked
        # A rank that is still in an operation would answer a mask with one of its own.
        dist.barrier()


def expect_last_left_out(buffer: Buffer) -> None:
    status = torch.zeros(buffer.group_size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.nonzero().flatten().tolist() == [buffer.group_size - 1]


def run_lost(me: Rank, name: str) -> None:
    """The last rank misses a call: the others leave it out by themselves, and say nothing."""
    with new_buffer(**cases.SHRINKING) as buffer:
        batch = cases.Batch(SEED, buffer)
        x, _, handle, _, _ = batch.dispatch(buffer)
        results = batch.experts_of(x)
        if me.rank != me.num_ranks - 1:
            if name == "dispatch":
                batch.dispatch(buffer)
            elif name == "combine":
                batch.combine(buffer, results, handle, return_recv_hook=True)[2]()
            else:
                buffer.clean_low_latency_buffer(cases.MOST, batch.hidden, batch.experts)
            expect_last_left_out(buffer)
            x, _, handle, _, hook = batch.dispatch(buffer, return_recv_hook=True)
            hook()
            batch.combine(buffer, batch.experts_of(x), handle)
        dist.barrier()


def run_all_lost(me: Rank) -> None:
    os.environ["XD_TIMEOUT_MS"] = str(LATE_MS)  # read once in a process
    with process_group():
        for name in ("dispatch", "combine", "clean"):
            run_lost(me, name)


def test_a_rank_that_does_not_come_is_left_out() -> None:
    run_ranks(3, run_all_lost, fresh=True)


@on_buffers(2, **cases.LOW_LATENCY)
def test_peers_hear_of_mistakes_and_the_buffer_goes_on(buffer: Buffer) -> None:
    batch = cases.Batch(SEED, buffer)
    x, idx, weights, experts = batch.x, batch.topk_idx, batch.topk_weights, batch.experts
    most, fp8 = "num_max_dispatch_tokens_per_rank", {"use_fp8": True, "use_ue8m0": True}
    good: dict[str, Any] = {"x": x, "topk_idx": idx, most: cases.MOST, "num_experts": experts}
    good["use_fp8"] = False
    of_dispatch: list[Mistake] = [
        ({"x": x.float()}, "x: expected"),
        ({"x": x.repeat(9, 1), "topk_idx": idx.repeat(9, 1)}, "x: expected at most"),
        ({"num_experts": 2**40}, "num_experts: expected at most 65536"),
    ]
    # Before there is a group: the peer is about to make it.
    call = buffer.low_latency_dispatch
    one_rank_errs(buffer, call, good, of_dispatch, says="", has_peer=False)
    received, _, handle, _, _ = batch.dispatch(buffer)
    of_dispatch += [
        ({"topk_idx": idx.int()}, "topk_idx: expected"),
        ({most: 1025}, "at most 1024"),
        ({"num_experts": experts + 1}, "num_experts"),
        (fp8, "round_scale"),
        ({**fp8, "round_scale": True}, "a multiple of 512 columns"),
        ({"async_finish": True, "return_recv_hook": True}, "return_recv_hook"),
        ({"cumulative_local_expert_recv_stats": idx}, "cumulative_local_expert_recv_stats"),
    ]
    one_rank_errs(buffer, call, good, of_dispatch, says="")
    results = batch.experts_of(received)
    good = {"x": results, "topk_idx": idx, "topk_weights": weights, "handle": handle}
    of_combine: list[Mistake] = [
        ({"x": results[:, 1:]}, "x: expected"),
        ({"topk_weights": weights[:, 1:]}, "topk_weights"),
        ({"topk_idx": idx[:-1]}, "topk_idx"),
        ({"out": x[:-1]}, "out"),
        ({"overlap": True, **SIGNALS}, "overlap: expected False, as all rows"),
    ]
    one_rank_errs(buffer, buffer.low_latency_combine, good, of_combine, says="")
    for options in ({}, {"overlap": False, **SIGNALS}):  # as SGLang beside shared experts alone
        batch.check_sums(buffer.low_latency_combine(**good, **options)[0])
    for bad in (None, (1, 2, 3, 4, 5), "handle"):
        with pytest.raises(ValueError, match="handle: expected what low_latency_dispatch"):
            buffer.low_latency_combine(**good | {"handle": bad})


@on_buffers(2, **cases.LOW_LATENCY)
def test_hooks_are_called_once_and_in_order(buffer: Buffer) -> None:
    batch = cases.Batch(SEED, buffer)
    sent = [batch.dispatch(buffer, return_recv_hook=True) for _ in range(2)]
    with pytest.raises(ValueError, match="hook: .* in the order .* while 1 older"):
        sent[1][-1]()
    for x, count, handle, _, hook in sent:
        hook()
        batch.check_rows(x, count, handle)
        with pytest.raises(ValueError, match="hook: expected one call, got a second one"):
            hook()


@on_buffers(1, **cases.LOW_LATENCY)
def test_what_is_not_there_is_refused(buffer: Buffer) -> None:
    batch = cases.Batch(SEED, buffer)
    _, _, handle, _, _ = batch.dispatch(buffer)

    def dispatch(to: Buffer = buffer, **options: Any) -> None:
        batch.dispatch(to, **options)

    def combine(to: Buffer = buffer, **options: Any) -> None:
        batch.combine(to, batch.x, handle, **options)

    of_others = "unexpected keyword arguments"
    with pytest.raises(TypeError, match=f"{of_others} use_nvfp4, x_gl"):
        dispatch(use_nvfp4=True, x_global_scale=None)
    with pytest.raises(TypeError, match=f"{of_others} use_nvfp4"):
        combine(use_nvfp4=True, num_sms=3)
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
        buffer.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(ValueError, match="enable_shrink: expected True"):
            call()
    normal = Buffer(dist.group.WORLD, explicitly_destroy=True)
    for call in (
        lambda: dispatch(normal),
        lambda: combine(normal),
        lambda: normal.get_next_low_latency_combine_buffer(handle),
    ):
        with pytest.raises(ValueError, match="low_latency_mode: expected True"):
            call()
    normal.destroy()


def test_size_hint_is_what_a_group_takes() -> None:
    small = Buffer.get_low_latency_rdma_size_hint(16, 256, 2, 8)
    assert 2 * 2 * 16 * 256 * 2 < small < Buffer.get_low_latency_rdma_size_hint(128, 7168, 4, 256)
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        Buffer.get_low_latency_rdma_size_hint(1025, 256, 2, 8)
