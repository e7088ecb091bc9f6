"""ll_dispatch and ll_combine: every element, halves, compilers, mistakes, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, PeerLost
from reference import Routing, quantised
from slots import SlotRouting, choices, factors
from support import Rank, on_ranks
from torch_support import integers, one_rank_errs, reported, settle, where

SEED = 83
OPS = torch.ops.crossdock
EXPERTS, TOPK = 8, 3
MOST = 6  # tokens of a rank


class Batch:
    """Inputs of all ranks, which each rank computes from the seed alone."""

    def __init__(
        self,
        seed: int,
        num_ranks: int,
        hidden: int = 32,
        expert_ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.tokens = (4, 0, 6, 1)[:num_ranks]
        self.ids = choices(seed, self.tokens, EXPERTS, TOPK)
        self.routing = SlotRouting(self.ids, EXPERTS, MOST, expert_ranks)
        self.x = [integers(seed + 1000 + r, t, hidden) for r, t in enumerate(self.tokens)]
        self.weights = [integers(seed + 2000 + r, t, TOPK) for r, t in enumerate(self.tokens)]

    def local(self, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """x, topk_idx, topk_weights of a rank."""
        x, ids, weights = (
            torch.from_numpy(part[rank]).to(where(), copy=True)
            for part in (self.x, self.ids, self.weights)
        )
        return x.to(dtype), ids, weights

    def check(self, rank: int, slots: xd.Slots) -> None:
        routing = self.routing
        assert slots.counts.tolist() == routing.counts(rank)
        equal(routing.in_rows(rank, array(slots.tokens)), routing.dispatch(rank, self.x))
        if slots.source_ranges is not None:
            equal(array(slots.source_ranges), routing.source_ranges(rank))
            got = routing.in_rows(rank, array(slots.source_tokens))
            equal(got, routing.source_tokens(rank))
        assert (slots.plan.num_tokens, slots.plan.topk) == self.ids[rank].shape

    def check_sums(self, rank: int, out: torch.Tensor, weighted: bool = True) -> None:
        equal(array(out), self.routing.sums(rank, self.x, self.weights if weighted else None))


def array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def equal(got: np.ndarray, want: np.ndarray) -> None:
    __tracebackhide__ = True
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def experts(slots: xd.Slots) -> torch.Tensor:
    """The model's experts on all slots: local expert e multiplies by e + 1."""
    tokens = slots.tokens
    return tokens * torch.from_numpy(factors(len(tokens))).to(tokens.device, tokens.dtype)


def make_group(hidden: int = 32, **options) -> xd.LowLatencyGroup:
    return xd.LowLatencyGroup(
        num_experts=EXPERTS, max_topk=TOPK, max_tokens_per_rank=MOST, hidden=hidden, **options
    )


# Other experts than by default, and another number of them on each rank; none on rank 1 of four.
ELSEWHERE = {1: (0,) * 8, 2: (1, 0, 1, 1, 1, 0, 1, 1), 4: (3, 0, 2, 2, 0, 2, 3, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elsewhere", [False, True])
@on_ranks(4)
def test_every_element_equals_the_reference(me: Rank, dtype: torch.dtype, elsewhere: bool) -> None:
    expert_ranks = ELSEWHERE[me.num_ranks] if elsewhere else None
    with xd.init(), torch.no_grad():
        group = make_group(dtype=dtype, expert_ranks=expert_ranks)
        device = group.comm.device
        load = torch.zeros(group.num_local_experts, dtype=torch.int64, device=device)
        wait = torch.zeros(me.num_ranks, dtype=torch.int64, device=device)
        total = torch.zeros_like(load)
        for number in range(3):
            batch = Batch(SEED + number, me.num_ranks, expert_ranks=expert_ranks)
            x, ids, weights = batch.local(me.rank, dtype)
            given = group.slots(sources=True)
            for part in given:
                if isinstance(part, torch.Tensor):
                    part.view(torch.uint8).fill_(0x7F)
            slots = xd.ll_dispatch(
                group, x, ids, weights, out=given, expert_load=load, wait_ns=wait
            )
            assert slots is given
            batch.check(me.rank, slots)
            behind = batch.routing.behind_rows(
                me.rank, slots.tokens.cpu().view(torch.uint8).numpy()
            )
            assert (behind == 0x7F).all()
            total += slots.counts
            assert torch.equal(load, total)
            batch.check_sums(me.rank, xd.ll_combine(slots.plan, experts(slots), wait_ns=wait))
            slots = xd.ll_dispatch(group, x, ids)
            batch.check(me.rank, slots)
            rows = experts(slots)
            batch.check_sums(me.rank, xd.ll_combine(slots.plan, rows), weighted=False)
            out = torch.full((len(x), 32), 7, dtype=dtype, device=device)
            assert xd.ll_combine(slots.plan, rows, weights, out=out) is out
            batch.check_sums(me.rank, out)
            # Rows of any strides, which begin anywhere, and slices.
            strided = torch.cat([rows, rows], 1)[:, : rows.shape[1]]
            batch.check_sums(me.rank, xd.ll_combine(slots.plan, strided, weights))
            tokens = torch.cat([x, x], 1)[:, :32]
            batch.check(me.rank, xd.ll_dispatch(group, tokens, ids.t().contiguous().t()))
        assert wait[me.rank] == 0
        settle(group)


def given_rows() -> list[tuple[torch.dtype, int, torch.dtype | None, int]]:
    """Rows that a caller has quantised, in rows of 512 bytes: their dtype and columns, and scales.

    The widths of scales are in bytes.
    """
    fp4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
    return [
        (torch.float8_e4m3fn, 256, torch.float32, 8),
        (fp4, 128, torch.float8_e4m3fn, 16),
        (fp4, 128, torch.uint8, 8),
        (torch.uint8, 512, None, 0),
    ]


@on_ranks(2)
def test_rows_that_are_quantised_already_arrive_bit_for_bit(me: Rank) -> None:
    with xd.init(), torch.no_grad():
        for receive in ("slots", "by_expert", "by_rank"):
            group = make_group(hidden=256, dtype=torch.bfloat16, receive=receive)
            _rows_arrive_bit_for_bit(me, group)
            _peers_hear_of_bad_scales(me, group)
            settle(group)


def _rows_arrive_bit_for_bit(me: Rank, group: xd.LowLatencyGroup) -> None:
    ids = choices(SEED, (4, 3), EXPERTS, TOPK)
    routing: Any
    if group.receive == "slots":
        routing = SlotRouting(ids, EXPERTS, MOST)
    else:
        layout = "rank_major" if group.receive == "by_rank" else "expert_major"
        routing = Routing(ids, EXPERTS, layout)

    def bits(seed: int, columns: int) -> list[np.ndarray]:
        rows = [
            np.random.default_rng(seed + r).integers(0, 256, (t, columns), np.uint8)
            for r, t in enumerate((4, 3))
        ]
        rows[1][2] = 0xFF
        return rows

    def in_rows(received: torch.Tensor) -> np.ndarray:
        array = received.view(torch.uint8).cpu().numpy()
        if isinstance(routing, SlotRouting):
            return routing.in_rows(me.rank, array)
        return array[: routing.total(me.rank)]

    own = torch.from_numpy(ids[me.rank]).to(where())
    for number, (dtype, columns, scale_dtype, width) in enumerate(given_rows()):
        rows, given = bits(SEED + number, columns), bits(SEED - number, max(width, 1))
        tokens = torch.from_numpy(rows[me.rank]).to(where()).view(dtype)
        scales = None
        if scale_dtype is not None:
            scales = torch.from_numpy(given[me.rank]).to(where()).view(scale_dtype)
            scales = scales.t().contiguous().t()
        if number % 2:
            got = xd.ll_dispatch(group, tokens, own, scales=scales)
        else:
            got = xd.ll_dispatch_send(group, tokens, own, scales=scales).receive()
        assert got.tokens.dtype == dtype
        equal(in_rows(got.tokens), routing.dispatch(me.rank, rows))
        if scales is None:
            assert got.scales is None
        else:
            assert got.scales.dtype == scale_dtype
            equal(in_rows(got.scales), routing.dispatch(me.rank, given))


def _peers_hear_of_bad_scales(me: Rank, group: xd.LowLatencyGroup) -> None:
    own = torch.from_numpy(choices(SEED, (4, 3), EXPERTS, TOPK)[me.rank]).to(where())
    tokens = torch.zeros(len(own), 256, dtype=torch.uint8, device=where())
    scales = torch.zeros(len(own), 4, device=where())
    other = group.slots(256, torch.uint8, scales=(3, torch.float32), weighted=False)
    mistakes = (
        (TypeError, "scales", {"scales": scales.double()}),
        (ValueError, "scales", {"scales": scales[:, 0]}),
        (InvalidArgument, "columns of scales", {"out": other}),
    )
    good = {"group": group, "tokens": tokens, "topk_idx": own, "scales": scales}
    for number, mistake in enumerate(mistakes):
        one_rank_errs(me, number % 2, group, xd.ll_dispatch, good, mistake)


@on_ranks(2)
def test_halves_of_two_batches_interleave(me: Rank) -> None:
    with xd.init(), torch.no_grad():
        group = make_group(dtype=torch.float32)
        for number in range(3):
            batches = [Batch(SEED + 2 * number + i, me.num_ranks) for i in range(2)]
            sent = []
            for batch in batches:
                inputs = batch.local(me.rank)
                sent.append(xd.ll_dispatch_send(group, *inputs))
                for part in inputs:  # they are the caller's again
                    part.fill_(-1)
            slots = [one.receive(sources=True) for one in sent]
            for batch, found in zip(batches, slots):
                batch.check(me.rank, found)
            sums = [xd.ll_combine_send(found.plan, experts(found)) for found in slots]
            for batch, one in zip(batches, sums):
                batch.check_sums(me.rank, one.receive())
        with pytest.raises(ValueError, match="receive: expected one call, got a second one"):
            one.receive()
        settle(group)


@on_ranks(2)
def test_overwritten_slots_are_told_to_graphs_that_saved_them(me: Rank) -> None:
    batch = Batch(SEED, me.num_ranks)
    x, ids, weights = batch.local(me.rank, torch.float32)
    with xd.init():
        group = make_group(dtype=torch.float32)
        slots, scale = group.slots(), torch.ones(1, device=x.device, requires_grad=True)

        def halves(**out: Any) -> None:
            xd.ll_dispatch_send(group, x, ids, weights).receive(**out)

        def whole(**out: Any) -> None:
            xd.ll_dispatch(group, x, ids, weights, **out)

        for call in (whole, halves):
            call(out=slots)
            product = (slots.tokens * scale).sum()
            call()  # into other slots
            product.backward()
            product = (slots.tokens * scale).sum()
            call(out=slots)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        out = xd.ll_combine(slots.plan, slots.tokens)
        product = (out * scale).sum()
        assert xd.ll_combine(slots.plan, slots.tokens, out=out) is out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@on_ranks(2)
def test_second_halves_out_of_order_are_refused(me: Rank) -> None:
    with xd.init() as comm, torch.no_grad():
        group = make_group(dtype=torch.float32, on_peer_loss="mask")
        batches = [Batch(SEED + i, me.num_ranks) for i in range(2)]
        sent = [xd.ll_dispatch_send(group, *batch.local(me.rank)) for batch in batches]
        for _ in range(2):  # it may be called again
            with pytest.raises(ValueError, match="receive: .* in the order .* while 1 older"):
                sent[1].receive()
        slots = [one.receive() for one in sent]
        for batch, found in zip(batches, slots):
            batch.check(me.rank, found)
        sums = [xd.ll_combine_send(found.plan, experts(found)) for found in slots]
        with pytest.raises(ValueError, match="receive: .* in the order .* while 1 older"):
            sums[1].receive()
        for batch, one in zip(batches, sums):
            batch.check_sums(me.rank, one.receive())
        before = xd.ll_dispatch_send(group, *batches[0].local(me.rank))
        settle(group)
        comm.barrier()
        group.reset()
        with pytest.raises(ValueError, match="receive: .* that reset has dropped"):
            before.receive()
        _still_usable(group, me)


@on_ranks(2)
def test_quantised_rows_and_scales_equal_the_reference(me: Rank) -> None:
    import ml_dtypes

    with xd.init(), torch.no_grad():
        group = make_group(512)
        batch = Batch(SEED, me.num_ranks, 512)
        x, ids, _ = batch.local(me.rank, torch.bfloat16)
        rows = [one.astype(ml_dtypes.bfloat16) for one in batch.x]
        routing = batch.routing

        def check(slots: xd.Slots, way: str) -> None:
            elements, scales = zip(*(quantised(one, way) for one in rows))
            bits = [one.view(np.uint8) for one in elements]
            got = slots.tokens.view(torch.uint8).cpu().numpy()
            equal(routing.in_rows(me.rank, got), routing.dispatch(me.rank, bits))
            got = slots.scales
            if got.dtype == torch.int32:
                scales = [one.view(np.uint8).view(np.int32) for one in scales]
            elif got.dtype != torch.float32:
                scales, got = [one.view(np.uint8) for one in scales], got.view(torch.uint8)
            got = routing.in_rows(me.rank, got.cpu().numpy())
            equal(got, routing.dispatch(me.rank, list(scales)))

        check(xd.ll_dispatch(group, x, ids, quantise=True), "fp8_block128")
        for way in ("fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0"):
            packs = (False, True) if way.endswith("e8m0") else (False,)
            for packed in packs:
                check(xd.ll_dispatch(group, x, ids, quantise=way, packed_scales=packed), way)
                form = {"packed_scales": packed, "column_major_scales": True}
                out = group.slots(quantise=way, **form)
                assert out.scales.stride()[1:] == (1, group.num_slots)
                check(xd.ll_dispatch(group, x, ids, quantise=way, out=out), way)
                sent = xd.ll_dispatch_send(group, x, ids, quantise=way)
                check(sent.receive(packed_scales=packed), way)
        settle(group)


@on_ranks(2, timeout=300)
def test_compiled_operations_run_in_their_order(me: Rank) -> None:
    """Two batches in halves inside one compiled function, and one into tensors that are given."""
    torch._dynamo.reset()
    with xd.init() as comm, torch.no_grad():
        group = make_group(dtype=torch.float32)
        out = group.slots()

        @torch.compile(fullgraph=True, backend="inductor")
        def block(first, second):
            sent = [xd.ll_dispatch_send(group, x * 2, *others) for x, *others in (first, second)]
            slots = [one.receive() for one in sent]
            sums = [xd.ll_combine_send(found.plan, experts(found)) for found in slots]
            x, ids, weights = first
            again = xd.ll_dispatch(group, x * 2, ids, out=out)
            return [one.receive() for one in sums], xd.ll_combine(
                again.plan, experts(again), weights
            )

        for number in range(3):
            batches = [Batch(SEED + 2 * number + i, me.num_ranks) for i in range(2)]
            (one, other), again = block(*(batch.local(me.rank) for batch in batches))
            batches[0].check_sums(me.rank, one / 2)
            batches[1].check_sums(me.rank, other / 2)
            batches[0].check_sums(me.rank, again / 2)
            assert out.counts.tolist() == batches[0].routing.counts(me.rank)
        settle(group)
        comm.barrier()


@pytest.mark.parametrize("receive", ["by_expert", "by_rank"])
@on_ranks(4)
def test_rows_without_gaps_equal_the_reference(me: Rank, receive: str) -> None:
    """By whole calls and by halves, and while the most tokens of a call change."""
    layout = {"by_expert": "expert_major", "by_rank": "rank_major"}[receive]
    alignment = 4 if receive == "by_expert" else 1
    rank, ranks = me.rank, range(me.num_ranks)
    with xd.init(), torch.no_grad():
        group = make_group(dtype=torch.float32, receive=receive, alignment=alignment)
        for number, most in enumerate((0, 6, MOST)):
            batch = Batch(SEED + number, len(ranks))
            routing = Routing(batch.ids, EXPERTS, layout, alignment)
            x, ids, weights = batch.local(rank)
            if number == 1:
                got = xd.ll_dispatch_send(group, x, ids, weights, max_tokens=most).receive()
            else:
                got = xd.ll_dispatch(group, x, ids, weights, max_tokens=most)
            rows = routing.total(rank)
            assert got.tokens.shape == (*group.rows(most), 32)
            equal(array(got.tokens[:rows]), routing.dispatch(rank, batch.x))
            equal(array(got.weights[:rows]), routing.dispatch_weights(rank, batch.weights))
            assert got.counts.tolist() == routing.counts(rank)
            assert int(got.row_offsets[-1]) == rows
            if receive == "by_rank":
                equal(array(got.topk_idx[:rows]), routing.recv_topk_idx(rank))
                assert (got.topk_idx[rows:] == -1).all()
            outs = [routing.dispatch(one, batch.x) * np.float32(one + 2) for one in ranks]
            out = xd.ll_combine(got.plan, got.tokens[:rows] * (rank + 2))
            equal(array(out), routing.combine(rank, outs))
        settle(group)


@on_ranks(2)
def test_peers_hear_of_too_many_tokens_of_a_call(me: Rank) -> None:
    x, ids, _ = Batch(SEED, 2).local(me.rank)
    with xd.init(), torch.no_grad():
        group = make_group(dtype=torch.float32, receive="by_rank")
        good = {"group": group, "tokens": x, "topk_idx": ids}
        for kind, most in ((ValueError, MOST + 1), (ValueError, -1), (TypeError, 1.5)):
            for call in (xd.ll_dispatch, xd.ll_dispatch_send):
                made = xd.ll_dispatch if me.rank != 0 else call
                mistake = (kind, "max_tokens", {"max_tokens": most})
                one_rank_errs(me, 0, group, made, good, mistake)


def test_operators_pass_torchs_checks():
    batch = Batch(SEED, 1)
    x, ids, weights = batch.local(0)
    with xd.init():
        group = make_group(dtype=torch.float32)
        slots = group.slots(sources=True)
        both, code = 0, 0
        load = torch.zeros(EXPERTS, dtype=torch.int32, device=where())
        outputs = (slots.plan.data, slots.tokens, None, slots.counts, *slots[4:6], load, None)
        outputs += slots[6:]
        beside = (group.order, group.handle, both)
        # Values are not compared: no two plans are equal.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        dispatch = (x, ids, weights, None, *outputs, *beside, code, 0)
        torch.library.opcheck(OPS.ll_dispatch.default, dispatch, test_utils=checks)
        settle(group)
        OPS.ll_dispatch.default(*dispatch)
        out = torch.empty_like(x)
        combine = (slots.plan.data, experts(slots), None, out, None, *beside)
        torch.library.opcheck(OPS.ll_combine.default, combine)
        OPS.ll_combine.default(*combine)
        batch.check_sums(0, out)
        settle(group)


def _still_usable(group: xd.LowLatencyGroup, me: Rank) -> None:
    batch = Batch(SEED + 9, me.num_ranks)
    with torch.no_grad():
        slots = xd.ll_dispatch(group, *batch.local(me.rank))
        batch.check(me.rank, slots)
        batch.check_sums(me.rank, xd.ll_combine(slots.plan, experts(slots)))


@on_ranks(2)
def test_peers_hear_of_mistakes_and_the_group_goes_on(me: Rank) -> None:
    batch = Batch(SEED, me.num_ranks)
    with xd.init():
        group, other = make_group(dtype=torch.float32), make_group(dtype=torch.float32)
        x, ids, weights = batch.local(me.rank)
        slots = xd.ll_dispatch(group, x, ids)
        rows = experts(slots)
        wants_grad = x.clone().requires_grad_()

        send, dispatch, combine = xd.ll_dispatch_send, xd.ll_dispatch, xd.ll_combine
        arguments = {
            dispatch: {"group": group, "tokens": x, "topk_idx": ids},
            combine: {"plan": slots.plan, "expert_out": rows},
        }
        arguments[send] = arguments[dispatch]
        floats = "tokens: expected a dtype of torch.bfloat16, torch.float16, torch.float32, torch"
        mistakes = [
            (dispatch, TypeError, "tokens: expected a tensor", {"tokens": None}),
            (dispatch, ValueError, "no gradient", {"tokens": wants_grad}),
            (send, ValueError, "no gradient", {"tokens": wants_grad}),
            (dispatch, TypeError, "out: expected Slots", {"out": slots.tokens}),
            (dispatch, ValueError, "out.plan", {"out": other.slots()}),
            (dispatch, TypeError, floats, {"tokens": x.double()}),
            (dispatch, ValueError, "quantise", {"quantise": "fp4"}),
            (dispatch, InvalidArgument, "tokens: is", {"quantise": True}),
            (combine, ValueError, "no gradient", {"expert_out": rows.clone().requires_grad_()}),
            (combine, InvalidArgument, "topk_weights", {"topk_weights": weights[:, 1:]}),
        ]
        # Without a group there are no peers to tell.
        with pytest.raises(TypeError, match="group: expected a LowLatencyGroup, got NoneType"):
            xd.ll_dispatch(None, x, ids)
        with pytest.raises(TypeError, match="plan: expected a SlotPlan, got Slots"):
            xd.ll_combine(slots, rows)
        with pytest.raises(TypeError, match="plan: expected a Plan, got SlotPlan"):
            xd.combine(slots.plan, rows)
        with pytest.raises(TypeError, match="rank: expected a whole number, got 'a'"):
            group.mask_set("a")
        for number, (call, kind, text, wrong) in enumerate(mistakes):
            bad = number % 2
            made = dispatch if call is send and me.rank != bad else call
            one_rank_errs(me, bad, group, made, arguments[call], (kind, text, wrong))
            _still_usable(group, me)


@on_ranks(2)
def test_results_beside_bad_ids_are_complete(me: Rank) -> None:
    batch = Batch(SEED, me.num_ranks)
    x, ids, weights = batch.local(me.rank)
    bad = ids.clone()
    if me.rank == 0:
        bad[0] = EXPERTS + 5
    seen = [one.copy() for one in batch.ids]
    seen[0][0] = -1
    batch.routing = SlotRouting(seen, EXPERTS, MOST)
    with xd.init(), torch.no_grad():
        group = make_group(dtype=torch.float32)
        for halves in (False, True):
            out = group.slots()
            with reported(group, InvalidArgument, "with some is 0"):
                if halves:
                    xd.ll_dispatch_send(group, x, bad, weights).receive(out=out)
                else:
                    xd.ll_dispatch(group, x, bad, weights, out=out)
            batch.check(me.rank, out)
            batch.check_sums(me.rank, xd.ll_combine(out.plan, experts(out)))
        settle(group)


@on_ranks(2)
def test_group_goes_on_without_a_late_rank_which_comes_back(me: Rank) -> None:
    batch = Batch(SEED, me.num_ranks)
    with xd.init() as comm, torch.no_grad():
        group = make_group(dtype=torch.float32, on_peer_loss="mask", wait_timeout_ms=2000)
        local = batch.local(me.rank)
        _still_usable(group, me)
        comm.barrier()
        assert group.faults.tolist() == [0]
        if me.rank == 0:
            before = group.faults.clone()
            with reported(group, PeerLost, "rank 1"):
                xd.ll_dispatch(group, *local)
            assert (group.faults > before).item()
            before = group.faults.clone()
            assert group.mask().tolist() == [0, 1]
            slots = xd.ll_dispatch(group, *local)  # goes on without it
            xd.ll_combine(slots.plan, experts(slots))
            settle(group)
            assert (group.faults == before).item()
        comm.barrier()
        group.mask_set(1 - me.rank, False)
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        comm.barrier()
        group.reset()
        assert group.mask().tolist() == [0, 0]
        _still_usable(group, me)
        assert group.status()["masked"] == ()


@on_ranks(1)
def test_handles_tell_torchs_persistent_caches_of_the_shapes(me: Rank) -> None:
    with xd.init():
        groups = [make_group(dtype=torch.float32), make_group(dtype=torch.float32)]
        groups.append(make_group(dtype=torch.float32, expert_ranks=(0,) * EXPERTS, hidden=48))
        shapes = [group.handle >> 32 for group in groups]
        assert shapes[0] == shapes[1] != shapes[2]
        assert groups[0].handle != groups[1].handle
