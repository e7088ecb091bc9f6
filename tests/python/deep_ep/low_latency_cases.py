"""The part of every rank in the tests of the Buffer's low-latency calls, on the CPU and on GPUs.

Sums of the batches' small integers are exact in bfloat16. Local expert e multiplies by e + 1.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer
from reference import quantised
from slots import SlotRouting, choices, factors

CASES = ["plain", "fp8", "as_vllm_calls", "as_sglang_calls", "copies", "both_modes", "shapes"]
LOW_LATENCY = {"low_latency_mode": True}
SHRINKING = {"low_latency_mode": True, "enable_shrink": True}
LOCAL, TOPK, MOST = 3, 2, 8
TOKENS = (5, 0, 8, 1)


class Batch:
    """Inputs of all ranks, which each rank computes from the seed alone."""

    def __init__(self, seed: int, buffer: Buffer, hidden: int = 256) -> None:
        self.rank, self.num_ranks = buffer.rank, buffer.group_size
        self.device = buffer._live().device
        self.hidden = hidden
        self.experts = LOCAL * self.num_ranks
        tokens = TOKENS[: self.num_ranks]
        random = np.random.default_rng(seed)
        self.ids = choices(seed, tokens, self.experts, TOPK)
        self.rows = [random.integers(-4, 5, (t, hidden)).astype(ml_dtypes.bfloat16) for t in tokens]
        self.weights = [random.integers(-3, 4, (t, TOPK)).astype(np.float32) for t in tokens]
        self.routing = SlotRouting(self.ids, self.experts, MOST)
        self.x = self.put(self.rows[self.rank].astype(np.float32)).bfloat16()
        self.topk_idx = self.put(self.ids[self.rank])
        self.topk_weights = self.put(self.weights[self.rank])
        self.factors = self.put(factors(LOCAL))

    def put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def dispatch(self, buffer: Buffer, **options: Any) -> tuple[Any, ...]:
        options.setdefault("use_fp8", False)
        return buffer.low_latency_dispatch(self.x, self.topk_idx, MOST, self.experts, **options)

    def check_rows(self, x: torch.Tensor, count: torch.Tensor, handle: Any) -> None:
        """recv_x of bfloat16, recv_count and the handle."""
        slots = self.num_ranks * MOST
        assert x.shape == (LOCAL, slots, self.hidden) and x.dtype == torch.bfloat16
        got = self.routing.in_rows(self.rank, x.float().cpu().numpy())
        want = self.routing.dispatch(self.rank, self.rows).astype(np.float32)
        np.testing.assert_array_equal(got, want)
        self.check_handle(count, handle)

    def check_handle(self, count: torch.Tensor, handle: Any) -> None:
        assert count.dtype == torch.int32 and count.tolist() == self.routing.counts(self.rank)
        src_info, layout_range, most, hidden, experts = handle
        assert (most, hidden, experts) == (MOST, self.hidden, self.experts)
        assert src_info.dtype == torch.int32 and layout_range.dtype == torch.int64
        want = self.routing.source_ranges(self.rank)
        np.testing.assert_array_equal(layout_range.cpu().numpy(), want)
        got = self.routing.in_rows(self.rank, src_info.cpu().numpy())
        np.testing.assert_array_equal(got, self.routing.source_tokens(self.rank))

    def check_fp8(self, pair: Any, way: str) -> None:
        """recv_x of use_fp8: elements, and scales column by column."""
        x, scales = pair
        slots, blocks = self.num_ranks * MOST, self.hidden // 128
        packed = way == "fp8_block128_e8m0"
        width = blocks // 4 if packed else blocks
        assert x.dtype == torch.float8_e4m3fn and x.shape == (LOCAL, slots, self.hidden)
        assert scales.shape == (LOCAL, slots, width)
        assert scales.stride() == (width * slots, 1, slots)
        assert scales.dtype == (torch.int32 if packed else torch.float32)
        elements, wanted = zip(*(quantised(rows, way) for rows in self.rows))
        if packed:
            wanted = [one.view(np.uint8).view(np.int32) for one in wanted]
        bits = [one.view(np.uint8) for one in elements]
        got = self.routing.in_rows(self.rank, x.view(torch.uint8).cpu().numpy())
        np.testing.assert_array_equal(got, self.routing.dispatch(self.rank, bits))
        got = self.routing.in_rows(self.rank, scales.cpu().numpy())
        np.testing.assert_array_equal(got, self.routing.dispatch(self.rank, list(wanted)))

    def experts_of(self, x: torch.Tensor) -> torch.Tensor:
        """[L,S,H] what the experts make of what was received."""
        return x * self.factors.to(x.dtype)

    def combine(self, buffer: Buffer, x: torch.Tensor, handle: Any, **options: Any) -> Any:
        weights = self.topk_weights
        return buffer.low_latency_combine(x, self.topk_idx, weights, handle, **options)

    def check_sums(self, out: torch.Tensor) -> None:
        assert out.dtype == torch.bfloat16
        want = self.routing.sums(self.rank, self.rows, self.weights).astype(np.float32)
        np.testing.assert_array_equal(out.float().cpu().numpy(), want)


def plain(buffer: Buffer, seed: int) -> None:
    """Neither hook nor event; statistics; a handle that serves several combines, as a tuple too."""
    batch = Batch(seed, buffer)
    load = torch.zeros(LOCAL, dtype=torch.int32, device=batch.device)
    wait = torch.zeros(buffer.group_size, dtype=torch.int64, device=batch.device)
    for number in range(1, 4):
        x, count, handle, event, hook = batch.dispatch(
            buffer, cumulative_local_expert_recv_stats=load, dispatch_wait_recv_cost_stats=wait
        )
        assert event.event is None and hook is None
        batch.check_rows(x, count, handle)
        assert torch.equal(load, number * count)
        results = batch.experts_of(x)
        for given in (handle, tuple(handle), list(handle)):
            out, event, hook = batch.combine(
                buffer, results, given, combine_wait_recv_cost_stats=wait
            )
            assert event.event is None and hook is None
            batch.check_sums(out)
    assert wait[buffer.rank] == 0 and (wait >= 0).all()


def fp8(buffer: Buffer, seed: int) -> None:
    """All forms of scales."""
    batch = Batch(seed, buffer, 512)
    forms = {
        "fp8_block128": {},
        "fp8_block128_pow2": {"round_scale": True},
        "fp8_block128_e8m0": {"round_scale": True, "use_ue8m0": True},
    }
    for way, form in forms.items():
        pair, count, handle, _, _ = batch.dispatch(buffer, use_fp8=True, **form)
        batch.check_fp8(pair, way)
        batch.check_handle(count, handle)
        pair, count, handle, _, hook = batch.dispatch(
            buffer, use_fp8=True, return_recv_hook=True, **form
        )
        hook()
        batch.check_fp8(pair, way)


def as_vllm_calls(buffer: Buffer, seed: int) -> None:
    """Hooks on both sides, results into the caller's tensor, two microbatches interleaved."""
    for step in range(3):
        batches = [Batch(seed + 2 * step + i, buffer) for i in range(2)]
        received = []
        for batch in batches:
            x, count, handle, _, hook = buffer.low_latency_dispatch(
                batch.x,
                batch.topk_idx,
                MOST,
                batch.experts,
                use_fp8=False,
                round_scale=False,
                use_ue8m0=False,
                async_finish=False,
                return_recv_hook=True,
            )
            batch.x.fill_(77)  # sent, so the caller's again
            received.append((x, count, handle, hook))
        pending = []
        for batch, (x, count, handle, hook) in zip(batches, received):
            hook()
            batch.check_rows(x, count, handle)
            output = torch.full((len(batch.topk_idx), batch.hidden), 7.0, device=batch.device)
            output = output.bfloat16()
            results = batch.experts_of(x)
            got, _, recv_hook = buffer.low_latency_combine(
                results,
                batch.topk_idx,
                batch.topk_weights,
                handle,
                async_finish=False,
                zero_copy=False,
                return_recv_hook=True,
                out=output,
            )
            assert got is output
            results.fill_(77)
            pending.append((output, recv_hook))
        for batch, (output, recv_hook) in zip(batches, pending):
            recv_hook()
            batch.check_sums(output)


def as_sglang_calls(buffer: Buffer, seed: int) -> None:
    """dispatch_a and _b, combine_a and _b: with events, then with hooks, after a cleaning."""
    for return_recv_hook in (False, True):
        batch = Batch(seed, buffer, 512)
        buffer.clean_low_latency_buffer(MOST, batch.hidden, batch.experts)
        pair, masked_m, handle, event, hook = buffer.low_latency_dispatch(
            batch.x,
            batch.topk_idx,
            MOST,
            batch.experts,
            use_fp8=True,
            async_finish=not return_recv_hook,
            return_recv_hook=return_recv_hook,
            round_scale=True,
            use_ue8m0=True,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        batch.check_fp8(pair, "fp8_block128_e8m0")
        batch.check_handle(masked_m, handle)
        x, _, handle, _, _ = batch.dispatch(buffer)
        out, event, hook = buffer.low_latency_combine(
            x=batch.experts_of(x),
            topk_idx=batch.topk_idx,
            topk_weights=batch.topk_weights,
            handle=handle,
            async_finish=not return_recv_hook,
            return_recv_hook=return_recv_hook,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        batch.check_sums(out)


def copies(buffer: Buffer, seed: int) -> None:
    """zero_copy reads the Buffer's tensor, and logfmt changes nothing."""
    for number in range(3):
        batch = Batch(seed + number, buffer)
        x, _, handle, _, _ = batch.dispatch(buffer)
        own = buffer.get_next_low_latency_combine_buffer(handle)
        assert own.shape == x.shape and own.dtype == torch.bfloat16 and own.is_contiguous()
        own[:, :, :] = batch.experts_of(x)
        poison = torch.full_like(x, float("nan"))
        ways = ({}, {"async_finish": True}, {"return_recv_hook": True}, {"use_logfmt": True})
        for way in ways:
            out, event, hook = batch.combine(buffer, poison, handle, zero_copy=True, **way)
            if hook is not None:
                hook()
            if way.get("async_finish"):
                event.current_stream_wait()
            batch.check_sums(out)
        batch.combine(buffer, poison, handle, zero_copy=True, async_finish=True)
        # Written at once: it waits for the combine that reads it.
        buffer.get_next_low_latency_combine_buffer(handle).fill_(float("nan"))


def both_modes(buffer: Buffer, seed: int) -> None:
    """Normal and low-latency operations in turn, without cleaning."""
    from deep_ep_reference import make_batch

    for number in range(2):
        normal = cases.Caller(buffer, make_batch(seed + number, buffer.group_size))
        batch = Batch(seed + number, buffer)
        handle = normal.dispatch_checked()
        x, count, slot_handle, _, _ = batch.dispatch(buffer)
        batch.check_rows(x, count, slot_handle)
        normal.combine_checked(handle, seed)
        out, _, _ = batch.combine(buffer, batch.experts_of(x), slot_handle)
        batch.check_sums(out)


def shapes(buffer: Buffer, seed: int) -> None:
    """Calls of several shapes have groups of their own, and come in any turn."""
    batches = [Batch(seed, buffer, hidden) for hidden in (128, 256, 24)]
    for _ in range(2):
        for batch in batches:
            x, count, handle, _, _ = batch.dispatch(buffer)
            batch.check_rows(x, count, handle)
            batch.check_sums(batch.combine(buffer, batch.experts_of(x), handle)[0])


def left_out(buffer: Buffer, seed: int) -> None:
    """The caller masks the last rank, then brings it back, as DeepEP's tests of shrinking do."""
    last = buffer.group_size - 1
    batch = Batch(seed, buffer)
    status = torch.full((buffer.group_size,), 7, dtype=torch.int32, device=batch.device)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * buffer.group_size
    x, count, handle, _, _ = batch.dispatch(buffer)
    batch.check_rows(x, count, handle)
    _meet(buffer)
    if buffer.rank != last:
        buffer.low_latency_update_mask_buffer(last, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.nonzero().flatten().tolist() == [last]
        mine = [np.where(ids // LOCAL == last, -1, ids) for ids in batch.ids[:last]]
        routing = SlotRouting([*mine, batch.ids[last][:0]], batch.experts, MOST)
        rows = [*batch.rows[:last], batch.rows[last][:0]]
        weights = [*batch.weights[:last], batch.weights[last][:0]]
        for _ in range(3):
            x, count, handle, _, _ = batch.dispatch(buffer)
            assert count.tolist() == routing.counts(buffer.rank)
            out, _, _ = batch.combine(buffer, batch.experts_of(x), handle)
            want = routing.sums(buffer.rank, rows, weights).astype(np.float32)
            np.testing.assert_array_equal(out.float().cpu().numpy(), want)
    _meet(buffer)
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * buffer.group_size
    _meet(buffer)
    buffer.clean_low_latency_buffer(MOST, batch.hidden, batch.experts)
    x, count, handle, _, _ = batch.dispatch(buffer)
    batch.check_rows(x, count, handle)
    batch.check_sums(batch.combine(buffer, batch.experts_of(x), handle)[0])


def _meet(buffer: Buffer) -> None:
    if buffer._live().device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()
