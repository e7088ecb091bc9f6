"""ElasticBuffer, the interface of DeepEP 2, against plain loops."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spread
from crossdock.deep_ep import Buffer, ElasticBuffer, EPHandle, EventOverlap
from crossdock.errors import Mismatch
from deep_ep_cases import SECONDS, CountedRounds, one_rank_errs, process_group, same
from deep_ep_reference import Batch, make_batch
from support import Apart, Rank, on_ranks

EXPERTS, TOPK, HIDDEN, MOST = 8, 3, 32, 12


@contextlib.contextmanager
def elastic(me: Rank, **options: Any) -> Iterator[ElasticBuffer]:
    with process_group():
        options = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN} | options
        buffer = ElasticBuffer(dist.group.WORLD, explicitly_destroy=True, **options)
        yield buffer
        buffer.destroy()


def drawn(me: Rank, seed: int = 1) -> Batch:
    """A batch of small integers, whose sums are exact; ranks have different numbers of tokens."""
    tokens = ([5, 0, MOST, 1] * 2)[: me.num_ranks]
    batch = make_batch(seed, me.num_ranks, tokens, HIDDEN, TOPK, EXPERTS // me.num_ranks)
    for x, weights in zip(batch.x, batch.topk_weights):
        x.copy_((2 * x).round().clamp(-4, 4))
        weights.copy_((8 * weights).ceil() / 8)
    return batch


def once_per_rank(batch: Batch, rank: int) -> torch.Tensor:
    """The sums of rows that come back as they were sent: one from each rank that had the token."""
    x = batch.x[rank]
    ranks = torch.tensor([len(batch.ranks_of(rank, t)) for t in range(len(x))])
    return (x.float() * ranks[:, None]).to(x.dtype)


def sources(batch: Batch, rank: int) -> torch.Tensor:
    """[N,2]: source and token of the rows that `rank` receives, and source and first choice."""
    idx, _ = batch.received_topk(rank)
    lines = [
        (row.source * MOST + row.token, row.source * TOPK + int((here >= 0).nonzero()[0]))
        for row, here in zip(batch.rows(rank), idx)
    ]
    return torch.tensor(lines, dtype=torch.int32).reshape(-1, 2)


def places(batch: Batch, rank: int) -> torch.Tensor:
    """[T,K]: where each choice's rank puts the token among those of `rank`, -1 if it has it."""
    idx, local = batch.topk_idx[rank], EXPERTS // batch.num_ranks
    out, sent = torch.full_like(idx, -1, dtype=torch.int32), [0] * batch.num_ranks
    for token, line in enumerate(idx.tolist()):
        there = set()
        for k, expert in enumerate(line):
            if expert >= 0 and expert // local not in there:
                there.add(expert // local)
                out[token, k] = rank * MOST + sent[expert // local]
                sent[expert // local] += 1
    return out


def zones(batch: Batch, rank: int) -> list[list[tuple[int, int]]]:
    """For each expert of `rank`: its received rows, as (row, choice)."""
    idx, _ = batch.received_topk(rank)
    return [(idx == expert).nonzero().tolist() for expert in range(EXPERTS // batch.num_ranks)]


@on_ranks(1, 2, 4, Apart(4))
@pytest.mark.parametrize("do_cpu_sync, asynchronous", [(None, False), (False, True)])
def test_rows_and_handles(me: Rank, do_cpu_sync: bool | None, asynchronous: bool) -> None:
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
        per_rank = batch.prefix()[:, me.rank].tolist()
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
        assert stats.tolist() == [7 + count for count in counts]
        assert handle.topk_idx is not idx
        same("topk_idx", handle.topk_idx, idx)

        combined, sums, event = buffer.combine(
            rows, handle, recv_weights, async_with_compute_stream=asynchronous
        )
        if asynchronous:
            event.current_stream_wait()
        same("combined", combined, once_per_rank(batch, me.rank))
        same("weights", sums, weights.masked_fill(idx < 0, 0))
        again, idx_again, none_weights, other, _ = buffer.dispatch(2 * x, handle=handle)
        assert none_weights is None and other is handle
        same("again", again[:real], 2 * batch.received(me.rank, batch.x))
        same("recv_topk_idx again", idx_again, recv_idx)
        _, _, weights_again, *_ = buffer.dispatch(x, None, 2 * weights, handle=handle)
        same("weights along a handle", weights_again, 2 * recv_weights)
        metadata = handle.recv_src_metadata
        assert metadata is handle.recv_src_metadata and metadata.shape == (len(rows), 2 + TOPK)
        same("sources", metadata[:real, :2].contiguous(), sources(batch, me.rank))
        assert (metadata[real:] == -1).all() and (metadata[:, 2:] == -1).all()
        same("slots", handle.dst_buffer_slot_idx, places(batch, me.rank))
        handle.recv_src_metadata = metadata[:real]  # callers may assign to fields
        assert len(handle.recv_src_metadata) == real


@on_ranks(1, 2, 4, Apart(4))
@pytest.mark.parametrize(
    "alignment, do_cpu_sync, reduce_first",
    [(1, True, True), (8, True, False), (8, False, True), (6, True, True), (6, False, True)],
)
def test_rows_by_expert(me: Rank, alignment: int, do_cpu_sync: bool, reduce_first: bool) -> None:
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
        padded = recv_weights.masked_fill(factors == 0, torch.nan)
        combined, home, _ = buffer.combine(results, handle, padded, bias)
        factor = torch.where(idx < 0, 0, idx % local + 1).sum(1)
        same("combined", combined, (x.float() * factor[:, None] + 3).to(x.dtype))
        same("weights", home, weights.masked_fill(idx < 0, 0))
        assert buffer.combine(results, handle)[1] is None
        options = {"handle": handle, "do_expand": True, "do_zero_padding": True}
        again, none, none_weights, *_ = buffer.dispatch(2 * x, **options)
        assert none is None and none_weights is None
        same("again", again, 2 * rows)
        _, _, weights_again, *_ = buffer.dispatch(x, topk_weights=2 * weights, **options)
        same("weights along a handle", weights_again, 2 * recv_weights)
        check_rows_per_token(buffer, batch, handle, rows)


def check_rows_per_token(
    buffer: ElasticBuffer, batch: Batch, handle: EPHandle, rows: torch.Tensor
) -> None:
    """A row per token along a handle of rows by expert, and the handle's fields about tokens."""
    rank = buffer.rank
    x, weights = batch.x[rank], batch.topk_weights[rank]
    received, (_, wanted_weights) = batch.received(rank, batch.x), batch.received_topk(rank)
    compact, recv_idx, *_ = buffer.dispatch(x, handle=handle)
    same("a row per token", compact[: len(received)], received)
    same("recv_topk_idx", recv_idx[: len(received)], batch.received_topk(rank)[0])
    same("weights", weights_of(buffer, x, weights, handle)[: len(received)], wanted_weights)
    assert handle.num_recv_tokens == len(compact)
    per_rank = batch.prefix()[:, rank].tolist()
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
    same("slots", handle.dst_buffer_slot_idx, places(batch, rank))
    metadata = handle.recv_src_metadata
    same("sources", metadata[: len(received), :2].contiguous(), sources(batch, rank))
    assert (metadata[len(received) :] == -1).all() and not compact[len(received) :].any()
    metadata[:] = 7  # which no operation goes by
    same("a row per token", buffer.dispatch(x, handle=handle)[0], compact)
    slots = handle.look().metadata[: len(received), 2:].cpu()
    assert torch.equal(slots >= 0, recv_idx[: len(received)] >= 0)
    for k in range(TOPK):
        here = slots[:, k] >= 0
        same("rows by expert", rows[slots[here, k]], received[here])


def drawn_results(batch: Batch, alignment: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Results of the experts of every rank: rows by expert, NaN where there is only padding."""
    generator = torch.Generator().manual_seed(7)
    results = []
    for rank in range(batch.num_ranks):
        parts = []
        for zone in zones(batch, rank):
            part = torch.randn(-(-len(zone) // alignment) * alignment, HIDDEN, generator=generator)
            part[len(zone) :] = torch.nan
            parts.append(part.to(dtype))
        results.append(torch.cat(parts))
    return results


def reduced(batch: Batch, rank: int, results: torch.Tensor, alignment: int) -> torch.Tensor:
    """[N,H]: a received token's rows, added up by ascending choice in float32."""
    total = torch.zeros(len(batch.rows(rank)), results.shape[1])
    places = []
    begin = 0
    for zone in zones(batch, rank):
        places += [(choice, row, begin + place) for place, (row, choice) in enumerate(zone)]
        begin += -(-len(zone) // alignment) * alignment
    for _, row, place in sorted(places):
        total[row] += results[place].float()
    return total


def weights_of(
    buffer: ElasticBuffer, x: torch.Tensor, weights: torch.Tensor, handle: EPHandle
) -> torch.Tensor:
    """The weights beside a row per token, along a handle."""
    _, _, found, *_ = buffer.dispatch(x, topk_weights=weights, handle=handle)
    assert found is not None
    return found


@on_ranks(2, 4, Apart(4))
@pytest.mark.parametrize("reduce_first", [True, False])
@pytest.mark.parametrize("alignment", [1, 8, 6])
def test_sums_of_rows_by_expert(me: Rank, alignment: int, reduce_first: bool) -> None:
    """Every bit: also where sums of ranks, or of the ranks' sums, are rounded."""
    batch = drawn(me, seed=4)
    with elastic(me, allow_multiple_reduction=reduce_first) as buffer:
        *_, handle, _ = buffer.dispatch(
            batch.x[me.rank],
            batch.topk_idx[me.rank],
            num_experts=EXPERTS,
            expert_alignment=alignment,
            do_expand=True,
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            results = drawn_results(batch, alignment, dtype)
            sums = [reduced(batch, rank, one, alignment) for rank, one in enumerate(results)]
            travels = dtype if reduce_first else torch.float32
            combined, *_ = buffer.combine(results[me.rank], handle)
            wanted = batch.combined(me.rank, [one.to(travels) for one in sums])
            same("combined", combined, wanted.to(dtype))
            # With a bias they travel as float32.
            bias = torch.randn(len(combined), HIDDEN).to(dtype)
            combined, *_ = buffer.combine(results[me.rank], handle, bias=bias)
            wanted = batch.combined(me.rank, sums, (bias.float(),)).to(dtype)
            same("combined with a bias", combined, wanted)


@on_ranks(2)
def test_scales_travel_and_lie_as_asked(me: Rank) -> None:
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


@on_ranks(2, Apart(2))
def test_facts_and_mistakes(me: Rank) -> None:
    with elastic(me, num_allocated_qps=3) as buffer:
        hosts = len(set(spread.hosts(me.num_ranks)))
        assert buffer.get_physical_domain_size() == (hosts, me.num_ranks // hosts)
        assert buffer.get_logical_domain_size() == (1, me.num_ranks)
        assert buffer.get_theoretical_num_sms(EXPERTS, TOPK) % 2 == 0
        assert buffer.num_max_tokens_per_rank == MOST and buffer.num_allocated_qps == 3
        assert (buffer.rank_idx, buffer.num_ranks) == (me.rank, me.num_ranks)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, me.num_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, me.rank)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (hosts, me.num_ranks // hosts)
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
        mistakes = [
            ({"topk_idx": None}, "topk_idx, num_experts: expected both"),
            ({"num_experts": 7}, "num_experts: expected a multiple of the 2 ranks, got 7"),
            ({"num_max_tokens_per_rank": 4}, "num_max_tokens_per_rank: expected .* least 5, got 4"),
            ({"num_max_tokens_per_rank": 1 << 64}, "num_max_tokens_per_rank: expected at most"),
            ({"expert_alignment": 0}, "expert_alignment: expected an integer of at least 1"),
            ({"num_sms": 3}, "num_sms: expected an even number"),
            ({"cumulative_local_expert_recv_stats": torch.zeros(3)}, "recv_stats: expected"),
            ({"x": good["x"].double()}, "x: expected"),
            ({"previous_event": 3}, "previous_event: expected an EventOverlap"),
        ]
        one_rank_errs(me, buffer.dispatch, good, mistakes, says="")
        *_, handle, _ = buffer.dispatch(**good, do_expand=True, previous_event=EventOverlap())
        rows = torch.zeros(handle.num_expanded_tokens, HIDDEN, dtype=torch.bfloat16)
        weights = torch.zeros(len(rows))
        of_combine = [
            ({"x": rows.new_zeros(3, HIDDEN)}, r"x: expected .* got \[3,32\]"),
            ({"topk_weights": weights.double()}, "topk_weights: expected .* got .* float64"),
            (
                {"topk_weights": torch.zeros(len(rows), TOPK)},
                r"topk_weights: expected \[\d+\] float",
            ),
        ]
        call = {"x": rows, "handle": handle, "topk_weights": weights}
        one_rank_errs(me, buffer.combine, call, of_combine)
        check_mistakes_along_a_handle(me, buffer, batch, good)


def check_mistakes_along_a_handle(
    me: Rank, buffer: ElasticBuffer, batch: Batch, good: dict[str, Any]
) -> None:
    weights = batch.topk_weights[me.rank]
    *_, handle, _ = buffer.dispatch(**good, do_expand=True)
    along = [
        ({"topk_idx": good["topk_idx"]}, "topk_idx: expected None, as handle is given"),
        ({"topk_weights": torch.zeros(1, TOPK)}, "topk_weights: expected .* got .1,3. float32"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int32)},
            "recv_stats: expected None, as handle is given",
        ),
        ({"num_experts": 4}, "num_experts: expected None or 8, as the handle was made for"),
        ({"expert_alignment": 4}, "expert_alignment: expected None or 1, as"),
        ({"num_max_tokens_per_rank": 99}, "num_max_tokens_per_rank: expected None or 12, as"),
    ]
    cached = {"x": good["x"], "handle": handle, "topk_weights": weights}
    one_rank_errs(me, buffer.dispatch, cached, along)
    *_, handle, _ = buffer.dispatch(**good)
    wrong = [({"do_expand": True}, "do_expand: expected False, as the handle was made without")]
    one_rank_errs(me, buffer.dispatch, {"x": good["x"], "handle": handle}, wrong)
    # Weights on one rank alone.
    with pytest.raises(Mismatch):
        buffer.dispatch(good["x"], handle=handle, topk_weights=weights if me.rank == 0 else None)


@on_ranks(2, Apart(2))
def test_ranks_agree_over_the_host_once(me: Rank) -> None:
    """Also where the host waits for rows; between machines they agree in every dispatch."""
    batch = drawn(me)
    x, idx = batch.x[me.rank], batch.topk_idx[me.rank]
    with elastic(me) as buffer:
        session, rounds = buffer._session(), list[int]()
        session.host = CountedRounds(session.host, rounds)
        between = len(set(spread.hosts(me.num_ranks))) > 1
        for changes, agreements in (
            ({}, 1),
            ({}, 0),
            ({"do_cpu_sync": False}, 0),
            ({"num_max_tokens_per_rank": MOST + 1}, 1),
            ({"expert_alignment": 8}, 0),
            ({"do_expand": True}, 1),
            ({"do_expand": True, "do_cpu_sync": False}, 0),
            ({"do_expand": True, "expert_alignment": 8}, 1),
            ({"do_expand": True, "expert_alignment": 4}, 0),
            ({"do_expand": True, "expert_alignment": 6}, 0),
            ({}, 0),
        ):
            rounds.clear()
            buffer.dispatch(x, idx, num_experts=EXPERTS, **changes)
            assert len(rounds) == max(agreements, between), changes


@on_ranks(2, 3, Apart(2))
def test_ranks_with_other_numbers_all_hear_it_at_once(me: Rank) -> None:
    """Whichever rank comes first, and whether groups that are known serve any of the numbers."""
    x, idx = torch.ones(5, HIDDEN, dtype=torch.bfloat16), torch.arange(10).view(5, 2) % 6
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "num_experts": 6}
    by_expert = {"do_expand": True, "expert_alignment": 8}
    # Rows that the group of others takes as well. So the dispatch itself finds them, which on GPUs
    # ends behind its call.
    of_the_group: list[dict[str, Any]] = [
        {"x": torch.ones(5, 2 * HIDDEN, dtype=torch.bfloat16)},
        {"x": (x.to(torch.float8_e4m3fn), torch.ones(5, 1))},
    ]
    with elastic(me) as buffer:
        on_gpus = not isinstance(buffer, ElasticBuffer)
        for form in ({}, by_expert):
            buffer.dispatch(**good, **form)
            for wrong in (
                *of_the_group,
                {"num_experts": 12},
                {"x": torch.ones(5, 8 * HIDDEN, dtype=torch.bfloat16)},
                {"x": (x.to(torch.float8_e4m3fn), torch.ones(5, 200))},
                {"topk_idx": idx[:, :1].contiguous()},
                {"topk_idx": torch.cat([idx, idx], 1)},
                {"num_max_tokens_per_rank": MOST - 1},
                {"num_max_tokens_per_rank": 3 * MOST},
                # On GPUs a rank that does not wait for its rows hears it behind the call.
                *([] if on_gpus else [{"do_cpu_sync": False}]),
                {"num_sms": 8},
                by_expert if not form else {"do_expand": False},
                *([{"expert_alignment": one} for one in (4, 64, 6)] if form else []),
            ):
                for odd in range(me.num_ranks):
                    given = {**good, **form, **(wrong if odd == me.rank else {})}
                    if on_gpus and any(wrong is one for one in of_the_group):
                        buffer.dispatch(**given)
                        given = {**good, **form}  # the next call says so
                    began = time.monotonic()
                    with pytest.raises(Mismatch) as found:
                        buffer.dispatch(**given)
                    assert time.monotonic() - began < SECONDS, found.value
                buffer.dispatch(**good, **form)


@on_ranks(2, Apart(2))
def test_weights_of_rows_by_expert_go_home_on_all_ranks_or_on_none(me: Rank) -> None:
    batch = drawn(me)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me) as buffer:
        rows, _, recv_weights, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=EXPERTS, do_expand=True
        )
        for odd in range(2):
            with pytest.raises(Mismatch):
                buffer.combine(rows, handle, recv_weights if me.rank == odd else None)
        _, home, _ = buffer.combine(rows, handle, recv_weights)
        same("weights", home, weights.masked_fill(idx < 0, 0))


@on_ranks(2)
def test_few_tokens_have_a_buffer_of_their_own_beside_it(me: Rank) -> None:
    batch = drawn(me)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me) as prefill:
        options = {"low_latency_mode": True, "explicitly_destroy": True}
        decode = Buffer(dist.group.WORLD, **options)
        for _ in range(2):  # in turn, without any cleaning between
            rows, _, _, handle, _ = prefill.dispatch(x, idx, weights, num_experts=EXPERTS)
            same("rows", rows, batch.received(me.rank, batch.x))
            combined, _, _ = prefill.combine(rows, handle)
            same("combined", combined, once_per_rank(batch, me.rank))
            slots, _, slot_handle, _, _ = decode.low_latency_dispatch(
                x, idx, MOST, EXPERTS, use_fp8=False
            )
            decoded, _, _ = decode.low_latency_combine(slots, idx, weights, slot_handle)
            wanted = (weights * (idx >= 0)).sum(1, keepdim=True) * x.float()
            same("decoded", decoded, wanted.to(x.dtype))
        decode.destroy()
