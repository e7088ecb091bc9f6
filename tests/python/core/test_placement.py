"""The planner of placements through NumPy: what the binding adds to xd_ep_plan_placement."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import crossdock
from crossdock.errors import InvalidArgument

LOADS = [900, 100, 50, 400, 300, 20, 10, 70]


def test_every_expert_has_a_slot_and_the_table_of_slots_says_which():
    placement = crossdock.plan_placement(LOADS, num_ranks=4, slots_per_rank=3)
    assert placement.expert_of_slot.shape == (4, 3)
    table, counts = placement.slots_of_experts()
    assert counts.sum() == 12
    assert counts.min() == 1
    assert counts[0] == counts.max() > 1
    for expert, slots in enumerate(table):
        used = slots[: counts[expert]]
        np.testing.assert_array_equal(placement.expert_of_slot.ravel()[used], expert)
        assert (slots[counts[expert] :] == -1).all()
    shares = np.array(LOADS) / counts
    loads = shares[placement.expert_of_slot].sum(axis=1)
    assert placement.busiest_rank == pytest.approx(loads.max() / loads.mean(), rel=1e-6)


def test_loads_of_any_kind_mean_the_same():
    kinds = [np.array(LOADS), np.array(LOADS, np.uint16), tuple(LOADS), np.array(LOADS, np.float32)]
    kinds += [np.array(LOADS) / 1024, np.array(LOADS) * 2.0**-1000]
    if importlib.util.find_spec("torch"):
        import torch

        kinds += [torch.tensor(LOADS), torch.tensor(LOADS, dtype=torch.float64)]
    wanted = crossdock.plan_placement(LOADS, 4, 3)
    for loads in kinds:
        planned = crossdock.plan_placement(loads, 4, 3)
        np.testing.assert_array_equal(planned.expert_of_slot, wanted.expert_of_slot)


def test_a_new_placement_moves_what_placement_moves_lists():
    today = crossdock.plan_placement(LOADS, 4, 3)
    loads = [300, 100, 500, 400, 300, 20, 10, 700]
    later = crossdock.plan_placement(loads, 4, 3, current=today)
    assert 0 < later.moves
    assert 1 <= later.busiest_rank < later.busiest_rank_before
    moves = crossdock.placement_moves(today, later)
    slots = today.expert_of_slot.ravel().copy()
    for move in moves:
        assert today.expert_of_slot.ravel()[move.from_slot] == move.expert
        slots[move.to_slot] = move.expert
    np.testing.assert_array_equal(slots.reshape(4, 3), later.expert_of_slot)
    bounded = crossdock.plan_placement(
        loads, 4, 3, current=today.expert_of_slot.tolist(), max_moves=1
    )
    assert bounded.moves <= 1
    kept = crossdock.plan_placement(loads, 4, 3, current=today, good_enough=100)
    np.testing.assert_array_equal(kept.expert_of_slot, today.expert_of_slot)


def test_a_rank_without_slots_holds_nothing_and_hosts_share_replicas():
    placement = crossdock.plan_placement(LOADS, 4, 4, rank_slots=[4, 0, 4, 4])
    assert (placement.expert_of_slot[1] == -1).all()
    spread = crossdock.plan_placement([4, 4, 4, 4], 4, 2, rank_hosts=[0, 0, 1, 1])
    for host in (spread.expert_of_slot[:2], spread.expert_of_slot[2:]):
        assert set(host.ravel()) == {0, 1, 2, 3}
    assert spread.busiest_host == pytest.approx(1)


@pytest.mark.parametrize(
    ("error", "text", "changed"),
    [
        (ValueError, r"loads\[1\]: expected 0 or more, finite, got nan", {"loads": [1, np.nan, 2]}),
        (ValueError, r"loads\[2\]: expected 0 or more, finite, got inf", {"loads": [1, 2, np.inf]}),
        (ValueError, r"loads\[0\]: expected 0 or more, finite, got -1", {"loads": [-1.0, 1, 2]}),
        (InvalidArgument, r"args.loads\[0\] = -1, expected 0 or more", {"loads": [-1, 1, 2]}),
        (InvalidArgument, r"args.loads: their sum .* is 2\^62 or more", {"loads": [2**62, 1, 2]}),
        (TypeError, "loads: expected an integer of 64 bits", {"loads": np.array([2**64 - 1])}),
        (TypeError, "loads: expected integers or floating-point", {"loads": ["a", "b"]}),
        (ValueError, "loads: expected a number for each expert", {"loads": [[1, 2], [3, 4]]}),
        (ValueError, "max_moves: expected 1 or more, or None, got 0", {"max_moves": 0}),
        (ValueError, "good_enough: expected 1 to 1000, got nan", {"good_enough": np.nan}),
        (ValueError, "rank_slots: expected the numbers of 2 ranks", {"rank_slots": [1, 2, 1]}),
        (ValueError, "rank_hosts: expected the numbers of 2 ranks", {"rank_hosts": [0]}),
        (TypeError, "rank_hosts: expected whole numbers", {"rank_hosts": ["a", "b"]}),
        (TypeError, r"current: expected .*\[ranks, slots\]", {"current": [0, 1, 2, 0]}),
        (ValueError, r"current: expected the shape \(2, 2\), got", {"current": [[0, 1, 2]]}),
        (
            InvalidArgument,
            r"args.current\[1\] = 7, expected -1 to 2",
            {"current": [[0, 7], [1, 2]]},
        ),
        (InvalidArgument, "num_ranks = 0, expected 1 to 1024", {"num_ranks": 0}),
        (InvalidArgument, "args.num_logical_experts = 3, expected 1 to", {"slots_per_rank": 1}),
    ],
)
def test_what_cannot_be_planned_is_refused(error, text, changed):
    good = {"loads": [1, 2, 3], "num_ranks": 2, "slots_per_rank": 2}
    with pytest.raises(error, match=text):
        crossdock.plan_placement(**(good | changed))


def test_tables_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"current: expected the shape \(3, 2\), got \(2, 3\)"):
        crossdock.plan_placement([1, 2, 3], 3, 2, current=[[0, 1, 2], [0, 1, 2]])
    with pytest.raises(ValueError, match=r"new: expected the shape \(1, 2\) of old"):
        crossdock.placement_moves([[0, 1]], [[0], [1]])
    with pytest.raises(InvalidArgument, match=r"to\[1\] = -2"):
        crossdock.placement_moves([[0, 1]], [[0, -2]])
