"""Ranks of a Buffer on several hosts: what other files test on one, and what is only there.

The hosts are declared: ranks are processes of this machine that share no memory (spread.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
import low_latency_cases
import test_elastic
import test_errors
import test_handles
import test_life
from crossdock import launch
from crossdock.deep_ep import Buffer
from crossdock.errors import Mismatch, PeerLost, Unsupported
from deep_ep_reference import make_batch
from support import Rank, run_ranks

SEED = 90
SECONDS = 20  # much less than the timeout, which peers must not sit out


def run_case(me: Rank, names: tuple[str, ...]) -> None:
    with cases.buffer_of(me) as buffer:
        assert buffer.num_rdma_ranks == 2
        for name in names:
            getattr(cases, name)(buffer, SEED)


@pytest.mark.parametrize(
    "num_ranks, names",
    [
        (3, ("everything", "worst_case")),
        (4, ("everything", "by_rank_alone", "worst_case")),
        (4, ("repeated_ids", "slices", "fp8_pairs")),
        (3, ("plain_bytes", "outgrown")),
    ],
)
def test_modes_equal_the_reference_between_hosts(num_ranks: int, names: tuple[str, ...]) -> None:
    print(f"seed {SEED}")
    run_ranks(num_ranks, run_case, names, apart=True, timeout=120)


@pytest.mark.parametrize(
    "num_ranks, case",
    [
        (2, test_errors.err_in_dispatch),
        (2, test_errors.err_in_combine),
        (2, test_errors.disagree),
        (3, test_errors.choose_badly),
        (2, test_errors.have_no_room),
        (3, test_handles.replace_buffer),
        (2, test_handles.use_after_destroy),
        (3, test_life.end),
        (2, test_life.leave_early),
        (2, test_elastic.check_facts),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistakes_and_lives_are_those_of_one_host(
    num_ranks: int, case: Callable[[Rank], None]
) -> None:
    run_ranks(num_ranks, case, apart=True, timeout=120)


def test_weights_of_combine_on_some_ranks_only_are_told_to_all_hosts() -> None:
    for told in zip(*run_ranks(3, test_errors.weigh_differently, apart=True)):
        assert any(told) and not all(told)


def test_unequal_num_worst_tokens_are_told_to_all_hosts_at_once() -> None:
    results = run_ranks(3, test_errors.disagree_in_worst_tokens, apart=True, timeout=120)
    for texts in zip(*results):
        assert all("num_worst_tokens = " in text for text in texts), texts


def run_elastic(me: Rank) -> None:
    with cases.process_group(me):
        with test_elastic.elastic(me) as buffer:
            assert buffer.get_physical_domain_size() == (2, 2)
            assert buffer.get_logical_domain_size() == (1, me.num_ranks)
        test_elastic.check_compact(me, None, False)
        test_elastic.check_compact(me, False, True)
        test_elastic.check_expanded(me, 8, True, False)
        test_elastic.check_expanded(me, 8, False, True)


def test_elastic_buffers_work_between_hosts() -> None:
    run_ranks(4, run_elastic, apart=True, timeout=120)


def use_internode_names(me: Rank) -> None:
    with cases.buffer_of(me) as buffer:
        batch = make_batch(SEED, me.num_ranks)
        caller = cases.Caller(buffer, batch)
        x, *_, handle, _ = buffer.internode_dispatch(caller.x, **caller.layout(), **caller.topk())
        caller.check_rows(x)
        outputs = [batch.received(rank, batch.x) for rank in range(me.num_ranks)]
        combined, *_ = buffer.internode_combine(x, handle)
        cases.same("combined_x", combined, batch.combined(me.rank, outputs))


@pytest.mark.parametrize("apart", [False, True])
def test_internode_names_are_dispatch_and_combine(apart: bool) -> None:
    run_ranks(2, use_internode_names, apart=apart)


def count_agreements(me: Rank) -> None:
    """What the page says that agreements cost between hosts."""
    with cases.buffer_of(me) as buffer:
        exchange = buffer._live().exchange
        gather, rounds = exchange.all_gather, [0]

        def counted(row: bytes) -> list[bytes]:
            rounds[0] += 1
            return gather(row)

        exchange.all_gather = counted  # type: ignore[method-assign]

        def cost(call: Callable[..., Any], *arguments: Any, **options: Any) -> int:
            rounds[0] = 0
            call(*arguments, **options)
            return rounds[0]

        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        handle = caller.dispatch_checked()
        assert cost(caller.dispatch, **caller.topk()) == 1
        assert cost(caller.dispatch, **caller.topk(), num_worst_tokens=17 * me.num_ranks) == 1
        assert cost(caller.dispatch, **caller.topk(), num_worst_tokens=17 * me.num_ranks) == 1
        assert cost(caller.dispatch) == 2  # with the counts per expert
        assert cost(caller.cached_checked, handle) == 0
        assert cost(caller.combine_checked, handle, SEED, 2, weights=3) == 1


def test_agreements_between_hosts_cost_what_the_page_says() -> None:
    run_ranks(2, count_agreements, apart=True)


# ---- Making one ----------------------------------------------------------------------------------


def run_low_latency(me: Rank) -> None:
    with low_latency_cases.low_latency_buffer(me) as buffer:
        for case in (low_latency_cases.plain, low_latency_cases.fp8, low_latency_cases.both_modes):
            case(buffer, SEED)


def test_low_latency_equals_the_reference_between_hosts() -> None:
    run_ranks(3, run_low_latency, apart=True, timeout=120)


def want_ranks_left_out(me: Rank) -> None:
    with cases.process_group(me):
        began = time.monotonic()
        text = (
            "enable_shrink = True, expected False, as the ranks are on several machines "
            rf"\({2 - me.rank // 2} of 3 on this one\).*\(rank {me.rank}\)"
        )
        with pytest.raises(Unsupported, match=text):
            Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
        assert time.monotonic() - began < SECONDS
        with cases.buffer_of(me) as buffer:
            with pytest.raises(ValueError, match="low_latency_mode: expected True"):
                buffer.clean_low_latency_buffer(1, 64, 4)
                buffer.low_latency_dispatch(torch.zeros(1, 64), torch.zeros(1, 1), 1, 4)
            cases.everything(buffer, SEED)


def test_leaving_out_ranks_between_machines_is_refused_by_the_constructor() -> None:
    run_ranks(3, want_ranks_left_out, apart=True)


def want_different_things(me: Rank) -> None:
    with cases.process_group(me):
        for options, text in (
            ({"low_latency_mode": me.rank == 1}, "low_latency_mode = False on rank 0 and True"),
            ({"num_rdma_bytes": me.rank // 2}, "num_rdma_bytes = 0 on rank 0 and 1"),
        ):
            began = time.monotonic()
            with pytest.raises(Mismatch, match=f"Buffer: {text} on rank [12]") as failed:
                Buffer(dist.group.WORLD, **options)
            assert (failed.value.rank, failed.value.peer) == (
                me.rank,
                1 if "low_latency_mode" in options else 2,
            )
            assert time.monotonic() - began < SECONDS
        with cases.buffer_of(me) as buffer:
            cases.everything(buffer, SEED)


def test_buffers_that_ranks_want_differently_are_refused_on_all_hosts() -> None:
    run_ranks(3, want_different_things, apart=True)


def count_puts(me: Rank, num_rdma_bytes: int) -> int:
    with cases.buffer_of(me, num_rdma_bytes=num_rdma_bytes) as buffer:
        caller = cases.Caller(buffer, make_batch(SEED, 2, tokens=[120, 120], hidden=4096))
        handle = caller.dispatch_checked()
        return handle.routing.lease.group.stats()["net_puts"]


def test_rdma_bytes_are_the_buffers_for_other_machines() -> None:
    """The rows for the other rank, of 8 KiB each, are more than 800 KiB."""
    puts = [
        run_ranks(2, count_puts, size, apart=True)
        for size in (1, 0, 1 << 30)  # pieces of 64, 256 and 512 KiB
    ]
    for few, usual, many in zip(*puts):
        assert few > usual + 8 and usual > many, puts


def err_in_tokens_per_host(me: Rank) -> None:
    with cases.buffer_of(me) as buffer:
        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        good = {"x": caller.x, **caller.layout(), **caller.topk()}
        three, floats = torch.zeros(3, dtype=torch.int32), torch.zeros(2)
        mistakes: test_errors.Mistakes = [
            ({"num_tokens_per_rdma_rank": three}, r"num_tokens_per_rdma_rank: .*\[2\] int32"),
            ({"num_tokens_per_rdma_rank": floats}, "num_tokens_per_rdma_rank: .*got .* float32"),
        ]
        test_errors.one_rank_errs(me, buffer.dispatch, good, mistakes)
        buffer.dispatch(**{**good, "num_tokens_per_rdma_rank": None})


def test_tokens_per_host_are_checked_where_there_are_several() -> None:
    run_ranks(2, err_in_tokens_per_host, apart=True)


# ---- Hosts that share memory, and the loss of one ------------------------------------------------


def name_hosts(me: Rank) -> None:
    os.environ["XD_HOST_ID"] = f"host {2 * me.rank // me.num_ranks}"
    with cases.buffer_of(me, low_latency_mode=True) as buffer:
        assert buffer.num_rdma_ranks == 2 and not buffer._live().hosts.apart
        cases.everything(buffer, SEED)
        cases.worst_case(buffer, SEED)


def test_ranks_of_one_machine_may_name_hosts() -> None:
    run_ranks(3, name_hosts, fresh=True)


def lose_a_rank(me: Rank) -> None:
    with cases.process_group(me):
        buffer = Buffer(dist.group.WORLD)
        caller = cases.Caller(buffer, make_batch(SEED, me.num_ranks))
        handle = caller.dispatch_checked()
        if me.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="rank 3") as lost:
            while True:
                caller.cached_checked(handle)
                caller.combine_checked(handle, SEED, weights=3)
        assert lost.value.peer == 3 and lost.value.fatal
        assert time.monotonic() - began < SECONDS
        for call in (caller.dispatch_checked, lambda: caller.combine_checked(handle, SEED)):
            with pytest.raises(PeerLost, match="rank 3"):
                call()


def test_a_rank_that_dies_is_told_to_all_hosts() -> None:
    with pytest.raises(launch.RankFailed) as caught:
        run_ranks(4, lose_a_rank, apart=True, fresh=True, timeout=120)
    assert [failure.rank for failure in caught.value.failures] == [3], caught.value
