"""A process that takes the place of a rank that has ended, on torch tensors."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import crossdock.torch as xd
from crossdock.errors import InvalidArgument, PeerLost, Unsupported
from support import Rank, on_ranks

RANKS, TOKENS, HIDDEN = 2, 3, 8
SECONDS = 60  # for a wait


def make_group(comm: xd.Comm) -> xd.LowLatencyGroup:
    return xd.LowLatencyGroup(
        num_experts=RANKS,
        max_topk=RANKS,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype=torch.float32,
        on_peer_loss="mask",
        comm=comm,
    )


def one_step(group: xd.LowLatencyGroup, members: tuple[int, ...]) -> None:
    """Each token goes to the expert of each member, which gives it back."""
    x = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).reshape(TOKENS, HIDDEN)
    ids = torch.tensor([[r if r in members else -1 for r in range(RANKS)]] * TOKENS)
    slots = xd.ll_dispatch(group, x, ids)
    out = xd.ll_combine(slots.plan, slots.tokens, torch.ones(TOKENS, RANKS))
    assert torch.equal(out, len(members) * x)


def follow(group: xd.LowLatencyGroup, view) -> None:
    for other in {0, 1} - {group.comm.rank}:
        group.mask_set(other, other not in view.members)
    group.reset()


def eventually(found: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@on_ranks(3, loses=1, fresh=True)  # other tests keep their processes
def test_the_place_of_a_killed_rank_is_taken(me: Rank, tmp_path: pathlib.Path) -> None:
    """Ranks 0 and 1 begin, 1 is killed, and the third process takes its place."""
    invitation = tmp_path / "invitation"
    if me.rank == 2:
        eventually(invitation.exists)
        with pytest.raises(InvalidArgument, match="rank 0"):
            xd.join(invitation.read_bytes(), rank=0, timeout=SECONDS)
        with xd.join(invitation.read_bytes(), timeout=SECONDS) as comm, torch.no_grad():
            assert (comm.rank, comm.num_ranks, comm.view.members) == (1, 2, (1,))
            assert (comm.device, comm.process_group) == (torch.device("cpu"), None)
            assert xd.default_comm() is comm
            group = make_group(comm)
            one_step(group, (1,))  # alone
            view = comm.agree(timeout=SECONDS)
            assert (view.members, view.last_step) == ((0, 1), 7)
            follow(group, view)
            assert comm.mesh is None
            for refused in (
                comm.barrier,
                lambda: comm.reserve(4096),
                lambda: xd.EpGroup(
                    num_experts=2, max_topk=1, max_tokens_per_rank=1, hidden=8, comm=comm
                ),
            ):
                with pytest.raises(Unsupported):
                    refused()
            one_step(group, (0, 1))
        return
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="2"),
        xd.init(on_peer_loss="mask", elastic=True) as comm,
        torch.no_grad(),
    ):
        group = make_group(comm)
        one_step(group, (0, 1))
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as lost:  # no other rank needs this one's combine
            eventually(lambda: one_step(group, (0, 1)))
        assert lost.value.peer == 1 and not lost.value.fatal
        view = comm.agree(timeout=SECONDS)
        assert (view.members, view.gone) == ((0,), (1,))
        follow(group, view)
        partial = tmp_path / "partial"
        partial.write_bytes(comm.invite())
        partial.rename(invitation)

        def has_joined() -> bool:
            one_step(group, (0,))
            nonlocal view
            view = comm.agree(step=7, timeout=SECONDS)
            return view.joined == (1,)

        eventually(has_joined)
        follow(group, view)
        one_step(group, (0, 1))


@on_ranks(2)
def test_only_an_elastic_communicator_invites(me: Rank) -> None:
    with (
        xd.init(on_peer_loss="mask") as comm,
        pytest.raises(InvalidArgument, match="elastic"),
    ):
        comm.invite()
    with pytest.raises(TypeError, match="elastic: expected a bool, got 1"):
        xd.init(elastic=1)
