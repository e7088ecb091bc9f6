"""Failures arrive as exception classes that say what, where and who, on every rank."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

import crossdock
import support
from crossdock import _core, errors, launch
from support import Rank

CONFIG = crossdock.EpConfig(
    num_experts=4, max_topk=2, max_tokens_per_rank=4, hidden=8, dtype="float32"
)
IDS = np.array([[0, 1], [2, 3]])


def raises(
    kind: type[crossdock.CrossdockError], call: Callable[[], object]
) -> crossdock.CrossdockError:
    """The exception of exactly `kind` that the call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def still_usable(group: crossdock.EpGroup, rank: int) -> None:
    tokens = np.full((2, 8), rank + 1, np.float32)
    plan = group.prepare(IDS)
    received = group.dispatch(plan, tokens)
    assert np.array_equal(group.combine(plan, received.tokens), tokens * 2)


def bad_arguments(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        plan = group.prepare(IDS)
        tokens = np.ones((2, 8), np.float32)
        mistakes = [
            (
                TypeError,
                r"tokens: expected a NumPy array, got list",
                lambda: group.dispatch(plan, tokens.tolist()),
            ),
            (
                TypeError,
                r"tokens: expected a dtype of float32, float16, bfloat16, float8_e4m3fn, "
                r"float8_e5m2, int8, uint8, got float64",
                lambda: group.dispatch(plan, tokens.astype(np.float64)),
            ),
            (
                TypeError,
                r"topk_weights: expected a dtype of float32, got float16",
                lambda: group.dispatch(plan, tokens, np.ones((2, 2), np.float16)),
            ),
            (
                ValueError,
                r"scales: expected at most max_scale_bytes = 0 bytes .*, got 4",
                lambda: group.dispatch(plan, tokens, scales=np.ones((2, 1), np.float32)),
            ),
            (
                ValueError,
                r"tokens: expected a C-contiguous array, got strides \(4, 8\)",
                lambda: group.dispatch(plan, np.ones((8, 2), np.float32).T),
            ),
            (
                crossdock.InvalidArgument,
                r"tokens: has 3 rows, expected 2",
                lambda: group.dispatch(plan, np.ones((3, 8), np.float32)),
            ),
        ]
        for kind, text, call in mistakes:
            if me.rank == 1:
                with pytest.raises(kind, match=rf"dispatch: {text}.*\[rank 1 of 2\]$"):
                    call()
            else:
                start = time.monotonic()
                error = raises(crossdock.Mismatch, lambda: group.dispatch(plan, tokens))
                assert time.monotonic() - start < 5, "the peer was told late"
                assert (error.peer, error.rank, error.operation) == (1, 0, "dispatch")
                assert not error.fatal and "rank 1" in error.text
                assert group.status().status == "XD_SUCCESS"  # the call has raised it
            still_usable(group, me.rank)


def test_bad_argument_is_named_and_peers_are_told_at_once() -> None:
    support.run_ranks(2, bad_arguments)


def arguments_of_other_kinds(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        good = group.prepare(IDS)
        wrong = me.rank == 1
        plan = None if wrong else good
        tokens, rows = np.ones((2, 8), np.float32), np.ones((good.recv_rows, 8), np.float32)
        received, out = crossdock.Dispatched(rows, None, None, None), np.ones((2, 8), np.float32)
        of_bytes = dataclasses.replace(good, data=bytes(8)) if wrong else good
        calls = [
            ("plan: expected a Plan, got NoneType", lambda: group.dispatch(plan, tokens)),
            (
                "plan: expected a Plan, got NoneType",
                lambda: group.dispatch(plan, tokens, out=received),
            ),
            ("plan: expected a Plan, got NoneType", lambda: group.combine(plan, rows)),
            ("plan: expected a Plan, got NoneType", lambda: group.combine(plan, rows, out=out)),
            ("plan: expected a Plan, got NoneType", lambda: group.dispatch_bwd(plan, rows)),
            ("plan: expected a Plan, got NoneType", lambda: group.combine_bwd(plan, tokens)),
            (
                "plan.data: expected a NumPy array, got bytes",
                lambda: group.combine(of_bytes, rows, out=out),
            ),
            (
                "out: expected a Plan, got tuple",
                lambda: group.prepare(IDS, out=(1,) if wrong else None),
            ),
            (
                "out: expected a Dispatched, got tuple",
                lambda: group.dispatch(good, tokens, out=(1,) if wrong else None),
            ),
            (
                "out.data: expected a NumPy array, got bytes",
                lambda: group.prepare(IDS, out=of_bytes if wrong else None),
            ),
            ("str", lambda: group.prepare(IDS, alignment="1" if wrong else 0)),
        ]
        for text, call in calls:
            start = time.monotonic()
            if wrong:
                with pytest.raises(TypeError, match=text) as raised:
                    call()
                said = str(raised.value)
                assert re.fullmatch(
                    r"(prepare|dispatch|combine)(_bwd)?: .* \[rank 1 of 2\]", said, re.S
                )
            else:
                assert raises(crossdock.Mismatch, call).peer == 1
            assert time.monotonic() - start < 5, "the peer was told late"
            still_usable(group, me.rank)


def test_an_argument_of_another_kind_is_a_type_error_and_peers_are_told_at_once() -> None:
    support.run_ranks(2, arguments_of_other_kinds)


def test_a_status_names_its_operation() -> None:
    found = {"status": "XD_ERROR_MISMATCH", "operation": 1}
    assert errors.in_words(found)["operation"] == "dispatch"
    assert errors.in_words(found | {"operation": 5})["operation"] == "ll_dispatch"


def configs_of_other_kinds(me: Rank) -> None:
    slots = dataclasses.replace(CONFIG, layout="expert_slots")
    of_text = dataclasses.replace(CONFIG, num_sms="a")
    mistakes = [
        (ValueError, "config.layout: expected", crossdock.EpGroup, slots, CONFIG),
        (TypeError, "config: expected an EpConfig, got NoneType", crossdock.EpGroup, None, CONFIG),
        (TypeError, "config: expected an EpConfig, got dict", crossdock.EpGroup, {}, CONFIG),
        (TypeError, "num_sms: expected an integer", crossdock.EpGroup, of_text, CONFIG),
        (ValueError, "config.layout: expected", crossdock.LowLatencyGroup, CONFIG, slots),
        (TypeError, "config: expected", crossdock.LowLatencyGroup, None, slots),
    ]
    with me.comm() as comm:
        for kind, text, group, bad, good in mistakes:
            start = time.monotonic()
            if me.rank == 1:
                with pytest.raises(kind, match=text):
                    group(comm, bad)
            else:
                error = raises(crossdock.Mismatch, lambda: group(comm, good))
                assert "rank 1" in error.text and not error.fatal
            assert time.monotonic() - start < 5, "the peer was told late"
        with pytest.raises(TypeError, match="comm: expected a Comm, got NoneType"):
            crossdock.EpGroup(None, CONFIG)
        with crossdock.EpGroup(comm, CONFIG) as made:
            still_usable(made, me.rank)


def test_a_config_of_another_kind_is_refused_and_peers_are_told_at_once() -> None:
    support.run_ranks(2, configs_of_other_kinds)


def bad_ids(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        plan = group.empty_plan()
        ids = np.array([[0, 9], [1, 1]]) if me.rank == 1 else IDS
        error = raises(crossdock.InvalidArgument, lambda: group.prepare(ids, out=plan))
        assert (error.peer, error.operation, error.status) == (
            1,
            "prepare",
            "XD_ERROR_INVALID_ARGUMENT",
        )
        info = plan.info()
        assert (info["bad_ids"], info["bad_id_rank"]) == (2, 1)
        status = group.status()
        assert (status.status, status.operation, status.bad_ids) == ("XD_SUCCESS", None, 2)
        # Bad ids count as -1: the plan is complete.
        tokens = np.ones((2, 8), np.float32)
        out = group.combine(plan, group.dispatch(plan, tokens).tokens)
        assert out[:, 0].tolist() == ([1, 1] if me.rank == 1 else [2, 2])


def test_bad_ids_are_reported_on_every_rank_with_a_usable_plan() -> None:
    support.run_ranks(2, bad_ids)


def duplicates(me: Rank) -> None:
    config = dataclasses.replace(CONFIG, duplicate_ids="collapse")
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        plan = group.prepare(np.array([[1, 1], [0, 1]]))
        assert plan.info()["bad_ids"] == 0
        tokens = np.ones((2, 8), np.float32)
        out = group.combine(plan, group.dispatch(plan, tokens).tokens)
        assert out[:, 0].tolist() == [1, 2]
        raises(crossdock.InvalidArgument, lambda: group.prepare(np.array([[9, 9], [0, 1]])))
        assert group.status().bad_ids == 4


def test_repeated_ids_collapse_where_the_group_says_so() -> None:
    support.run_ranks(2, duplicates)


def fatal(me: Rank) -> None:
    config = dataclasses.replace(CONFIG, on_error="fatal")
    comm = me.comm()
    with crossdock.EpGroup(comm, config) as group:
        group.prepare(IDS)
        error = raises(crossdock.InvalidArgument, lambda: group.prepare(np.array([[0, 9], [1, 0]])))
        assert error.fatal and (error.operation, error.group) == ("prepare", 0)
        for call in (comm.barrier, lambda: group.prepare(IDS)):
            again = raises(crossdock.InvalidArgument, call)
            assert again.fatal and "expert ids" in again.text, again.text
        assert type(comm.error()) is crossdock.InvalidArgument
    comm.close()


def test_an_error_is_fatal_where_the_group_says_so() -> None:
    support.run_ranks(2, fatal)


def overflow(me: Rank) -> None:
    config = crossdock.EpConfig(
        num_experts=2, max_topk=1, max_tokens_per_rank=4, hidden=8, dtype="float32", recv_capacity=4
    )
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        error = raises(crossdock.CapacityOverflow, lambda: group.prepare(np.ones((4, 1), np.int64)))
        assert (error.peer, error.status) == (1, "XD_ERROR_OVERFLOW")
        assert (error.needed_rows, error.capacity_rows) == (8, 4)
        status = group.status()
        assert (status.status, status.needed_rows) == ("XD_SUCCESS", 0)
        assert group.errors() == 1
        group.prepare(np.full((4, 1), me.rank))


def test_overflow_is_raised_on_every_rank() -> None:
    support.run_ranks(2, overflow)


def late_peer(me: Rank) -> None:
    comm = me.comm(timeout=0.5)
    group = crossdock.EpGroup(comm, CONFIG)
    if me.rank == 0:
        error = raises(crossdock.Timeout, lambda: group.prepare(IDS))
        assert isinstance(error, TimeoutError) and error.fatal
        assert (error.peer, error.operation, error.group) == (1, "prepare", 0)
        assert error.phase in ("entry", "counts")
        assert (error.expected_epoch, error.seen_epoch) == (1, 0)
        found = comm.error()
        assert type(found) is crossdock.Timeout and found.peer == 1
        raises(crossdock.Timeout, comm.barrier)
    else:
        time.sleep(1.5)
    comm.close()


def test_timeout_says_who_was_waited_for_and_where() -> None:
    support.run_ranks(2, late_peer)


def killed_peer(me: Rank) -> None:
    comm = me.comm()
    group = crossdock.EpGroup(comm, CONFIG)
    group.prepare(IDS)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = raises(crossdock.PeerLost, lambda: group.prepare(IDS))
    assert time.monotonic() - start < 5
    assert isinstance(error, ConnectionError) and error.fatal
    assert (error.peer, error.rank, error.operation) == (1, me.rank, "prepare")
    comm.close()


def test_killed_peer_is_named_on_all_others() -> None:
    with pytest.raises(launch.RankFailed) as caught:
        support.run_ranks(4, killed_peer, fresh=True)
    assert str(caught.value) == "rank 1: ended by SIGKILL (is memory short?)"


def leaving_peer(me: Rank) -> None:
    comm = me.comm()
    if me.rank == 1:
        comm.close()
        return
    error = raises(crossdock.PeerLost, comm.barrier)
    assert error.peer == 1 and "left" in error.text


def test_peer_that_left_is_named() -> None:
    support.run_ranks(2, leaving_peer)


def aborting(me: Rank) -> None:
    comm = me.comm()
    if me.rank == 1:
        comm.abort()
    error = raises(crossdock.Aborted, comm.barrier)
    assert error.peer == 1
    comm.close()


def test_abort_releases_every_rank() -> None:
    support.run_ranks(2, aborting)


def different_configs(me: Rank) -> None:
    with me.comm() as comm:
        config = crossdock.EpConfig(
            num_experts=4,
            max_topk=2,
            max_tokens_per_rank=4,
            hidden=8 + 8 * me.rank,
            dtype="float32",
        )
        error = raises(crossdock.Mismatch, lambda: crossdock.EpGroup(comm, config))
        assert "hidden" in error.text or "row" in error.text
        crossdock.EpGroup(comm, CONFIG).close()


def different_placements(me: Rank) -> None:
    with me.comm() as comm:
        placed = dataclasses.replace(CONFIG, expert_ranks=(me.rank,) * CONFIG.num_experts)
        error = raises(crossdock.Mismatch, lambda: crossdock.EpGroup(comm, placed))
        assert "expert_ranks" in error.text
        bad = (0,) * (CONFIG.num_experts - 1) + (2 if me.rank == 0 else 0,)
        placed = dataclasses.replace(CONFIG, expert_ranks=bad)
        kind = crossdock.InvalidArgument if me.rank == 0 else crossdock.Mismatch
        error = raises(kind, lambda: crossdock.EpGroup(comm, placed))
        assert (f"expert_ranks[{CONFIG.num_experts - 1}] = 2" if me.rank == 0 else "rank 0") in (
            error.text
        )
        crossdock.EpGroup(comm, CONFIG).close()


def test_placements_that_differ_are_a_mismatch() -> None:
    support.run_ranks(2, different_placements)


def test_configs_that_differ_are_a_mismatch() -> None:
    support.run_ranks(2, different_configs)


ALONE = {"rank": 0, "num_ranks": 1}
KINDS_OF_COMM = [
    ({"rank": "0"}, TypeError, "rank: expected a whole number, got '0'"),
    ({"rank": 1 << 40}, ValueError, "rank: expected a number of 32 bits, got 1099511627776"),
    ({"num_ranks": 1.5}, TypeError, "num_ranks: expected a whole number, got 1.5"),
    ({"name": None}, TypeError, "name: expected a str, got None"),
    ({"timeout": "9"}, TypeError, "timeout: expected seconds or None, got '9'"),
    ({"device": 3}, TypeError, "device: expected a str, got 3"),
]


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (
            lambda: crossdock.EpConfig(
                num_experts=4, max_topk=2, max_tokens_per_rank=4, hidden=8, dtype="float64"
            ),
            TypeError,
            "dtype: .*float64",
        ),
        (
            lambda: crossdock.EpConfig(
                num_experts=4, max_topk=2, max_tokens_per_rank=4, hidden=8, layout="expert"
            ),
            ValueError,
            "layout: expected 'expert_major' or 'rank_major' or 'expert_slots', got 'expert'",
        ),
        (
            lambda: crossdock.EpConfig(
                num_experts=3, max_topk=2, max_tokens_per_rank=4, hidden=8, expert_ranks=[0, 1]
            ),
            ValueError,
            "expert_ranks: expected the ranks of num_experts = 3 experts, got 2",
        ),
        (
            lambda: crossdock.EpConfig(
                num_experts=1, max_topk=2, max_tokens_per_rank=4, hidden=8, expert_ranks=["0"]
            ),
            TypeError,
            r"expert_ranks: expected a rank for each expert, got \['0'\]",
        ),
        (
            lambda: _core.recv_bound(num_ranks=2, num_experts=3, expert_ranks=[0, 1]),
            ValueError,
            "expert_ranks: expected the ranks of num_experts = 3 experts, got 2",
        ),
        (
            lambda: crossdock.EpConfig(
                num_experts=3, max_topk=2, max_tokens_per_rank=4, hidden=8
            ).recv_bound(2),
            crossdock.InvalidArgument,
            "num_experts = 3, expected a multiple of num_ranks = 2",
        ),
        *(
            (lambda wrong=wrong: crossdock.Comm(bytes(128), **{**ALONE, **wrong}), kind, text)
            for wrong, kind, text in KINDS_OF_COMM
        ),
        (
            lambda: crossdock.Comm(bytes(5), rank=0, num_ranks=1),
            TypeError,
            "unique_id: expected 128",
        ),
        (
            lambda: crossdock.Comm(bytes(128), rank=0, num_ranks=1, device="gpu"),
            ValueError,
            "device: expected 'cpu'",
        ),
        (
            lambda: crossdock.Comm(bytes(128), rank=0, num_ranks=1, timeout=-1),
            ValueError,
            "timeout: expected seconds above 0",
        ),
        (
            lambda: crossdock.Comm(bytes(128), rank=2, num_ranks=2),
            crossdock.InvalidArgument,
            "rank = 2",
        ),
        (lambda: crossdock.feature_available("gpu"), ValueError, "feature: expected 'cpu'"),
    ],
)
def test_mistakes_without_peers_are_named(
    make: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.skipif(crossdock.feature_available("cuda"), reason="CUDA is available")
def test_absent_executor_is_unsupported_and_says_why() -> None:
    with pytest.raises(crossdock.Unsupported) as caught:
        crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1, device="cuda:0")
    assert crossdock.feature_reason("cuda") in str(caught.value)


def test_errors_cross_processes_with_their_attributes() -> None:
    error = crossdock.Timeout(
        "waited",
        status="XD_ERROR_TIMEOUT",
        rank=1,
        peer=2,
        phase="rows",
        group=3,
        operation="dispatch",
        expected_epoch=7,
        seen_epoch=6,
        fatal=True,
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is crossdock.Timeout
    assert str(copy) == "waited" and vars(copy) == vars(error)


def test_every_status_has_its_class() -> None:
    built_in = {
        "InvalidArgument": ValueError,
        "Timeout": TimeoutError,
        "PeerLost": ConnectionError,
        "OutOfMemory": MemoryError,
    }
    for name in crossdock.errors.__all__:
        kind = getattr(crossdock.errors, name)
        assert issubclass(kind, crossdock.CrossdockError) and getattr(crossdock, name) is kind
        assert issubclass(kind, built_in.get(name, RuntimeError))
