"""Dispatch into slots, and combine, on NumPy arrays: every element, halves, mistakes, masks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

from core_support import Case, dtype_of, equal, peers_are_told
from crossdock import Comm, LowLatencyGroup, Slots
from crossdock.errors import Busy, InvalidArgument, Mismatch, PeerLost
from reference import Routing, quantised
from slots import SlotRouting, factors
from support import Rank, on_ranks, run_threads

SEED = 31
LATE_MS = 1000  # of a rank that is masked for it


class Batch:
    """Inputs of all ranks, and their routing."""

    def __init__(self, case: Case, seed: int = SEED) -> None:
        self.ids = case.ids(seed)
        self.routing = SlotRouting(self.ids, case.experts, max(1, *case.tokens), case.expert_ranks)
        self.rows = case.whole(seed, case.hidden)
        self.weights = case.whole(seed + 1, case.topk, np.float32)

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, choices and weights of one rank."""
        return self.rows[rank], self.ids[rank], self.weights[rank]

    def check(self, rank: int, slots: Slots) -> None:
        """Every element that dispatch promises."""
        routing = self.routing
        assert slots.counts.tolist() == routing.counts(rank)
        equal(routing.in_rows(rank, slots.tokens), routing.dispatch(rank, self.rows))
        if slots.source_ranges is not None:
            equal(slots.source_ranges, routing.source_ranges(rank))
            got = routing.in_rows(rank, slots.source_tokens)
            equal(got, routing.source_tokens(rank))
        assert slots.plan.num_tokens == len(self.ids[rank])
        assert slots.plan.topk == self.ids[rank].shape[1]

    def sums(self, rank: int, weighted: bool = True) -> np.ndarray:
        return self.routing.sums(rank, self.rows, self.weights if weighted else None)


def results(slots: Slots) -> np.ndarray:
    """The experts' results of the rows; other slots may hold anything."""
    tokens = slots.tokens
    return (tokens * factors(len(tokens)).astype(tokens.dtype)).astype(tokens.dtype)


def poisoned(group: LowLatencyGroup, **options) -> Slots:
    slots = group.slots(**options)
    for part in (slots.tokens, slots.counts, slots.source_ranges, slots.source_tokens):
        if part is not None:
            part.view(np.uint8).fill(0x7F)
    return slots


CASES = [
    Case((3, 0, 5, 2), 8, 3, 20),
    Case((6,), 3, 2, 24, dtype="float16"),
    Case((4, 7), 6, 4, 8, dtype="bfloat16", index="int32"),
    Case((0, 0), 4, 1, 16),
    # A rank without experts, and experts out of order.
    Case((5, 4, 3), 5, 3, 8, expert_ranks=(2, 0, 2, 0, 2)),
]


@on_ranks(lambda case: len(case.tokens))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tokens}-{case.dtype}")
def test_every_element_equals_the_reference(me: Rank, case: Case) -> None:
    with me.comm() as comm, LowLatencyGroup(comm, case.low_latency_config()) as group:
        load = np.zeros(len(Batch(case).routing.experts(me.rank)), np.int64)
        wait = np.zeros(me.num_ranks, np.int64)
        total = np.zeros_like(load)
        for number in range(4):
            batch = Batch(case, SEED + number)
            *inputs, weights = batch.of(me.rank)
            out = poisoned(group, sources=True)
            slots = group.dispatch(*inputs, weights, out=out, expert_load=load, wait_ns=wait)
            assert slots is out
            batch.check(me.rank, slots)
            behind = batch.routing.behind_rows(me.rank, slots.tokens)
            assert (behind.view(np.uint8) == 0x7F).all()
            total += slots.counts
            equal(load, total)
            # Weights of dispatch, of combine, and of neither; a plan serves several.
            equal(group.combine(slots.plan, results(slots), wait_ns=wait), batch.sums(me.rank))
            plain = group.dispatch(*inputs)
            batch.check(me.rank, plain)
            assert plain.scales is plain.source_ranges is plain.source_tokens is None
            expert_out = results(plain)
            equal(group.combine(plain.plan, expert_out), batch.sums(me.rank, weighted=False))
            given = np.full((len(inputs[0]), case.hidden), 7, dtype_of(case.dtype))
            got = group.combine(plain.plan, expert_out, weights, out=given)
            assert got is given
            equal(got, batch.sums(me.rank))
        assert wait[me.rank] == 0
        assert (wait >= 0).all()
        assert group.status().status == "XD_SUCCESS"
        assert group.errors() == 0


@on_ranks(2)
def test_quantised_rows_and_scales_equal_the_reference(me: Rank) -> None:
    case = Case((5, 3), 4, 2, 512, dtype="bfloat16")
    batch = Batch(case)
    batch.rows = [(rows * 0.37).astype(ml_dtypes.bfloat16) for rows in batch.rows]
    routing, rank = batch.routing, me.rank
    inputs = batch.rows[rank], batch.ids[rank]
    with me.comm() as comm, LowLatencyGroup(comm, case.low_latency_config()) as group:
        for way in ("fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0"):
            elements, scales = zip(*(quantised(rows, way) for rows in batch.rows))
            got = group.dispatch(*inputs, quantise=way)
            bits = [one.view(np.uint8) for one in elements]
            equal(routing.in_rows(rank, got.tokens.view(np.uint8)), routing.dispatch(rank, bits))
            equal(routing.in_rows(rank, got.scales), routing.dispatch(rank, list(scales)))
        # Four bytes in an int32; column by column, as other libraries want scales.
        slots = group.slots(quantise="fp8_block128_e8m0", packed_scales=True)
        local, count, width = slots.scales.shape
        strided = np.zeros((local, width, count), np.int32).transpose(0, 2, 1)
        out = dataclasses.replace(slots, scales=strided)
        group.dispatch(*inputs, quantise="fp8_block128_e8m0", out=out)
        words = [one.view(np.uint8).view(np.int32) for one in scales]
        equal(routing.in_rows(rank, strided), routing.dispatch(rank, words))


@on_ranks(4)
@pytest.mark.parametrize(
    ("receive", "alignment"), [("by_expert", 1), ("by_expert", 4), ("by_rank", 1)]
)
def test_rows_without_gaps_equal_the_reference(me: Rank, receive: str, alignment: int) -> None:
    case, rank = Case((3, 0, 5, 2), 8, 3, 20), me.rank
    layout = {"by_expert": "expert_major", "by_rank": "rank_major"}[receive]
    config = case.low_latency_config(receive=receive, alignment=alignment)
    with me.comm() as comm, LowLatencyGroup(comm, config) as group:
        for number, most in enumerate((0, 5)):
            batch = Batch(case, SEED + number)
            routing = Routing(batch.ids, case.experts, layout, alignment)
            inputs = batch.of(rank)
            if number == 0:
                got = group.dispatch(*inputs)
            else:
                got = group.dispatch_send(*inputs, max_tokens=most).receive()
            rows = routing.total(rank)
            assert len(got.tokens) == config.recv_bound(4, most)
            equal(got.tokens[:rows], routing.dispatch(rank, batch.rows))
            equal(got.weights[:rows], routing.dispatch_weights(rank, batch.weights))
            assert got.counts.tolist() == routing.counts(rank)
            if receive == "by_rank":
                equal(got.topk_idx[:rows], routing.recv_topk_idx(rank))
                assert (got.topk_idx[rows:] == -1).all()
                assert (got.weights[rows:] == 0).all()
                ends = np.cumsum(routing.rank_rows()[:, rank])
                assert got.row_offsets.tolist() == [0, *ends.tolist()]
            else:
                assert got.row_offsets.tolist() == routing.offsets(rank)
            outs = [routing.dispatch(one, batch.rows) * np.float32(one + 2) for one in range(4)]
            expert_out = got.tokens[:rows] * np.float32(rank + 2)
            equal(group.combine(got.plan, expert_out), routing.combine(rank, outs))
            if receive == "by_expert":
                weights = [routing.dispatch_weights(one, batch.weights) for one in range(4)]
                sums = group.combine(got.plan, expert_out, inputs[2])
                equal(sums, routing.combine(rank, outs, weights))
            # Rows alone, into arrays that are given.
            out = group.slots(weighted=False)
            assert group.dispatch(*inputs[:2], out=out) is out
            equal(out.tokens[:rows], routing.dispatch(rank, batch.rows))
            assert out.weights is None


# Rows that a caller has quantised, in a group of rows of 512 bytes: their dtype and columns, and
# those of their scales.
GIVEN = [
    ("float8_e4m3fn", 256, "float32", 2),
    ("float8_e5m2", 256, "float8_e8m0fnu", 8),
    ("uint8", 128, "float8_e4m3fn", 16),  # FP4, a scale for 16 numbers
    ("uint8", 128, "uint8", 8),  # FP4, a scale for 32 numbers
    ("int8", 512, None, 0),
]


@on_ranks(2)
def test_rows_that_are_quantised_already_arrive_bit_for_bit(me: Rank) -> None:
    with me.comm() as comm:
        for receive in ("slots", "by_expert", "by_rank"):
            rows_arrive_bit_for_bit(me, comm, receive)


def rows_arrive_bit_for_bit(me: Rank, comm: Comm, receive: str) -> None:
    case, rank = Case((4, 3), 4, 2, 256, dtype="bfloat16"), me.rank
    ids = case.ids(SEED)
    layout = "rank_major" if receive == "by_rank" else "expert_major"
    routing = (
        SlotRouting(ids, case.experts, max(case.tokens))
        if receive == "slots"
        else Routing(ids, case.experts, layout)
    )

    def bits(seed: int, columns: int) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        rows = [random.integers(0, 256, (t, columns), np.uint8) for t in case.tokens]
        rows[0][1] = 0xFF  # NaN, if they are numbers
        return rows

    def in_rows(received: np.ndarray) -> np.ndarray:
        if isinstance(routing, SlotRouting):
            return routing.in_rows(rank, received.view(np.uint8))
        return received.view(np.uint8)[: routing.total(rank)]

    with LowLatencyGroup(comm, case.low_latency_config(receive=receive)) as group:
        for number, (kind, columns, scale_kind, width) in enumerate(GIVEN):
            rows = bits(SEED + number, columns)
            tokens = rows[rank].view(dtype_of(kind))
            given = scales = None
            if scale_kind is not None:
                scale_type = dtype_of(scale_kind)
                given = bits(SEED - number, width * scale_type.itemsize)
                packed = given[rank].view(scale_type)
                scales = np.asfortranarray(packed) if number % 2 else packed
            if number % 2:
                got = group.dispatch(tokens, ids[rank], scales=scales)
            else:
                got = group.dispatch_send(tokens, ids[rank], scales=scales).receive()
            assert got.tokens.dtype == tokens.dtype
            equal(in_rows(got.tokens), routing.dispatch(rank, rows))
            if given is None:
                assert got.scales is None
            else:
                assert got.scales.dtype == scale_type
                equal(in_rows(got.scales), routing.dispatch(rank, given))


@on_ranks(2)
def test_peers_hear_of_mistakes_about_scales(me: Rank) -> None:
    case = Case((3, 2), 4, 2, 128, dtype="bfloat16")
    rows, ids = case.whole(SEED, 128)[me.rank], case.ids(SEED)[me.rank]
    bits = np.zeros((len(rows), 128), np.uint8)
    scales = np.zeros((len(rows), 4), np.float32)
    with me.comm() as comm, LowLatencyGroup(comm, case.low_latency_config()) as group:
        right = functools.partial(group.dispatch, bits, ids, scales=scales)
        right()
        for wrong in [
            (
                InvalidArgument,
                "rows of tokens",
                lambda: group.dispatch(bits, ids, scales=scales[1:]),
            ),
            (TypeError, "scales", lambda: group.dispatch(bits, ids, scales=scales.astype("f8"))),
            (
                InvalidArgument,
                "quantise",
                lambda: group.dispatch(rows, ids, scales=scales, quantise=True),
            ),
            (InvalidArgument, "recv_scales", lambda: right(out=group.slots(dtype="uint8"))),
        ]:
            peers_are_told(me, *wrong, right)
        slots = group.slots(128, "uint8", scales=(4, "float32"))
        assert right(out=slots) is slots


CASE = Case((3, 2), 4, 2, 8)


@on_ranks(2)
def test_peers_hear_of_mistakes_about_rows_without_gaps(me: Rank) -> None:
    batch = Batch(CASE)
    rows, ids, weights = batch.of(me.rank)
    with (
        me.comm() as comm,
        LowLatencyGroup(comm, CASE.low_latency_config(receive="by_rank")) as group,
    ):
        got = group.dispatch(rows, ids)
        expert_out = got.tokens[: got.row_offsets[-1]].copy()
        dispatch = functools.partial(group.dispatch, rows, ids)
        combine = functools.partial(group.combine, got.plan, expert_out)
        of_dispatch = [
            (InvalidArgument, "max_tokens = 4", lambda: dispatch(max_tokens=4)),
            (TypeError, "max_tokens: expected", lambda: dispatch(max_tokens=1.5)),
            (InvalidArgument, "recv_weights", lambda: dispatch(out=group.slots())),
            (InvalidArgument, "source_ranges", lambda: dispatch(sources=True)),
        ]
        of_combine = [
            (InvalidArgument, "topk_weights", lambda: combine(weights)),
            (InvalidArgument, "rows", lambda: group.combine(got.plan, expert_out[:-1])),
        ]
        for right, wrongs in ((dispatch, of_dispatch), (combine, of_combine)):
            for number, wrong in enumerate(wrongs):
                peers_are_told(me, *wrong, right, guilty=number % 2)


def still_usable(group: LowLatencyGroup, me: Rank) -> None:
    batch = Batch(CASE, SEED + 9)
    slots = group.dispatch(*batch.of(me.rank))
    batch.check(me.rank, slots)
    equal(group.combine(slots.plan, results(slots)), batch.sums(me.rank))


@on_ranks(2)
def test_peers_hear_of_mistakes_and_the_group_goes_on(me: Rank) -> None:
    batch = Batch(CASE)
    rows, ids, _ = batch.of(me.rank)
    with me.comm() as comm, LowLatencyGroup(comm, CASE.low_latency_config()) as group:
        slots = group.dispatch(rows, ids)
        good = results(slots)
        dispatch = functools.partial(group.dispatch, rows, ids)
        combine = functools.partial(group.combine, slots.plan, good)
        of_dispatch = [
            (TypeError, "tokens: expected a NumPy array", lambda: group.dispatch([1], ids)),
            (TypeError, "topk_idx: expected a dtype", lambda: group.dispatch(rows, rows)),
            (TypeError, "out: expected a Slots", lambda: dispatch(out=rows)),
            (ValueError, "quantise: expected", lambda: dispatch(quantise="fp4")),
            (InvalidArgument, "quantise = 4", lambda: dispatch(quantise="mxfp8")),
            (InvalidArgument, "rows", lambda: group.dispatch(rows[:1], ids)),
            (TypeError, "topk_weights", lambda: group.dispatch_send(rows, ids, ids)),
        ]
        of_combine = [
            (TypeError, "plan: expected a SlotPlan", lambda: group.combine(slots, good)),
            (InvalidArgument, "slots", lambda: group.combine(slots.plan, good[:, 1:])),
            (InvalidArgument, "expert_out", lambda: group.combine_send(slots.plan, good[..., :3])),
        ]
        for right, wrongs in ((dispatch, of_dispatch), (combine, of_combine)):
            for number, wrong in enumerate(wrongs):
                peers_are_told(me, *wrong, right, guilty=number % 2)
                still_usable(group, me)


@on_ranks(2)
def test_a_damaged_plan_harms_nobody(me: Rank) -> None:
    """Rank 0 combines by a plan one of whose words is another one."""
    batch = Batch(CASE, SEED + 4)
    with me.comm() as comm, LowLatencyGroup(comm, CASE.low_latency_config()) as group:
        slots = group.dispatch(*batch.of(me.rank))
        given = results(slots)
        good = slots.plan.data.copy()
        words = slots.plan.data.view(np.int32)
        # Plans of all ranks are equally large.
        for place in range(len(words)):
            for value in (-1, -(2**31), 2**31 - 1, 1 << 16):
                if me.rank == 0:
                    words[place] = value
                with contextlib.suppress(InvalidArgument, Mismatch):
                    assert group.combine(slots.plan, given).shape == batch.rows[me.rank].shape
                slots.plan.data[...] = good
        equal(group.combine(slots.plan, given), batch.sums(me.rank))


@on_ranks(2)
def test_second_halves_and_their_mistakes(me: Rank) -> None:
    batch = Batch(CASE)
    rows, ids, _ = batch.of(me.rank)
    with me.comm() as comm, LowLatencyGroup(comm, CASE.low_latency_config()) as group:
        sent = [group.dispatch_send(rows, ids) for _ in range(2)]
        with pytest.raises(Busy):
            group.dispatch_send(rows, ids)
        # A mistake in Python leaves the half to be called again.
        text = rf"receive: wait_ns: expected a dtype of int64.* \[rank {me.rank} of 2\]$"
        with pytest.raises(TypeError, match=text):
            sent[0].receive(wait_ns=np.zeros(2, np.int32))
        batch.check(me.rank, sent[0].receive())
        with pytest.raises(ValueError, match="receive: expected one call, got a second one"):
            sent[0].receive()
        if me.rank == 0:  # one that the library finds ends it, and the peers do not hear of it
            with pytest.raises(InvalidArgument, match="wait_ns"):
                sent[1].receive(wait_ns=np.zeros(3, np.int64))
        else:
            batch.check(me.rank, sent[1].receive())
        still_usable(group, me)


@on_ranks(2)
def test_halves_of_two_batches_interleave_in_one_order_only(me: Rank) -> None:
    """Inputs may be overwritten between the halves, and one rank calls both halves at once."""
    batches = [Batch(CASE, SEED + i) for i in range(2)]
    with me.comm() as comm, LowLatencyGroup(comm, CASE.low_latency_config()) as group:
        if me.rank == 1:
            slots = [group.dispatch(*one.of(1)[:2]) for one in batches]
        else:
            sent = []
            for one in batches:
                given = [part.copy() for part in one.of(0)[:2]]
                sent.append(group.dispatch_send(*given))
                for part, poison in zip(given, (77, -1)):
                    part.fill(poison)
            for _ in range(2):  # it may be called again
                with pytest.raises(ValueError, match="receive: .* in the order .* while 1 older"):
                    sent[1].receive()
            slots = [one.receive(sources=True) for one in sent]
        for batch, found in zip(batches, slots):
            batch.check(me.rank, found)
        expert_out = [results(found) for found in slots]
        sums = [group.combine_send(found.plan, rows) for found, rows in zip(slots, expert_out)]
        for rows in expert_out:
            rows.fill(77)
        with pytest.raises(ValueError, match="receive: .* in the order .* while 1 older"):
            sums[1].receive()
        for batch, one in zip(batches, sums):
            equal(one.receive(), batch.sums(me.rank, weighted=False))
        still_usable(group, me)


@on_ranks(2)
def test_a_second_half_that_reset_has_dropped_is_refused(me: Rank) -> None:
    batch = Batch(CASE)
    inputs = batch.of(me.rank)[:2]
    with (
        me.comm() as comm,
        LowLatencyGroup(comm, CASE.low_latency_config(on_peer_loss="mask")) as group,
    ):
        before = group.dispatch_send(*inputs)
        comm.barrier()
        group.reset()
        sent = group.dispatch_send(*inputs)
        with pytest.raises(ValueError, match="receive: .* that reset has dropped"):
            before.receive()
        batch.check(me.rank, sent.receive())


@on_ranks(2)
def test_bad_ids_are_told_everywhere_and_results_are_complete(me: Rank) -> None:
    batch = Batch(CASE)
    inputs = [part.copy() for part in batch.of(me.rank)]
    if me.rank == 1:
        inputs[1][0] = 99, -7
    batch.ids[1][0] = -1
    batch.routing = SlotRouting(batch.ids, CASE.experts, max(CASE.tokens))
    with me.comm() as comm, LowLatencyGroup(comm, CASE.low_latency_config()) as group:
        out = group.slots()
        with pytest.raises(InvalidArgument) as raised:
            group.dispatch(*inputs, out=out)
        assert (raised.value.peer, raised.value.operation) == (1, "ll_dispatch")
        assert group.status().bad_ids == 2
        batch.check(me.rank, out)
        still_usable(group, me)


@on_ranks(3, run=run_threads)
def test_a_late_rank_is_masked_by_name_and_comes_back(me: Rank) -> None:
    """Rank 1 is late for a reset and for a dispatch, and the others do not wait for it again."""
    case = Case((2, 3, 1), 6, 3, 8)
    config = case.low_latency_config(on_peer_loss="mask", wait_timeout_ms=LATE_MS)
    batch = Batch(case)
    with me.comm() as comm, LowLatencyGroup(comm, config) as group:
        for operation, call in (
            ("ll_reset", group.reset),
            ("ll_dispatch", lambda: group.dispatch(*batch.of(me.rank))),
        ):
            if me.rank != 1:
                with pytest.raises(PeerLost) as raised:
                    call()
                assert (raised.value.peer, raised.value.operation) == (1, operation)
                assert not raised.value.fatal
                assert "rank 1 is late: masked from now on" in raised.value.text
                assert group.mask().tolist() == [0, 1, 0] and group.status().masked == (1,)
                call()
            comm.barrier()
            for rank in {0, 1, 2} - {me.rank}:
                group.mask_set(rank, False)
            comm.barrier()
            group.reset()
            assert group.mask().tolist() == [0, 0, 0]
            slots = group.dispatch(*batch.of(me.rank))
            batch.check(me.rank, slots)
            equal(group.combine(slots.plan, results(slots)), batch.sums(me.rank))


@on_ranks(1, run=run_threads)
def test_what_a_group_does_not_take_is_refused(me: Rank) -> None:
    config = CASE.low_latency_config()
    assert config.num_slots(2) == 2 * 3
    assert config.local_experts(1, 2) == 2
    memory, more = config.group_memory(2), dataclasses.replace(config, in_flight=4)
    assert 0 == memory.staging_bytes < memory.symmetric_bytes
    assert memory.symmetric_bytes < more.group_memory(2).symmetric_bytes
    with me.comm() as comm:
        with pytest.raises(InvalidArgument, match="in_flight"):
            LowLatencyGroup(comm, dataclasses.replace(config, in_flight=5))
        with LowLatencyGroup(comm, config) as group:
            for call in (group.mask, lambda: group.mask_set(0)):
                with pytest.raises(InvalidArgument, match="on_peer_loss|MASK"):
                    call()
        masking = dataclasses.replace(config, on_peer_loss="mask")
        with LowLatencyGroup(comm, masking) as group:
            assert group.mask().tolist() == [0]
            with pytest.raises(InvalidArgument, match="rank = 0"):
                group.mask_set(0)
