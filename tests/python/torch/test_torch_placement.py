"""Groups with logical experts on torch tensors: what the binding adds to those of NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import Busy, Mismatch
from support import Rank, on_ranks
from torch_support import where

LOGICAL, SLOTS, HIDDEN, TOKENS = 6, 4, 16, 5  # slots of each of 2 ranks
OLD = [[0, 1, 2, -1], [3, 4, 5, -1]]
NEW = [[0, 1, 3, 5], [3, 4, 2, 0]]


def sizes_of_groups() -> dict[str, Any]:
    """Sizes of groups of both kinds."""
    sizes = {"num_experts": 2 * SLOTS, "num_logical_experts": LOGICAL, "max_topk": 2}
    return sizes | {"max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "dtype": torch.float32}


def placed(comm: xd.Comm, rank: int) -> tuple[tuple[xd.EpGroup, xd.LowLatencyGroup], torch.Tensor]:
    """Groups of both kinds by the old table, and this rank's weights in slots."""
    sizes = sizes_of_groups()
    groups = xd.EpGroup(**sizes), xd.LowLatencyGroup(**sizes)
    for group in groups:
        group.set_placement(OLD)
    weights = comm.empty_symmetric((SLOTS, HIDDEN), torch.float32)
    weights.copy_(torch.tensor(OLD[rank])[:, None].add(1))
    return groups, weights


def served(
    groups: tuple[xd.EpGroup, xd.LowLatencyGroup],
    weights: torch.Tensor,
    seed: int,
    *,
    decodes: bool = True,
) -> list[torch.Tensor]:
    """A batch through the experts, each of which multiplies by its weights, on both ways."""
    bulk, few = groups
    generator = torch.Generator(where()).manual_seed(seed)
    ids = torch.rand(TOKENS, LOGICAL, generator=generator).argsort(dim=1)[:, :2].contiguous()
    tokens = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).float()
    plan = bulk.prepare(ids)
    received = xd.dispatch(plan, tokens)
    slots = plan.row_experts().clamp(min=0)
    out = xd.combine(plan, received.tokens * weights[slots])
    expected = tokens * (1 + ids).sum(dim=1, keepdim=True)
    if not decodes:
        return [out, out, expected]
    rows = xd.ll_dispatch(few, tokens, ids)
    results = rows.tokens * weights[:, None]
    return [out, xd.ll_combine(rows.plan, results), expected]


@on_ranks(2)
def test_experts_move_while_both_kinds_of_groups_serve_them(me: Rank) -> None:
    with xd.init(device=where(), heap_bytes=1 << 20) as comm, torch.no_grad():
        groups, weights = placed(comm, me.rank)
        bulk = groups[0]
        out, decoded, expected = served(groups, weights, me.rank)
        assert torch.equal(out, expected)
        assert torch.equal(decoded, expected)
        assert bulk.loads(clear=True).sum() == 2 * 2 * TOKENS
        xd.move_experts(groups, [weights], OLD, NEW)
        assert weights[:, 0].tolist() == [1 + expert for expert in NEW[me.rank]]
        out, decoded, expected = served(groups, weights, 7 + me.rank)
        assert torch.equal(out, expected)
        assert torch.equal(decoded, expected)
        for group in groups:
            wrong = NEW if me.rank == 0 else NEW[:1]
            kind = Mismatch if me.rank == 0 else ValueError
            with pytest.raises(kind, match="rank 1|expected the expert of each of 8 slots"):
                group.set_placement(wrong)
        move = functools.partial(xd.move_experts, bulk, old=NEW, new=OLD)
        for tensor in (weights.t(), weights[:, ::2]):
            with pytest.raises(Mismatch if me.rank == 0 else ValueError):
                move([weights if me.rank == 0 else tensor])


@on_ranks(1)
def test_a_move_ends_in_another_mode_of_autograd_than_it_began(me: Rank) -> None:
    old, new = [[0, 1, 2, -1]], [[2, 0, 0, 1]]
    sizes = sizes_of_groups() | {"num_experts": SLOTS, "num_logical_experts": 3}
    generator = torch.Generator(where()).manual_seed(5)
    tokens = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).float()
    ids = torch.rand(TOKENS, 3, generator=generator).argsort(dim=1)[:, :2].contiguous()
    ids[0, 0] = -1
    expected = tokens * (1 + ids).sum(dim=1, keepdim=True)
    with xd.init(device=where(), heap_bytes=1 << 20) as comm:
        for begins, ends in ((True, False), (False, True)):
            group = xd.EpGroup(**sizes)
            group.set_placement(torch.tensor(old))
            with torch.inference_mode(begins):
                weights = comm.empty_symmetric((SLOTS, HIDDEN), torch.float32)
                weights.copy_(torch.tensor(old[0])[:, None].add(1))
                steps = xd.ExpertMove(group, [weights], old, new, bytes_per_step=100)
            with torch.inference_mode(ends):
                while not steps.step():
                    assert weights[:3, 0].tolist() == [1, 2, 3]
            assert weights[:, 0].tolist() == [3, 1, 1, 2]
            with torch.no_grad():
                plan = group.prepare(ids)
                received = xd.dispatch(plan, tokens)
                out = xd.combine(plan, received.tokens * weights[plan.row_experts().clamp(min=0)])
            assert torch.equal(out, expected)
            assert group.loads().tolist() == [[int((ids == expert).sum()) for expert in range(3)]]
            group.close()


@on_ranks(2)
def test_groups_change_their_tables_together_or_not_at_all(me: Rank) -> None:
    with xd.init(device=where(), heap_bytes=1 << 20) as comm, torch.no_grad():
        groups, weights = placed(comm, me.rank)
        bulk, few = groups
        none = torch.full((1, 2), -1)
        if me.rank == 1:  # rank 0 sends its half as well, and has received it
            sent = xd.ll_dispatch_send(few, torch.zeros(1, HIDDEN), none)
        else:
            xd.ll_dispatch(few, torch.zeros(1, HIDDEN), none)
        with pytest.raises(Busy if me.rank == 1 else Mismatch):
            xd.move_experts(groups, [weights], OLD, NEW)
        for group in groups:
            assert group.placement is not None
            assert group.placement.tolist() == OLD
        out, _, expected = served((bulk, few), weights, me.rank, decodes=False)
        assert torch.equal(out, expected)
        if me.rank == 1:
            sent.receive()
        xd.move_experts(groups, [weights], OLD, NEW)
        for out in served(groups, weights, 7 + me.rank)[:2]:
            assert torch.equal(out, served(groups, weights, 7 + me.rank)[2])
        with pytest.raises(ValueError, match="groups: expected one or more, got none"):
            xd.move_experts([], [weights], NEW, OLD)
        other = xd.EpGroup(**sizes_of_groups() | {"num_logical_experts": LOGICAL - 1})
        with pytest.raises(ValueError, match="equal numbers of experts"):
            xd.move_experts([bulk, other], [weights], NEW, OLD)
        with pytest.raises(ValueError, match="routing_layout: expected a group without num_log"):
            bulk.routing_layout(none)


@on_ranks(2)
def test_states_of_an_optimiser_move_with_their_experts(me: Rank) -> None:
    """Steps before and behind moves have the bits of those on one rank, where nothing moves."""
    tables = [OLD, [[5, 0, -1, 3], [2, -1, 4, 1]], [[3, -1, 4, 5], [1, 2, 0, -1]], OLD]
    generator = torch.Generator(where()).manual_seed(11)
    whole = torch.nn.Parameter(torch.randn(LOGICAL, HIDDEN, generator=generator))
    with xd.init(device=where(), heap_bytes=1 << 12) as comm:
        group = xd.EpGroup(**sizes_of_groups())
        group.set_placement(OLD)
        comm.reserve(1 << 12)
        weights = torch.nn.Parameter(comm.empty_symmetric((SLOTS, HIDDEN), torch.float32))
        weights.data.copy_(whole[OLD[me.rank]].detach())
        other = torch.nn.Parameter(torch.zeros(SLOTS, HIDDEN))  # which stays where it is
        adam = torch.optim.Adam([other, weights], amsgrad=True)
        reference = torch.optim.Adam([whole], amsgrad=True)
        for old, new in zip(tables, [*tables[1:], OLD], strict=True):
            for _ in range(2):
                whole.grad = torch.randn(whole.shape, generator=generator)
                weights.grad = whole.grad[old[me.rank]].clone()
                other.grad = torch.ones_like(other)
                for optimizer in (adam, reference):
                    optimizer.step()
            before = {name: one.clone() for name, one in adam.state[other].items()}
            xd.move_experts(group, [weights], old, new, optimizer=adam)
            held = torch.tensor(new[me.rank])
            used = held >= 0
            assert torch.equal(weights[used], whole[held[used]])
            for name, state in adam.state[weights].items():
                expected = reference.state[whole][name]
                same = state if state.dim() == 0 else state[used]
                assert torch.equal(same, expected if state.dim() == 0 else expected[held[used]])
            for name, state in adam.state[other].items():
                assert torch.equal(state, before[name])
        with pytest.raises(ValueError, match=r"tensors\[0\]: expected a parameter of the optim"):
            xd.move_experts(group, [weights], OLD, NEW, optimizer=torch.optim.SGD([other]))
        kept = adam.state[weights]["exp_avg"]
        adam.state[weights]["exp_avg"] = torch.zeros(3)  # as of factored or quantised moments
        with pytest.raises(TypeError, match=r"'exp_avg': expected \[4, ...\] of other dt.*\(3,\)"):
            xd.move_experts(group, [weights], OLD, NEW, optimizer=adam)
        adam.state[weights]["exp_avg"] = kept
        assert torch.equal(weights[used], whole[held[used]])
        kind = ValueError, "expected equal states on all ranks"
        if me.rank == 1:
            adam = torch.optim.Adam([weights])  # has made no step
        with pytest.raises(kind[0], match=kind[1]):
            xd.move_experts(group, [weights], OLD, NEW, optimizer=adam)
        with pytest.raises(TypeError if me.rank == 1 else Mismatch):
            one = [weights] if me.rank == 1 else torch.optim.Adam([weights])
            xd.move_experts(group, [weights], OLD, NEW, optimizer=one)


def layer_of(group: xd.EpGroup, **options: Any) -> xd.MoELayer:
    """A layer whose router always chooses expert 0, with all the weight, and then expert 3."""

    def router(tokens: torch.Tensor) -> xd.Routing:
        count = len(tokens)
        ids = torch.tensor([0, 3]).expand(count, 2).contiguous()
        return xd.Routing(ids, torch.tensor([1.0, 0.0]).expand(count, 2).contiguous())

    torch.manual_seed(3)
    options = {"router": router} | options
    return xd.MoELayer(HIDDEN, 8, LOGICAL, 2, group=group, **options).eval()


MOVED = [[1, 0, 3, 2], [4, 5, 0, -1]]


@on_ranks(2)
def test_layers_refuse_tables_that_their_weights_do_not_lie_by(me: Rank) -> None:
    with xd.init(device=where()):
        group = xd.EpGroup(**sizes_of_groups())
        layer = layer_of(group, decode_tokens=2)
        few = layer.decode_group
        assert few is not None
        x = torch.randn(2, HIDDEN)
        layer(x).hidden.sum().backward()  # nothing has moved
        with torch.no_grad():
            wanted = layer(x).hidden
        group.set_placement(MOVED)
        with pytest.raises(ValueError, match="decode: expected group and decode_group to have"):
            layer(x, decode=True)
        with pytest.raises(ValueError, match="gradients and optimiser states do not follow"):
            layer(x)
        with torch.no_grad(), pytest.raises(ValueError, match="layer.placement: expected the gr"):
            layer(x)
        with pytest.raises((ValueError, Mismatch), match="old: expected the group's pl|rank"):
            xd.rebalance(layer)
        group.set_placement(layer.placement)
        with torch.no_grad():
            assert torch.equal(layer(x).hidden, wanted)
            assert torch.equal(layer(x, decode=True).hidden, wanted)


@on_ranks(2)
def test_checkpoints_of_moved_experts_load_by_their_table(me: Rank) -> None:
    with xd.init(device=where()), torch.no_grad():
        layer = layer_of(xd.EpGroup(**sizes_of_groups()))
        x = torch.randn(2, HIDDEN)
        wanted = layer(x).hidden
        xd.rebalance(layer, [9, 1, 1, 9, 1, 1])
        assert layer.group.has_moved
        saved = {name: value.clone() for name, value in layer.state_dict().items()}
        other = layer_of(xd.EpGroup(**sizes_of_groups()))
        other.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"call set_placement\(layer.placement\)"):
            other(x)
        other.group.set_placement(other.placement)
        assert torch.equal(other(x).hidden, wanted)
        # A group that has moved before its layer was made, and the same weights by their names.
        group = xd.EpGroup(**sizes_of_groups())
        group.set_placement(MOVED)
        third = layer_of(group, router=None, decode_tokens=2)
        state = {"gate.weight": torch.randn(LOGICAL, HIDDEN)}
        for expert in range(LOGICAL):
            for name, shape in (("w1", (8, HIDDEN)), ("w3", (8, HIDDEN)), ("w2", (HIDDEN, 8))):
                state[f"experts.{expert}.{name}.weight"] = torch.full(shape, 0.1 * (1 + expert))
        xd.load_pretrained(third, state, "", "mixtral")
        for slot, expert in enumerate(MOVED[me.rank]):
            if expert >= 0:
                assert (xd.local_tensor(third.experts.w_out)[slot] == 0.1 * (1 + expert)).all()
        assert torch.equal(third(x).hidden, third(x, decode=True).hidden)
        with pytest.raises(ValueError, match="group: expected one of the layer's own"):
            layer_of(group)


class Scaled(torch.nn.Module):
    """Experts with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(SLOTS, HIDDEN))
        self.register_buffer("scale", torch.ones(SLOTS))


@on_ranks(2)
def test_experts_that_cannot_move_are_refused_and_loads_stay(me: Rank) -> None:
    with xd.init(device=where()), torch.no_grad():
        with pytest.raises(ValueError, match="experts.scale: expected parameters only"):
            layer_of(xd.EpGroup(**sizes_of_groups()), experts=Scaled())
        layer = layer_of(xd.EpGroup(**sizes_of_groups()))
        layer(torch.randn(2, HIDDEN))
        loads = layer.group.loads()
        assert loads.sum() == 2 * 2 * 2
        if me.rank == 1:
            layer.train()
        with pytest.raises(ValueError if me.rank == 1 else Mismatch):
            xd.rebalance(layer)
        layer.eval()
        with pytest.raises(ValueError if me.rank == 1 else Mismatch):
            xd.rebalance(layer, max_moves=1 - me.rank)
        assert torch.equal(layer.group.loads(), loads)
        layer.bfloat16()
        with pytest.raises(ValueError, match="expected experts in symmetric memory"):
            xd.rebalance(layer)


@on_ranks(2)
def test_a_layer_that_is_rebalanced_gives_the_same_bits(me: Rank) -> None:
    with xd.init(device=where()), torch.inference_mode():
        group = xd.EpGroup(**sizes_of_groups())
        torch.manual_seed(3)
        # Only experts 0 to 3 are chosen, which are in the slots of rank 0 at first. One choice has
        # all the weight, so that its sum has one term however experts lie.
        ids = torch.tensor([[0, 1], [2, 0], [3, 0], [0, 3], [1, 0]])

        def router(tokens: torch.Tensor) -> xd.Routing:
            weights = torch.tensor([1.0, 0.0]).expand(len(tokens), 2).contiguous()
            return xd.Routing(ids[: len(tokens)], weights)

        layer = xd.MoELayer(
            HIDDEN, 8, LOGICAL, 2, group=group, router=router, decode_tokens=2
        ).eval()
        x = torch.randn(TOKENS, HIDDEN)
        before = [layer(x).hidden, layer(x[:2], decode=True).hidden]
        moves = xd.rebalance(layer)
        assert len(moves) > 0 or me.rank == 0
        assert group.placement is not None
        assert np.isin(group.placement[1], [0, 1, 2, 3]).any()
        assert torch.equal(before[1], before[0][:2])
        after = [layer(x).hidden, layer(x[:2], decode=True).hidden]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(ValueError, match="expected one in eval mode"):
            xd.rebalance(layer.train())


@on_ranks(2)
def test_a_rank_that_has_loaded_waits_for_the_others_in_steps(me: Rank) -> None:
    with xd.init(device=where()) as comm, torch.no_grad():
        (group, _), weights = placed(comm, me.rank)
        new = [[0, 1, 2, 4], [0, 1, 2, 5]]
        old = [[0, 1, 2, -1], [3, 5, 5, -1]]  # expert 4 is in no slot; rank 1 copies most
        group.set_placement(old)

        def load(expert: int, slot: int) -> None:
            assert (me.rank, expert, slot) == (0, 4, 3)
            weights[slot] = expert + 1

        weights.copy_(torch.tensor(old[me.rank])[:, None].add(1))
        steps = xd.ExpertMove(group, [weights], old, new, load=load, bytes_per_step=64)
        number = 1
        while not steps.step():
            number += 1
        assert number == 4  # 256 bytes into rank 1
        assert torch.equal(weights[:, 0], torch.tensor(new[me.rank]).add(1.0))


@on_ranks(2)
def test_a_model_is_rebalanced_in_steps_while_it_serves(me: Rank) -> None:
    with xd.init(device=where()), torch.no_grad():
        model = torch.nn.Sequential(*(layer_of(xd.EpGroup(**sizes_of_groups())) for _ in range(2)))
        first, second = model
        x = torch.randn(TOKENS, HIDDEN)

        def bits() -> list[torch.Tensor]:
            return [layer(x).hidden for layer in (first, second)]

        wanted, tables = bits(), [layer.group.table for layer in (first, second)]
        steps = xd.Rebalance(model, bytes_per_step=100, good_enough=1.0)
        assert not steps.step()
        if me.rank == 0:
            next(iter(first.expert_parameters())).mul_(1)
        with pytest.raises(ValueError if me.rank == 0 else Mismatch, match="written since|rank 0"):
            steps.step()
        assert not steps.step()
        if me.rank == 1:
            parameter = next(iter(first.expert_parameters()))
            before, parameter.data = parameter.data, parameter.data.clone()
        with pytest.raises(ValueError if me.rank == 1 else Mismatch, match="written since|rank 1"):
            steps.step()
        if me.rank == 1:
            parameter.data = before
        assert not steps.step()
        first.group.set_placement(MOVED)
        first.group.set_placement(first.placement)
        with pytest.raises(ValueError, match="got one set since"):
            steps.step()

        number, moved_first = 0, 0
        while not steps.step():
            number += 1
            moved_first += first.group.table == tables[0]
            for got, want in zip(bits(), wanted, strict=True):
                assert torch.equal(got, want)
        assert 2 < moved_first < number - 2
        assert steps.done and steps.step()
        for layer, table in zip((first, second), tables, strict=True):
            assert layer.group.table != table
        assert second.group.loads().sum() == 0
        for got, want in zip(bits(), wanted, strict=True):
            assert torch.equal(got, want)
    with pytest.raises(ValueError, match="model: expected a MoELayer whose group has num_log"):
        xd.Rebalance(torch.nn.Linear(1, 1), bytes_per_step=1)
