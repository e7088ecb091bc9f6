"""Groups with logical experts on NumPy arrays: bits under other tables, loads, mistakes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

import crossdock
from core_support import config_of, dtype_of, equal, low_latency_config_of, peers_are_told, raises
from crossdock.errors import Busy, InvalidArgument, Mismatch, PeerLost, Unsupported
from slots import choices
from support import Apart, Rank, on_ranks, run_threads

SEED = 17
LOGICAL, SLOTS, TOPK, HIDDEN = 6, 3, 4, 24  # slots of each of 4 ranks
TOKENS = (5, 0, 8, 6)

# Ranks 2 and 3 hold nothing; within a rank experts may lie anywhere.
LOW = [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]]
SHUFFLED = [[2, 0, 1], [5, 4, 3], [-1, -1, -1], [-1, -1, -1]]
# The same experts side by side, and these sides in the same order of ranks.
SPREAD = [[-1, -1, -1], [1, 2, 0], [-1, -1, -1], [4, 3, 5]]
REPLICAS = [[0, 1, 2], [3, 4, 5], [5, 0, -1], [2, 0, 3]]


def config(**options: object) -> crossdock.EpConfig:
    sizes = {"num_experts": 4 * SLOTS, "num_logical_experts": LOGICAL, "max_topk": TOPK}
    return config_of(**sizes | {"max_tokens_per_rank": 8, "hidden": HIDDEN} | options)


class Batch:
    """One rank's tokens, and what its group makes of them under a table."""

    def __init__(self, rank: int, dtype: str = "float32", *, whole: bool = False) -> None:
        self.ids = choices(SEED, TOKENS, LOGICAL, TOPK)[rank]
        random = np.random.default_rng((SEED, rank))
        draw = random.standard_normal
        if whole:
            draw = functools.partial(random.integers, -3, 4)
        self.tokens = draw(size=(TOKENS[rank], HIDDEN)).astype(dtype_of(dtype))
        self.weights = draw(size=self.ids.shape).astype(np.float32)
        self.grads = draw(size=(TOKENS[rank], HIDDEN)).astype(dtype_of(dtype))

    def run(
        self, group: crossdock.EpGroup, table: list[list[int]], *, sets: bool = True
    ) -> list[np.ndarray]:
        """The sums of the experts' results, and the gradients of tokens and of weights."""
        if sets:
            group.set_placement(table)
        plan = group.prepare(self.ids)
        received = group.dispatch(plan, self.tokens, self.weights)
        slots = group.row_experts(plan)
        here = np.append(np.array(table[group.comm.rank]), -1)[slots]  # -1 past the last zone
        factors = (1 + here[:, None]).astype(received.tokens.dtype)
        results = received.tokens * factors
        out = group.combine(plan, results, received.weights)
        grads = group.combine_bwd(plan, self.grads, results, received.weights)
        grad_tokens, grad_weights = group.dispatch_bwd(
            plan, grads.expert_out * factors, grads.weights
        )
        assert grad_tokens is not None
        assert grad_weights is not None
        return [out, grad_tokens, grad_weights]


@on_ranks(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_stay_where_tables_keep_the_order_of_sums(me: Rank, dtype: str) -> None:
    batch = Batch(me.rank, dtype)
    with me.comm() as comm, crossdock.EpGroup(comm, config(dtype=dtype)) as group:
        wanted = batch.run(group, LOW)
        for table in (SHUFFLED, SPREAD, LOW):
            for got, want in zip(batch.run(group, table), wanted, strict=True):
                equal(got, want, str(table))
        # Each choice's own gradient is only moved, wherever its expert is.
        equal(batch.run(group, REPLICAS)[2], wanted[2])


@on_ranks(4)
def test_sums_that_are_exact_are_equal_under_any_table(me: Rank) -> None:
    batch = Batch(me.rank, whole=True)
    plain = config(num_experts=8, num_logical_experts=0)
    with me.comm() as comm:
        with crossdock.EpGroup(comm, plain) as group:
            wanted = batch.run(group, [[0, 1], [2, 3], [4, 5], [6, 7]], sets=False)
        with crossdock.EpGroup(comm, config()) as group:
            for table in (LOW, SPREAD, REPLICAS):
                for got, want in zip(batch.run(group, table), wanted, strict=True):
                    equal(got, want, str(table))


@on_ranks(4)
def test_loads_count_choices_by_source_and_logical_expert_alike_on_all_ranks(me: Rank) -> None:
    ids = choices(SEED, TOKENS, LOGICAL, TOPK)
    counts = np.array([[(one == e).sum() for e in range(LOGICAL)] for one in ids])
    with me.comm() as comm, crossdock.EpGroup(comm, config()) as group:
        equal(group.loads(), np.zeros((4, LOGICAL), np.int64))
        group.prepare(ids[me.rank])
        group.set_placement(REPLICAS)
        group.prepare(ids[me.rank])
        equal(group.loads(), 2 * counts)
        without = [[5, 1, 2], [3, 4, -1], [-1, -1, -1], [-1, -1, -1]]  # expert 0 is nowhere
        group.set_placement(without)
        plan = group.prepare(ids[me.rank])
        assert group.status().unplaced_choices == (ids[me.rank] == 0).sum()
        assert plan.rank_rows.sum() == counts[:, 1:].sum()
        equal(group.loads(clear=True), np.stack([2, *[3] * (LOGICAL - 1)], -1) * counts)
        equal(group.loads(), np.zeros((4, LOGICAL), np.int64))
        with crossdock.EpGroup(comm, config_of()) as group:
            assert "num_logical_experts = 0" in raises(InvalidArgument, group.loads).text


@on_ranks(4)
def test_a_table_may_be_set_between_the_parts_of_an_operation(me: Rank) -> None:
    batch = Batch(me.rank, whole=True)
    with me.comm() as comm, crossdock.EpGroup(comm, config()) as group:
        group.set_placement(REPLICAS)
        plan = group.prepare(batch.ids, parts=2)
        got = group.dispatch(plan, batch.tokens, part=1)
        group.set_placement(LOW)
        group.dispatch(plan, batch.tokens, part=2, out=got)
        out = group.combine(plan, got.tokens, part=1)
        group.set_placement(SPREAD)
        group.combine(plan, got.tokens, part=2, out=out)
        choices_of_token = (batch.ids >= 0).sum(axis=1, keepdims=True)
        equal(out, batch.tokens * choices_of_token.astype(np.float32))


@on_ranks(2, run=run_threads)
def test_mistakes_are_named_and_peers_are_told_at_once(me: Rank) -> None:
    sizes = {"num_experts": 4, "num_logical_experts": 3}
    good = [[0, 1], [2, 0]]
    wrong: list[tuple[type[Exception], str, object, object]] = [
        (TypeError, r"placement: expected the expert of each slot", [0, 1, 2, 0], None),
        (ValueError, r"of 4 slots, \[2, 2\], got shape \[1, 2\]", [[0, 1]], None),
        (ValueError, r"of 4 slots, \[2, 2\], got shape \[1, 4\]", [[0, 1, 2, 0]], None),
        (ValueError, "placement: expected numbers of 32 bits", [[0, 1], [2, 1 << 40]], None),
        (ValueError, "choices: expected numbers of 32 bits", good, [[[1 << 31], [], []]] * 2),
        (InvalidArgument, r"expert_of_slot\[2\] = 3, expected a logical", [[0, 1], [3, 0]], None),
        (ValueError, r"choices: expected a list for each of \[2 ranks, 3 exp", good, [[[]] * 3]),
        (TypeError, "choices: expected whole numbers", good, [[[0.5], [], []]] * 2),
        (InvalidArgument, "choice_slots.0. = 1, a slot of", good, [[[1], [], []]] * 2),
    ]
    with (
        me.comm() as comm,
        crossdock.EpGroup(comm, config_of(**sizes)) as bulk,
        crossdock.LowLatencyGroup(comm, low_latency_config_of(**sizes)) as few,
    ):
        for group in (bulk, few):
            right = functools.partial(group.set_placement, good)
            for kind, text, table, lists in wrong:
                call = functools.partial(group.set_placement, table, choices=lists)
                peers_are_told(me, kind, text, call, right)
            other = functools.partial(group.set_placement, [[0, 1], [2, me.rank]])
            assert "another placement" in raises(Mismatch, other).text
            group.set_placement(good, choices=[[[3, 0, 0], [], [2]]] * 2)
        slots = few.dispatch_send(np.zeros((1, 8), np.float32), np.zeros((1, 2), np.int64) - 1)
        raises(Busy, functools.partial(few.set_placement, good))
        slots.receive()
        with crossdock.EpGroup(comm, config_of()) as group:
            with pytest.raises(ValueError, match="has no num_logical_experts"):
                group.set_placement(good)


@on_ranks(2, run=run_threads)
def test_a_rank_that_leaves_is_told_by_the_name_of_the_call(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, config_of(num_logical_experts=4)) as group:
        if me.rank == 0:
            error = raises(PeerLost, functools.partial(group.set_placement, [[0, 1], [2, 3]]))
            assert "is needed by xd_ep_group_set_placement" in error.text
            assert error.fatal


@on_ranks(2, run=run_threads)
def test_few_tokens_find_the_same_slots(me: Rank) -> None:
    sizes = {"num_experts": 4, "num_logical_experts": 3}
    ids = np.array([[0, 1], [2, 0], [1, -1]])
    tokens = np.arange(24, dtype=np.float32).reshape(3, 8) + 100 * me.rank
    with me.comm() as comm, crossdock.LowLatencyGroup(comm, low_latency_config_of(**sizes)) as few:
        few.set_placement([[0, 1], [2, 0]], choices=[[[0, 0, 3], [], []], [[], [], []]])
        slots = few.dispatch(tokens, ids)
        # Of rank 0 token 0 goes to slot 0 and token 1 to slot 0; rank 1 keeps its own in slot 3.
        assert slots.counts.tolist() == [[2, 4], [2, 2]][me.rank]
        results = slots.tokens * np.float32(2)
        equal(few.combine(slots.plan, results), tokens * [[4], [4], [2]], dtype=np.float32)
        few.set_placement([[1, 1], [-1, 1]])
        slots = few.dispatch(tokens, ids)
        # Tokens 0 and 2 of each rank choose expert 1: rank 0 has two slots of its own for them.
        assert slots.counts.tolist() == [[2, 0], [0, 2]][me.rank]
        assert few.status().unplaced_choices == 3


def weights_of(expert: np.ndarray) -> list[np.ndarray]:
    """Weights by which an expert is known: of two shapes and dtypes, of each number given."""
    tags = np.asarray(expert, np.float32)
    return [
        tags[..., None, None] * 100 + np.arange(12, dtype=np.float32).reshape(4, 3),
        np.repeat(tags[..., None], 5, axis=-1).astype(dtype_of("bfloat16")),
    ]


def has_weights(arrays: list[np.ndarray], table: list[list[int]], rank: int) -> None:
    """Every slot that is not empty has its expert's weights."""
    held = np.array(table[rank]) >= 0
    for got, want in zip(arrays, weights_of(table[rank]), strict=True):
        equal(got[held], want[held])


MOVES = [
    # Experts that change places, over two ranks, over all, and within one.
    ([[0, 1, 2], [3, 4, 5]], [[3, 1, 2], [0, 4, 5]]),
    ([[0, 1, 2], [3, 4, 5]], [[5, 3, 0], [1, 2, 4]]),
    ([[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]]),
    # One slot is free, then another; replicas come and go.
    ([[0, 1, -1], [3, 4, 5]], [[0, -1, 1], [5, 3, 4]]),
    ([[0, 1, 2], [0, 4, 2]], [[2, 4, 0], [1, 1, -1]]),
    ([[0, -1, -1], [-1, -1, -1]], [[0, 0, 0], [0, 0, -1]]),
]


def most_moves(old: list[list[int]], new: list[list[int]]) -> int:
    """The moves into the slots of the rank that has most."""
    ranks = [move.to_slot // 3 for move in crossdock.placement_moves(old, new)]
    return max(map(ranks.count, set(ranks)), default=0)


@on_ranks(2)
def test_moves_bring_the_weights_that_the_new_table_says(me: Rank) -> None:
    sizes = {"num_experts": 6, "num_logical_experts": 6}
    with (
        me.comm(heap_bytes=1 << 20) as comm,
        crossdock.EpGroup(comm, config_of(**sizes)) as bulk,
        crossdock.LowLatencyGroup(comm, low_latency_config_of(**sizes)) as few,
    ):
        for old, new in MOVES:
            for group in (bulk, few):
                group.set_placement(old)
                arrays = [comm.empty(one.shape, one.dtype) for one in weights_of(old[me.rank])]
                for array, weights in zip(arrays, weights_of(old[me.rank]), strict=True):
                    array[:] = weights
                moves = crossdock.move_experts(group, arrays, old, new)
                assert {move.to_slot // 3 for move in moves} <= {me.rank}
                has_weights(arrays, new, me.rank)
                steps = crossdock.ExpertMove(group, arrays, new, old, bytes_per_step=7)
                held = weights_of(old[me.rank])
                size = sum(one[0].nbytes for one in held)
                for left in range(most_moves(new, old) * size, 7, -7):
                    assert not steps.step() and not steps.done, left
                    in_use = np.array(new[me.rank]) >= 0
                    for array, weights in zip(arrays, weights_of(new[me.rank]), strict=True):
                        equal(array[in_use], weights[in_use])
                    assert group.placement is not None
                    assert group.placement.tolist() == new
                assert steps.step() and steps.done and steps.step()
                has_weights(arrays, old, me.rank)
        old, new = [[0, 1, 2], [3, 4, -1]], [[0, 1, 5], [3, 4, 5]]

        def load(expert: int, slot: int) -> None:
            for array, weights in zip(arrays, weights_of(expert), strict=True):
                array[slot] = weights

        bulk.set_placement(old)
        crossdock.move_experts(bulk, arrays, old, new, load=load)
        has_weights([one[2:] for one in arrays], [[5]] * 2, me.rank)


@on_ranks(2, run=run_threads)
def test_moves_that_cannot_be_made_leave_the_weights_and_peers_are_told(me: Rank) -> None:
    sizes = {"num_experts": 4, "num_logical_experts": 4}
    old, new = [[0, 1], [2, 3]], [[2, 1], [0, 3]]
    with me.comm(heap_bytes=1 << 20) as comm, crossdock.EpGroup(comm, config_of(**sizes)) as group:
        good = comm.empty((2, 5), np.float32)
        good[:] = 7
        move = functools.partial(crossdock.move_experts, group)
        right = functools.partial(move, [good], old, new)
        wrong: list[tuple[type[Exception], str, object, object]] = [
            (ValueError, r"arrays\[0\]: expected \[2, ...\], got shape \(3,\)", good[0, :3], new),
            (ValueError, r"arrays\[0\]: expected a C-contiguous", good[:, ::2], new),
            (InvalidArgument, "xd_mem_export", np.zeros((2, 5), np.float32), new),
            (TypeError, r"arrays\[0\]: expected a ndarray, got list", [[1], [2]], new),
            (ValueError, "new: expected logical experts, 0 to 3, got 4", good, [[4, 1], [2, 3]]),
            (ValueError, "new: expected the expert of each of 4 slots", good, [[4, 1]]),
            (TypeError, "new: expected the expert of each slot", good, [0, 1, 2, 3]),
        ]
        for kind, text, array, table in wrong:
            peers_are_told(me, kind, text, functools.partial(move, [array], old, table), right)
        shorter = good if me.rank == 0 else comm.empty((2, 4), np.float32)
        with pytest.raises(ValueError, match="20. bytes on rank 0 and .16. on rank 1"):
            move([shorter], old, new)
        for name, tables in (
            ("old", ([old, new][me.rank], new)),
            ("new", (old, [new, old][me.rank])),
        ):
            with pytest.raises((ValueError, Mismatch), match=f"{name}: expected|rank 1"):
                move([good], *tables)
        with pytest.raises(ValueError, match="old: expected the group's placement, got another"):
            move([good], new, old)
        group.set_placement([[0, 1], [2, 2]])
        with pytest.raises(ValueError, match="old: expected a slot of expert 3, or load"):
            move([good], [[0, 1], [2, 2]], new)
        assert (good == 7).all()


@on_ranks(2, run=run_threads)
def test_groups_whose_slots_lie_elsewhere_are_refused(me: Rank) -> None:
    old, new = [[0, 1], [2, 3]], [[2, 1], [0, 3]]
    sizes: dict[str, object] = {"num_experts": 4}
    wrong: list[tuple[str, dict[str, object]]] = [
        ("with expert_ranks", {"num_logical_experts": 4, "expert_ranks": [0, 1, 0, 1]}),
        ("expected one with num_logical_experts", {}),
    ]
    with me.comm(heap_bytes=1 << 20) as comm:
        weights = comm.empty((2, 5), np.float32)
        for text, options in wrong:
            with crossdock.EpGroup(comm, config_of(**sizes | options)) as group:
                assert group.placement is None
                with pytest.raises(ValueError, match=text):
                    crossdock.move_experts(group, [weights], old, new)
        with pytest.raises(ValueError, match="expected one that is open"):
            crossdock.move_experts(group, [weights], old, new)


@on_ranks(2, run=run_threads)
def test_a_load_that_fails_leaves_the_table_where_slots_were_empty(me: Rank) -> None:
    sizes = {"num_experts": 6, "num_logical_experts": 6}
    old, new = [[0, 1, -1], [2, 3, 4]], [[0, 1, 5], [2, 3, 4]]  # rank 0 alone loads

    def load(expert: int, slot: int) -> None:
        assert (expert, slot, me.rank) == (5, 2, 0)
        raise OSError("no such file")

    with me.comm(heap_bytes=1 << 20) as comm, crossdock.EpGroup(comm, config_of(**sizes)) as group:
        group.set_placement(old)
        weights = comm.empty((3, 5), np.float32)
        with pytest.raises(OSError if me.rank == 0 else Mismatch):
            crossdock.move_experts(group, [weights], old, new, load=load)
        assert group.placement is not None
        assert group.placement.tolist() == old
        seen = []
        crossdock.move_experts(group, [weights], old, new, load=lambda *call: seen.append(call))
        assert seen == ([(5, 2)] if me.rank == 0 else [])
        assert group.placement.tolist() == new


@on_ranks(2, run=run_threads)
def test_steps_load_once_and_end_with_the_first_mistake(me: Rank) -> None:
    sizes = {"num_experts": 6, "num_logical_experts": 6}
    old, new = [[0, 1, -1], [2, 3, 4]], [[4, 1, 5], [2, 0, 3]]
    with me.comm(heap_bytes=1 << 20) as comm, crossdock.EpGroup(comm, config_of(**sizes)) as group:
        group.set_placement(old)
        weights = comm.empty((3, 5), np.float32)
        weights[:] = np.array(old[me.rank])[:, None]
        start = functools.partial(crossdock.ExpertMove, group, [weights], old, new)
        seen: list[tuple[int, int]] = []
        loads = functools.partial(start, load=lambda *call: seen.append(call), bytes_per_step=9)
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=f"bytes_per_step: .* above 0, got {wrong}"):
                start(load=print, bytes_per_step=wrong)

        for tables, text in (
            ((new,), "old: expected the group's placement, got another"),
            ((new, old), "group: expected the table of the first step, got one set since"),
        ):
            moves = loads()
            assert not moves.step()
            for table in tables:
                group.set_placement(table)
            with pytest.raises(ValueError, match=text):
                moves.step()
            group.set_placement(old)
        with pytest.raises(ValueError, match="expected a move whose steps have not raised"):
            moves.step()
        assert not moves.done

        seen.clear()
        given = np.array(new)
        moves = crossdock.ExpertMove(
            group, [weights], old, given, load=lambda *call: seen.append(call), bytes_per_step=9
        )
        given[:] = 0  # it may be the caller's buffer for the next plan
        number = 1
        while not moves.step():
            number += 1
        assert number == 5  # 40 bytes into rank 1
        assert seen == ([(5, 2)] if me.rank == 0 else [])
        assert group.placement is not None
        assert group.placement.tolist() == new
        held = np.array(new[me.rank])
        equal(weights[held < 5], np.repeat(held[held < 5, None], 5, axis=1).astype(np.float32))


ENTERED = threading.Barrier(3)


@on_ranks(3, run=run_threads)
def test_a_rank_that_is_late_in_the_turn_leaves_no_weights_behind(me: Rank) -> None:
    sizes = {"num_experts": 6, "num_logical_experts": 6}
    masks = {"on_peer_loss": "mask", "wait_timeout_ms": 300}
    old, new = [[0, 1], [2, 3], [4, 5]], [[2, 1], [4, 3], [0, 5]]
    with (
        me.comm(heap_bytes=1 << 20) as comm,
        crossdock.LowLatencyGroup(comm, low_latency_config_of(**sizes | masks)) as few,
    ):
        arrays = [comm.empty(one.shape, one.dtype) for one in weights_of(old[me.rank])]
        for array, weights in zip(arrays, weights_of(old[me.rank]), strict=True):
            array[:] = weights
        if me.rank == 2:
            few.set_placement = functools.partial(set_late, few.set_placement)
        try:
            crossdock.move_experts(few, arrays, old, new)
            assert me.rank == 2
        except PeerLost as error:
            assert not error.fatal
        if me.rank < 2:
            ENTERED.wait(60)
        assert few.placement is not None
        assert few.placement.tolist() == new
        has_weights(arrays, new, me.rank)


def set_late(set_placement: Callable[..., None], *args: object, **options: object) -> None:
    """Takes a turn that the other ranks have ended without this one."""
    ENTERED.wait(60)
    set_placement(*args, **options)


def die(*args: object, **options: object) -> None:
    """Ends this rank's process where it would take its turn."""
    os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(3, loses=2, fresh=True)  # other tests keep their processes
def test_a_loss_in_the_turn_of_a_group_that_resumes_leaves_the_old_table(me: Rank) -> None:
    sizes = {"num_experts": 6, "num_logical_experts": 6, "on_peer_loss": "resume"}
    old, new = [[0, 1], [2, 3], [4, 5]], [[2, 1], [4, 3], [0, 5]]
    with (
        me.comm(heap_bytes=1 << 20, on_peer_loss="mask") as comm,
        crossdock.EpGroup(comm, config_of(**sizes)) as group,
    ):
        arrays = [comm.empty(one.shape, one.dtype) for one in weights_of(old[me.rank])]
        for array, weights in zip(arrays, weights_of(old[me.rank]), strict=True):
            array[:] = weights
        if me.rank == 2:
            group.set_placement = die
        moves = functools.partial(crossdock.move_experts, group, arrays, old, new)
        for call in (moves, functools.partial(group.set_placement, new)):
            assert not raises(PeerLost, call).fatal
            assert group.placement is not None
            assert group.placement.tolist() == old
            has_weights(arrays, old, me.rank)
        assert comm.agree(timeout=60).members == (0, 1)
        group.enter_view()
        assert group.placement.tolist() == old
        plan = group.prepare(np.array([[0, 2]]))  # in `new` expert 0 is on rank 2
        assert plan.rank_rows.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
        left = [[2, 1], [0, 3], [-1, -1]]
        group.set_placement(left)
        assert group.placement.tolist() == left
        plan = group.prepare(np.array([[2, 1]]))
        assert plan.rank_rows.tolist() == [[2, 0, 0], [2, 0, 0], [0, 0, 0]]


@on_ranks(Apart(2))
def test_weights_of_another_machine_are_refused_and_all_ranks_hear_of_it(me: Rank) -> None:
    sizes = {"num_experts": 4, "num_logical_experts": 4}
    old, new = [[0, 1], [2, 3]], [[0, 1], [0, 3]]  # rank 1 alone needs weights
    with me.comm(heap_bytes=1 << 20) as comm, crossdock.EpGroup(comm, config_of(**sizes)) as group:
        group.set_placement(old)
        weights = comm.empty((2, 5), np.float32)
        error = raises(
            Mismatch if me.rank == 0 else Unsupported,
            functools.partial(crossdock.move_experts, group, [weights], old, new),
        )
        assert me.rank == 1 or "rank 1" in error.text
        group.set_placement(new)
        plan = group.prepare(np.array([[0, 2]]))
        assert plan.rank_rows.tolist() == [[1, 0], [0, 1]]
