"""ElasticBuffer, the interface of DeepEP 2, against plain loops."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.deep_ep import Buffer, ElasticBuffer, EPHandle, EventOverlap
from crossdock.errors import Mismatch
from deep_ep_cases import process_group, same
from deep_ep_reference import Batch
from support import Rank, run_ranks
from test_docs import arguments_in

EXPERTS, TOPK, HIDDEN, MOST = 8, 3, 32, 12

# DeepEP 2.1, as its callers see it.
SIGNATURES = {
    "__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, "
    "hidden=0, num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
    "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, "
    "num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, "
    "explicitly_destroy=False",
    "dispatch": "self, x, topk_idx=None, topk_weights=None, "
    "cumulative_local_expert_recv_stats=None, num_experts=None, num_max_tokens_per_rank=None, "
    "expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
    "previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False, handle=None, do_handle_copy=True, do_cpu_sync=None, "
    "do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, "
    "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False",
    "barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_take_what_deep_ep_takes(name: str) -> None:
    parameters = inspect.signature(getattr(ElasticBuffer, name)).parameters.values()
    written = ", ".join(
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
    )
    assert written == SIGNATURES[name]


@pytest.mark.parametrize("method", ["__init__", "dispatch", "combine"])
def test_page_says_what_each_argument_does(method: str) -> None:
    title = f"`{'ElasticBuffer' if method == '__init__' else method}(...)`"
    page = (pathlib.Path(__file__).parents[3] / "docs/deep_ep_elastic.md").read_text()
    (section,) = re.findall(rf"### {re.escape(title)}\n(.*?)\n##", page, re.DOTALL)
    parameters = list(inspect.signature(getattr(ElasticBuffer, method)).parameters)[1:]
    assert arguments_in(section) == parameters


@contextlib.contextmanager
def elastic(me: Rank, **options: Any) -> Iterator[ElasticBuffer]:
    with process_group(me):
        options = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN} | options
        buffer = ElasticBuffer(dist.group.WORLD, explicitly_destroy=True, **options)
        yield buffer
        buffer.destroy()


def drawn(me: Rank, seed: int = 1) -> Batch:
    """A batch of small integers, whose sums are exact; ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(EXPERTS, [], [], [])
    for count in ([5, 0, MOST, 1] * 2)[: me.num_ranks]:
        ids = torch.rand(count, EXPERTS, generator=generator).topk(TOPK, dim=1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.125] = -1
        batch.topk_idx.append(ids)
        batch.topk_weights.append(torch.randint(1, 9, ids.shape, generator=generator) / 8)
        rows = torch.randint(-4, 5, (count, HIDDEN), generator=generator)
        batch.x.append(rows.bfloat16())
    return batch


def zones(batch: Batch, rank: int) -> list[list[tuple[int, int]]]:
    """For each expert of `rank`: its received rows, as (row, choice)."""
    idx, _ = batch.received_topk(rank)
    local = EXPERTS // batch.num_ranks
    return [
        [(row, k) for row in range(len(idx)) for k in range(TOPK) if idx[row, k] == expert]
        for expert in range(local)
    ]


def check_compact(me: Rank, do_cpu_sync: bool | None, asynchronous: bool) -> None:
    batch = drawn(me)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me) as buffer:
        local = EXPERTS // me.num_ranks
        stats = torch.full((local,), 7, dtype=torch.int32)
        rows, recv_idx, recv_weights, handle, event = buffer.dispatch(
            x,
            idx,
            weights,
            stats,
            num_experts=EXPERTS,
            expert_alignment=4,
            async_with_compute_stream=asynchronous,
            do_cpu_sync=do_cpu_sync,
        )
        if asynchronous:
            event.current_stream_wait()
        real = len(batch.rows(me.rank))
        assert len(rows) == (real if do_cpu_sync is not False else me.num_ranks * MOST)
        wanted_idx, wanted_weights = batch.received_topk(me.rank)
        same("rows", rows[:real], batch.received(me.rank, batch.x))
        same("recv_topk_idx", recv_idx[:real], wanted_idx)
        same("recv_topk_weights", recv_weights[:real], wanted_weights)
        assert (recv_idx[real:] == -1).all()
        counts = batch.per_expert(me.rank, 1)
        aligned = batch.per_expert(me.rank, 4)
        assert isinstance(handle, EPHandle) and not handle.do_expand
        assert handle.num_recv_tokens_per_expert_list == ([] if do_cpu_sync is False else aligned)
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        ends = torch.tensor(aligned).cumsum(0).tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        per_rank = [
            sum(s <= source for s, _ in batch.rows(me.rank)) for source in range(me.num_ranks)
        ]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
        assert stats.tolist() == [7 + count for count in counts]
        assert handle.topk_idx is not idx and torch.equal(handle.topk_idx, idx)

        combined, sums, event = buffer.combine(
            rows, handle, recv_weights, async_with_compute_stream=asynchronous
        )
        if asynchronous:
            event.current_stream_wait()
        ranks = torch.tensor([len(batch.ranks_of(me.rank, t)) for t in range(len(x))])
        same("combined", combined, (x.float() * ranks[:, None]).to(x.dtype))
        same("weights", sums, weights.masked_fill(idx < 0, 0))
        again, none_idx, none_weights, other, _ = buffer.dispatch(2 * x, handle=handle)
        assert none_idx is None and none_weights is None and other is handle
        same("again", again[:real], 2 * batch.received(me.rank, batch.x))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("do_cpu_sync, asynchronous", [(None, False), (False, True)])
def test_rows_and_handles(num_ranks: int, do_cpu_sync: bool | None, asynchronous: bool) -> None:
    run_ranks(num_ranks, check_compact, do_cpu_sync, asynchronous, timeout=120)


def check_expanded(me: Rank, alignment: int, do_cpu_sync: bool, reduce_first: bool) -> None:
    batch = drawn(me, seed=2)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me, allow_multiple_reduction=reduce_first) as buffer:
        rows, none, recv_weights, handle, _ = buffer.dispatch(
            x,
            idx,
            weights,
            num_experts=EXPERTS,
            expert_alignment=alignment,
            do_cpu_sync=do_cpu_sync,
            do_expand=True,
            do_zero_padding=True,
        )
        assert none is None and handle.do_expand
        local = EXPERTS // me.num_ranks
        received = batch.received(me.rank, batch.x)
        _, wanted_weights = batch.received_topk(me.rank)
        begin, factors = 0, torch.zeros(len(rows))
        for expert, zone in enumerate(zones(batch, me.rank)):
            end = begin + len(zone)
            assert handle.psum_num_recv_tokens_per_expert[expert] == end
            for row, (source, k) in enumerate(zone, begin):
                same("row", rows[row], received[source])
                same("weight", recv_weights[row], wanted_weights[source, k])
                factors[row] = expert + 1
            begin += -(-len(zone) // alignment) * alignment
            assert not rows[end:begin].any() and not recv_weights[end:begin].any()
        if do_cpu_sync:
            assert len(rows) == begin == sum(handle.num_recv_tokens_per_expert_list)
        else:
            most = me.num_ranks * MOST * min(TOPK, local) + (alignment - 1) * local
            assert len(rows) == handle.num_expanded_tokens == most
        # Local expert e multiplies by e + 1; what padding holds has no meaning.
        results = (rows.float() * factors[:, None]).to(x.dtype)
        results[factors == 0] = torch.nan
        bias = torch.full_like(x, 3.0)
        combined, none, _ = buffer.combine(results, handle, bias=bias)
        assert none is None
        factor = torch.where(idx < 0, 0, idx % local + 1).sum(1)
        same("combined", combined, (x.float() * factor[:, None] + 3).to(x.dtype))
        again, *_ = buffer.dispatch(2 * x, handle=handle, do_zero_padding=True)
        same("again", again, 2 * rows)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "alignment, do_cpu_sync, reduce_first", [(1, True, True), (8, True, False), (8, False, True)]
)
def test_rows_by_expert(
    num_ranks: int, alignment: int, do_cpu_sync: bool, reduce_first: bool
) -> None:
    run_ranks(num_ranks, check_expanded, alignment, do_cpu_sync, reduce_first, timeout=120)


def check_scales(me: Rank) -> None:
    batch = drawn(me, seed=3)
    idx = batch.topk_idx[me.rank]
    values = [one.to(torch.float8_e4m3fn) for one in batch.x]
    scales = [one.float()[:, :3].contiguous() for one in batch.x]
    with elastic(me, use_fp8_dispatch=True) as buffer:
        given = values[me.rank], scales[me.rank]
        for expand in (False, True):
            (rows, sf), _, weights, _, _ = buffer.dispatch(
                given,
                idx,
                num_experts=EXPERTS,
                do_expand=expand,
                use_tma_aligned_col_major_sf=True,
            )
            order = range(len(batch.rows(me.rank)))
            if expand:
                order = [row for zone in zones(batch, me.rank) for row, _ in zone]
                assert (weights == 1).all()  # where none are given
            same(
                "rows",
                rows,
                batch.received(me.rank, values).view(torch.uint8)[list(order)].view(rows.dtype),
            )
            same("scales", sf.contiguous(), batch.received(me.rank, scales)[list(order)])
            assert sf.stride() == (1, -(-len(sf) // 4) * 4)


def test_scales_travel_and_lie_as_asked() -> None:
    run_ranks(2, check_scales, timeout=120)


def check_facts(me: Rank) -> None:
    with elastic(me) as buffer:
        assert buffer.get_logical_domain_size() == (1, me.num_ranks)
        assert buffer.get_theoretical_num_sms(EXPERTS, TOPK) % 2 == 0
        assert buffer.num_max_tokens_per_rank == MOST
        buffer.capture().current_stream_wait()
        buffer.barrier()
        hint = ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, MOST, HIDDEN, TOPK)
        assert hint >= me.num_ranks * MOST * 2 * HIDDEN
        with pytest.raises(ValueError, match="num_bytes: expected a number, or num_max_tokens"):
            ElasticBuffer(dist.group.WORLD)
        with pytest.raises(ValueError, match="expected at least 0, got -1"):
            ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=-1)
        batch = drawn(me)
        good: dict[str, Any] = {
            "x": batch.x[me.rank],
            "topk_idx": batch.topk_idx[me.rank],
            "num_experts": EXPERTS,
            "do_cpu_sync": True,
        }
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"topk_idx": None}, "topk_idx, num_experts: expected both"),
            ({"num_experts": 7}, "num_experts: expected a multiple of the 2 ranks, got 7"),
            ({"num_max_tokens_per_rank": 4}, "num_max_tokens_per_rank: expected .* least 5, got 4"),
            ({"expert_alignment": 0}, "expert_alignment: expected an integer of at least 1"),
            ({"num_sms": 3}, "num_sms: expected an even number"),
            ({"cumulative_local_expert_recv_stats": torch.zeros(3)}, "recv_stats: expected"),
            ({"x": good["x"].double()}, "x: expected"),
            ({"previous_event": 3}, "previous_event: expected an EventOverlap"),
        ]
        for change, text in mistakes:
            kind: type[Exception] = ValueError
            if me.rank == 1:
                change, kind, text = {}, Mismatch, "rank 0 failed"
            with pytest.raises(kind, match=text):
                buffer.dispatch(**good | change)
        *_, handle, _ = buffer.dispatch(**good, do_expand=True, previous_event=EventOverlap())
        rows = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
        if me.rank == 0:
            with pytest.raises(ValueError, match=r"x: expected .* got \[3,32\]"):
                buffer.combine(rows, handle)
        else:
            with pytest.raises(Mismatch, match="rank 0"):
                fit = rows.new_zeros(handle.num_expanded_tokens, HIDDEN)
                buffer.combine(fit, handle)


def test_facts_and_mistakes() -> None:
    run_ranks(2, check_facts, timeout=120)


def check_beside_low_latency(me: Rank) -> None:
    batch = drawn(me)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me) as prefill:
        options = {"low_latency_mode": True, "explicitly_destroy": True}
        decode = Buffer(dist.group.WORLD, **options)
        for _ in range(2):  # in turn, without any cleaning between
            rows, _, _, handle, _ = prefill.dispatch(x, idx, weights, num_experts=EXPERTS)
            same("rows", rows, batch.received(me.rank, batch.x))
            combined, _, _ = prefill.combine(rows, handle)
            ranks = torch.tensor([len(batch.ranks_of(me.rank, t)) for t in range(len(x))])
            same("combined", combined, (x.float() * ranks[:, None]).to(x.dtype))
            slots, _, slot_handle, _, _ = decode.low_latency_dispatch(
                x, idx, MOST, EXPERTS, use_fp8=False
            )
            decoded, _, _ = decode.low_latency_combine(slots, idx, weights, slot_handle)
            wanted = (weights * (idx >= 0)).sum(1, keepdim=True) * x.float()
            same("decoded", decoded, wanted.to(x.dtype))
        decode.destroy()


def test_few_tokens_have_a_buffer_of_their_own_beside_it() -> None:
    run_ranks(2, check_beside_low_latency)
