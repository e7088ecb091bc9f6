"""The Buffer's low-latency calls on the CPU, compared bit by bit with a plain reference."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import low_latency_cases as cases
from crossdock import launch
from crossdock.deep_ep import Buffer
from crossdock.errors import Mismatch
from support import run_ranks

SEED = 110
LATE_MS = 3000  # until a rank that does not come is left out


def run_cases(me: Any, names: list[str], seed: int, options: dict[str, Any]) -> None:
    with cases.low_latency_buffer(me, **options) as buffer:
        for name in names:
            getattr(cases, name)(buffer, seed)


ALL = ["plain", "fp8", "as_vllm_calls", "as_sglang_calls", "copies", "both_modes", "shapes"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.representative), 4])
def test_calls_equal_reference(num_ranks: int) -> None:
    print(f"seed {SEED}")
    run_ranks(num_ranks, run_cases, ALL, SEED, {})


def test_a_rank_is_left_out_and_comes_back() -> None:
    print(f"seed {SEED}")
    run_ranks(3, run_cases, ["left_out", "plain"], SEED, {"enable_shrink": True})


def run_masks_of_groups_to_come(me: Any) -> None:
    """What the caller has said last of a rank holds for sizes that come after it."""
    with cases.low_latency_buffer(me, enable_shrink=True) as buffer:
        other = 1 - me.rank
        status = torch.zeros(2, dtype=torch.int32)
        for hidden, masked in ((128, True), (256, False), (384, True)):
            if masked:
                buffer.low_latency_update_mask_buffer(other, True)
            else:
                buffer.low_latency_clean_mask_buffer()
            batch = cases.Batch(SEED, buffer, hidden)
            _, _, handle, _, _ = batch.dispatch(buffer)
            rows = handle[1] & 0xFFFFFFFF
            want = batch.routing.source_ranges(me.rank) & 0xFFFFFFFF
            if masked:
                want[:, other] = 0
            np.testing.assert_array_equal(rows.numpy(), want)
            buffer.low_latency_query_mask_buffer(status)
            assert status[other] == masked
            # A rank that is still in an operation would answer a mask with one of its own.
            torch.distributed.barrier()


def test_masks_hold_for_sizes_to_come() -> None:
    run_ranks(2, run_masks_of_groups_to_come)


def run_lost(me: Any, name: str) -> None:
    """The last rank misses a call: the others leave it out by themselves, and say nothing."""
    last = me.num_ranks - 1
    with cases.low_latency_buffer(me, enable_shrink=True) as buffer:
        batch = cases.Batch(SEED, buffer)
        status = torch.zeros(me.num_ranks, dtype=torch.int32)
        x, _, handle, _, _ = batch.dispatch(buffer)
        results = batch.experts_of(x)
        if me.rank != last:
            if name == "dispatch":
                batch.dispatch(buffer)
            elif name == "combine":
                batch.combine(buffer, results, handle, return_recv_hook=True)[2]()
            else:
                buffer.clean_low_latency_buffer(cases.MOST, batch.hidden, batch.experts)
            buffer.low_latency_query_mask_buffer(status)
            assert status.nonzero().flatten().tolist() == [last]
            x, _, handle, _, hook = batch.dispatch(buffer, return_recv_hook=True)
            hook()
            batch.combine(buffer, batch.experts_of(x), handle)
        torch.distributed.barrier()


def run_all_lost(me: Any) -> None:
    os.environ["XD_TIMEOUT_MS"] = str(LATE_MS)  # read once in a process
    with cases.cases.process_group(me):
        for name in ("dispatch", "combine", "clean"):
            run_lost(me, name)


def test_a_rank_that_does_not_come_is_left_out() -> None:
    run_ranks(3, run_all_lost, fresh=True)


def run_died(me: Any) -> None:
    """The last rank's process ends: the others go on, and hear of it only if they ask."""
    last = me.num_ranks - 1
    with cases.low_latency_buffer(me, enable_shrink=True) as buffer:
        batch = cases.Batch(SEED, buffer)
        x, _, handle, _, _ = batch.dispatch(buffer)
        batch.combine(buffer, batch.experts_of(x), handle)
        if me.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        status = torch.zeros(me.num_ranks, dtype=torch.int32)
        for _ in range(3):
            x, count, handle, _, hook = batch.dispatch(buffer, return_recv_hook=True)
            hook()
            batch.combine(buffer, batch.experts_of(x), handle)
        mine = [np.where(ids // cases.LOCAL == last, -1, ids) for ids in batch.ids[:last]]
        left = cases.SlotRouting([*mine, batch.ids[last][:0]], batch.experts, cases.MOST)
        assert count.tolist() == left.counts(me.rank)
        buffer.low_latency_query_mask_buffer(status)
        assert status.nonzero().flatten().tolist() == [last]


def test_a_rank_whose_process_ends_is_left_out() -> None:
    with pytest.raises(launch.RankFailed) as caught:
        run_ranks(3, run_died, fresh=True)
    assert [failure.rank for failure in caught.value.failures] == [2], caught.value


def run_mistakes(me: Any) -> None:
    with cases.low_latency_buffer(me) as buffer:
        batch = cases.Batch(SEED, buffer)
        x, topk_idx, experts = batch.x, batch.topk_idx, batch.experts

        def call(*arguments: Any, **options: Any) -> Any:
            return buffer.low_latency_dispatch(*arguments, **options)

        def combine(**changed: Any) -> Any:
            arguments = {"topk_idx": topk_idx, "topk_weights": batch.topk_weights}
            options = {"x": results, "handle": handle, **arguments, **changed}
            return buffer.low_latency_combine(**options)

        # Before there is a group: the peer is about to make it.
        wrong = [
            ("x: expected", lambda: call(x.float(), topk_idx, cases.MOST, experts)),
            (
                "x: expected at most",
                lambda: call(x.repeat(9, 1), topk_idx.repeat(9, 1), 8, experts),
            ),
            ("num_experts: expected at most 65536", lambda: call(x, topk_idx, 8, 2**40)),
        ]
        if me.rank == 0:
            for text, mistake in wrong:
                with pytest.raises(ValueError, match=text):
                    mistake()
        else:
            for _ in wrong:
                with pytest.raises(Mismatch, match="rank 0"):
                    batch.dispatch(buffer)
        received, _, handle, _, _ = batch.dispatch(buffer)
        results = batch.experts_of(received)
        wrong += [
            ("topk_idx: expected", lambda: call(x, topk_idx.int(), cases.MOST, experts)),
            ("at most 1024", lambda: call(x, topk_idx, 1025, experts)),
            ("num_experts", lambda: call(x, topk_idx, cases.MOST, experts + 1)),
            ("round_scale", lambda: call(x, topk_idx, 8, experts, use_ue8m0=True)),
            (
                "a multiple of 512 columns",
                lambda: call(x, topk_idx, 8, experts, round_scale=True, use_ue8m0=True),
            ),
            (
                "return_recv_hook",
                lambda: batch.dispatch(buffer, async_finish=True, return_recv_hook=True),
            ),
            (
                "cumulative_local_expert_recv_stats",
                lambda: batch.dispatch(buffer, cumulative_local_expert_recv_stats=topk_idx),
            ),
        ]
        of_combine = [
            ("x: expected", lambda: combine(x=results[:, 1:])),
            ("topk_weights", lambda: combine(topk_weights=batch.topk_weights[:, 1:])),
            ("topk_idx", lambda: combine(topk_idx=topk_idx[:-1])),
            ("out", lambda: combine(out=x[:-1])),
        ]
        for mistakes, good in (
            (wrong, lambda: batch.dispatch(buffer)),
            (of_combine, lambda: batch.combine(buffer, results, handle)),
        ):
            for text, mistake in mistakes:
                if me.rank == 0:
                    with pytest.raises(ValueError, match=text):
                        mistake()
                else:
                    with pytest.raises(Mismatch, match="rank 0"):
                        good()
        batch.check_sums(batch.combine(buffer, results, handle)[0])
        for bad in (None, (1, 2, 3, 4, 5), "handle"):
            with pytest.raises(ValueError, match="handle: expected what low_latency_dispatch"):
                combine(handle=bad)


def test_peers_hear_of_mistakes_and_the_buffer_goes_on() -> None:
    run_ranks(2, run_mistakes)


def run_hooks(me: Any) -> None:
    with cases.low_latency_buffer(me) as buffer:
        batch = cases.Batch(SEED, buffer)
        sent = [batch.dispatch(buffer, return_recv_hook=True) for _ in range(2)]
        with pytest.raises(ValueError, match="hook: .* in the order .* while 1 older"):
            sent[1][-1]()
        for x, count, handle, _, hook in sent:
            hook()
            batch.check_rows(x, count, handle)
            with pytest.raises(ValueError, match="hook: expected one call, got a second one"):
                hook()


def test_hooks_are_called_once_and_in_order() -> None:
    run_ranks(2, run_hooks)


def run_refused(me: Any) -> None:
    with cases.low_latency_buffer(me) as buffer:
        batch = cases.Batch(SEED, buffer)
        _, _, handle, _, _ = batch.dispatch(buffer)
        for call, names in (
            (
                lambda: batch.dispatch(buffer, use_nvfp4=True, x_global_scale=None),
                "use_nvfp4, x_gl",
            ),
            (
                lambda: batch.combine(buffer, batch.x, handle, overlap=True, src_signals=None),
                "overlap, src_signals",
            ),
        ):
            with pytest.raises(TypeError, match=f"unexpected keyword arguments {names}"):
                call()
        for call in (
            lambda: buffer.low_latency_update_mask_buffer(0, True),
            lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
            buffer.low_latency_clean_mask_buffer,
        ):
            with pytest.raises(ValueError, match="enable_shrink: expected True"):
                call()
    with cases.cases.buffer_of(me) as buffer:
        for call in (
            lambda: batch.dispatch(buffer),
            lambda: batch.combine(buffer, batch.x, handle),
            lambda: buffer.get_next_low_latency_combine_buffer(handle),
        ):
            with pytest.raises(ValueError, match="low_latency_mode: expected True"):
                call()


def test_what_is_not_there_is_refused() -> None:
    run_ranks(1, run_refused)


def test_size_hint_is_what_a_group_takes() -> None:
    small = Buffer.get_low_latency_rdma_size_hint(16, 256, 2, 8)
    assert 2 * 2 * 16 * 256 * 2 < small < Buffer.get_low_latency_rdma_size_hint(128, 7168, 4, 256)
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        Buffer.get_low_latency_rdma_size_hint(1025, 256, 2, 8)
