"""The counters of groups, in this process and for others."""

from __future__ import annotations

import os

import numpy as np

import crossdock
from core_support import config_of
from crossdock import _stats
from support import Rank, on_ranks, run_ranks, run_threads

TOKENS, HIDDEN = 8, 16


CONFIG = config_of(max_tokens_per_rank=TOKENS, hidden=HIDDEN)


def _choices() -> np.ndarray:
    return np.tile(np.array([[0, 3]], np.int64), (TOKENS, 1))


def _steps(me: Rank) -> crossdock.GroupStats:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        assert group.stats().calls == {}
        for _ in range(3):
            plan = group.prepare(_choices())
            received = group.dispatch(plan, np.ones((TOKENS, HIDDEN), np.float32))
            group.combine(plan, received.tokens)
        return group.stats()


def test_stats_count_calls_tokens_and_rows():
    for rank, stats in enumerate(run_ranks(2, _steps)):
        assert stats.calls == {"prepare": 3, "dispatch": 3, "combine": 3}
        assert set(stats.call_ns) == set(stats.calls)
        assert stats.failed_calls == 0
        assert stats.tokens == 3 * 2 * TOKENS
        assert stats.token_bytes == stats.tokens * HIDDEN * 4
        assert stats.rows == 3 * 2 * 2 * TOKENS  # both ranks' tokens choose an expert of this one
        assert stats.row_bytes == stats.rows * HIDDEN * 4
        assert stats.wait_ns[rank] == 0


def _fails(me: Rank) -> crossdock.GroupStats:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        try:
            group.prepare(_choices() if me.rank else _choices().astype(np.float32))
        except (TypeError, ValueError, crossdock.Mismatch):
            pass
        return group.stats()


def test_a_mistake_that_python_finds_counts_as_a_failed_call_of_the_operation():
    for stats in run_ranks(2, _fails):
        assert stats.calls == {"prepare": 1}
        assert stats.failed_calls == 1


def _products(me: Rank) -> crossdock.GroupStats:
    config = crossdock.GemmConfig(max_tokens=TOKENS, max_k=32, max_n=32, dtype="float32")
    with me.comm() as comm, crossdock.GemmContext(comm, config) as context:
        context.all_gather(np.ones((TOKENS, 32), np.float32), np.ones((32, 32), np.float32))
        return context.stats()


def test_stats_of_a_context_have_its_operations():
    for stats in run_ranks(2, _products):
        assert stats.calls == {"all_gather": 1}


def _is_seen(me: Rank) -> None:
    name = f"rank {me.rank}: Fächer"
    with me.comm(name="seen") as comm, crossdock.EpGroup(comm, CONFIG) as group:
        group.set_name(name)
        assert os.getpid() in _stats.processes()
        group.prepare(_choices())
        seen = [one for one in _stats.seen_groups([os.getpid()]) if one.comm == "seen"]
        mine = next(one for one in seen if one.rank == me.rank)
        assert (mine.name, mine.device, mine.num_ranks) == (name, "cpu", 2)
        assert mine.operation is None and mine.waits_for is None
        assert mine.stats.calls == group.stats().calls
        comm.barrier()
    comm_names = [one.comm for one in _stats.seen_groups([os.getpid()]) if one.rank == me.rank]
    assert "seen" not in comm_names


def test_a_process_is_seen_with_the_names_of_its_groups_while_they_live():
    run_threads(2, _is_seen)
    run_ranks(2, _is_seen)


@on_ranks(1, fresh=True)
def test_a_fork_has_a_board_of_its_own(me: Rank) -> None:
    """A fork that makes a group of its own leaves its parent's numbers alone."""
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        group.set_name("parent")
        group.prepare(_choices())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1) as own:
                    with crossdock.EpGroup(own, CONFIG) as other:
                        other.set_name("child")
                        names = [one.name for one in _stats.seen_groups([os.getpid()])]
                        code = 0 if names == ["child"] else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [one.name for one in _stats.seen_groups([os.getpid()])] == ["parent"]
        assert group.stats().calls == {"prepare": 1}
