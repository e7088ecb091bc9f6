"""Training steps on torch tensors that outlive the loss of a rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, Mismatch, PeerLost
from support import Rank, on_ranks

RANKS, TOKENS, HIDDEN, TOPK = 3, 5, 8, 2
EXPERTS = 2 * RANKS
DIES, STEPS = 1, 6


def make_group(comm: xd.Comm, on_peer_loss: str = "resume", **options) -> xd.EpGroup:
    sizes = {"num_experts": EXPERTS, "max_topk": TOPK, "max_tokens_per_rank": TOKENS}
    return xd.EpGroup(
        **sizes, hidden=HIDDEN, dtype=torch.float32, on_peer_loss=on_peer_loss, comm=comm, **options
    )


def one_step(group: xd.EpGroup, step: int, dies_in: str | None) -> None:
    """Expert e multiplies by e + 1; sums and gradients are exact."""
    rank = group.comm.rank
    random = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOPK] for _ in range(TOKENS)])
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=random).float().requires_grad_()
    weights = torch.ones(TOKENS, TOPK)
    die_if(dies_in == "forward")
    plan = group.prepare(ids)
    received = xd.dispatch(plan, x, weights)
    factors = torch.zeros(len(received.tokens), 1)
    for local in range(EXPERTS // RANKS):
        begin, end = plan.offsets[local : local + 2].tolist()
        factors[begin:end] = rank * EXPERTS // RANKS + local + 1
    out = xd.combine(plan, received.tokens * factors, received.weights)
    die_if(dies_in == "backward")
    out.sum().backward()
    members = torch.tensor(group.comm.view.members)
    there = torch.isin(ids * RANKS // EXPERTS, members)
    expected = ((ids + 1) * there).sum(dim=1, keepdim=True).float()
    assert torch.equal(out, x.detach() * expected)
    assert torch.equal(x.grad, expected.expand(TOKENS, HIDDEN))
    assert group.status()["unplaced_choices"] == int((~there).sum())


def die_if(condition: bool) -> None:
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dies_in", ["forward", "backward"])
@on_ranks(RANKS, loses=DIES, fresh=True)  # other tests keep their processes
def test_steps_go_on_without_a_killed_rank(me: Rank, dies_in: str) -> None:
    with xd.init(on_peer_loss="mask") as comm:
        group = make_group(comm)
        step = 0
        while step < STEPS:
            dies = me.rank == DIES and step == 2
            try:
                one_step(group, step, dies_in if dies else None)
                step += 1
            except PeerLost as lost:
                assert (step, lost.fatal, lost.peer) == (2, False, DIES)
                view = comm.agree(step=step, ok=False, timeout=60)
                assert (view.members, view.first_step, view.last_step) == ((0, 2), 2, 2)
                group.enter_view()
        assert comm.view.members == (0, 2)


@on_ranks(RANKS, loses=DIES, fresh=True)
def test_weights_stay_where_a_loss_breaks_the_turn_of_one_of_several_groups(me: Rank) -> None:
    old, new = [[0, 1], [2, 3], [4, 5]], [[4, 1], [0, 3], [2, 5]]
    with xd.init(device="cpu", on_peer_loss="mask", heap_bytes=1 << 20) as comm:
        sizes = {"num_experts": EXPERTS, "max_topk": TOPK, "max_tokens_per_rank": TOKENS}
        sizes |= {"hidden": HIDDEN, "dtype": torch.float32, "num_logical_experts": EXPERTS}
        few = xd.LowLatencyGroup(**sizes, on_peer_loss="mask", comm=comm)
        first, second = (make_group(comm, num_logical_experts=EXPERTS) for _ in range(2))
        groups = (first, few, second)
        weights = comm.empty_symmetric((2, HIDDEN), torch.float32)
        weights.copy_(torch.tensor(old[me.rank])[:, None])
        if me.rank == DIES:  # the others have had the turns of the first two groups then
            second.set_placement = lambda *_, **__: die_if(True)
        with pytest.raises(PeerLost) as lost:
            xd.move_experts(groups, [weights], old, new)
        assert not lost.value.fatal
        assert [group.placement.tolist() for group in groups] == [new, old, old]
        assert weights[:, 0].tolist() == old[me.rank]
        assert comm.agree(timeout=60).members == (0, 2)
        for group in (first, second):
            group.enter_view()
        few.mask_set(DIES, True)
        few.reset()
        for group in groups:
            group.set_placement(old)
        assert [group.placement.tolist() for group in groups] == [old] * 3


@on_ranks(2)
def test_groups_resume_only_where_it_was_asked_for(me: Rank) -> None:
    with xd.init(on_peer_loss="mask") as comm:
        with pytest.raises(InvalidArgument, match="XD_EP_PEER_LOSS_RESUME"):
            make_group(comm, "fatal").enter_view()
        if me.rank == 0:
            with pytest.raises(ValueError, match="expected 'fatal' or 'resume', got 'mask'"):
                make_group(comm, "mask")
        else:
            with pytest.raises(Mismatch):
                make_group(comm)
    with xd.init() as comm, pytest.raises(InvalidArgument, match="expected MASK"):
        make_group(comm)
