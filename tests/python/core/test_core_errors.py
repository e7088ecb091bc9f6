"""Failures arrive as exception classes that say what, where and who, on every rank."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

import crossdock
import support
from core_support import config_of, low_latency_config_of, peers_are_told, raises, rows_of
from crossdock import _core, errors, launch
from support import Rank, on_ranks

CONFIG = config_of()
IDS = np.array([[0, 1], [2, 3]])


def still_usable(group: crossdock.EpGroup, rank: int) -> None:
    tokens = np.full((2, 8), rank + 1, np.float32)
    plan = group.prepare(IDS)
    received = group.dispatch(plan, tokens)
    assert np.array_equal(group.combine(plan, received.tokens), tokens * 2)


def swapped(array: np.ndarray) -> np.ndarray:
    """The same numbers in the other byte order."""
    return array.astype(array.dtype.newbyteorder("S"))


@on_ranks(2)
def test_a_mistake_found_in_python_is_named_and_peers_are_told_at_once(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        plan = group.prepare(IDS)
        of_bytes = dataclasses.replace(plan, data=bytes(8))
        tokens, rows = np.ones((2, 8), np.float32), np.ones((plan.recv_rows, 8), np.float32)
        received = crossdock.Dispatched(rows, None, None, None)
        right = {
            "prepare": {"topk_idx": IDS},
            "dispatch": {"plan": plan, "tokens": tokens},
            "combine": {"plan": plan, "expert_out": rows},
            "dispatch_bwd": {"plan": plan, "grad_recv_tokens": rows},
            "combine_bwd": {"plan": plan, "grad_out": tokens},
        }
        half, byte = np.ones((2, 2), np.float16), np.ones((2, 1), np.float32)
        dtypes = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, got float64"
        no_plan, none = {"plan": None}, "plan: expected a Plan, got NoneType"
        no_array = "expected a NumPy array, got"
        table = {
            TypeError: [
                ("dispatch", {"tokens": tokens.tolist()}, f"tokens: {no_array} list"),
                ("dispatch", {"tokens": tokens * np.float64(1)}, f"tokens: .* dtype of {dtypes}"),
                ("dispatch", {"topk_weights": half}, "topk_weights: .* of float32, got float16"),
                *(
                    (operation, {name: swapped(good)}, f"{name}: .* machine's byte order, got '>")
                    for operation, arguments in right.items()
                    for name, good in arguments.items()
                    if isinstance(good, np.ndarray)
                ),
                ("combine", {"out": swapped(tokens)}, "out: .* byte order, got '>f4'"),
                ("dispatch", {"tokens": np.ma.array(tokens)}, "tokens: .* without a mask"),
                *((operation, no_plan, none) for operation in right if operation != "prepare"),
                ("dispatch", no_plan | {"out": received}, none),
                ("combine", no_plan | {"out": tokens}, none),
                ("combine", {"plan": of_bytes, "out": tokens}, f"plan.data: {no_array} bytes"),
                ("prepare", {"out": (1,)}, "out: expected a Plan, got tuple"),
                ("dispatch", {"out": (1,)}, "out: expected a Dispatched, got tuple"),
                ("prepare", {"out": of_bytes}, f"out.data: {no_array} bytes"),
                ("prepare", {"alignment": "1"}, "alignment: expected an integer, got str '1'"),
            ],
            ValueError: [
                ("dispatch", {"scales": byte}, "scales: .* max_scale_bytes = 0 bytes .*, got 4"),
                (
                    "dispatch",
                    {"tokens": np.ones((8, 2), np.float32).T},
                    r"tokens: expected a C-contiguous array, got strides \(4, 8\)",
                ),
            ],
            crossdock.InvalidArgument: [
                ("dispatch", {"tokens": np.ones((3, 8), np.float32)}, "tokens: has 3 rows, exp.* 2")
            ],
        }
        for kind, operation, wrong, text in rows_of(table):
            call = functools.partial(getattr(group, operation), **right[operation])
            said = rf"(?s)^(xd_ep_)?{operation}: {text}.*\[rank 1 of 2\]$"
            error = peers_are_told(me, kind, said, functools.partial(call, **wrong), call)
            if error:
                assert (error.peer, error.rank, error.operation) == (1, 0, operation)
                assert group.status().status == "XD_SUCCESS"  # the call has raised it
            still_usable(group, me.rank)


@on_ranks(2)
def test_numbers_that_are_no_integers_are_named_and_peers_are_told_at_once(me: Rank) -> None:
    with me.comm() as comm, crossdock.EpGroup(comm, CONFIG) as group:
        tokens, prepare = np.ones((2, 8), np.float32), functools.partial(group.prepare, IDS)
        dispatch = functools.partial(group.dispatch, group.prepare(IDS), tokens)
        for wrong, got in ((True, "bool True"), (np.bool_(True), "bool"), (1.0, "float 1.0")):
            for call, name in ((prepare, "parts"), (prepare, "alignment"), (dispatch, "part")):
                text = f"{name}: expected an integer, got {got}"
                peers_are_told(me, TypeError, text, functools.partial(call, **{name: wrong}), call)
                still_usable(group, me.rank)


@on_ranks(2)
def test_configs_that_are_wrong_or_differ_are_refused_and_peers_are_told_at_once(me: Rank) -> None:
    Group, LowLatency, Context = crossdock.EpGroup, crossdock.LowLatencyGroup, crossdock.GemmContext
    slots, no_rank = low_latency_config_of(), config_of(expert_ranks=(0, 0, 0, 2))

    def product(**options: int) -> crossdock.GemmConfig:
        return crossdock.GemmConfig(**{"max_tokens": 1, "max_k": 8, "max_n": 8} | options)

    good = {Group: CONFIG, LowLatency: slots, Context: product()}
    with me.comm() as comm:
        for group, wrong, kind, text in [
            (Group, slots, TypeError, "config: expected an EpConfig, got LowLatencyConfig"),
            (Group, None, TypeError, "config: expected an EpConfig, got NoneType"),
            (Group, {}, TypeError, "config: expected an EpConfig, got dict"),
            (Group, config_of(num_sms="a"), TypeError, "num_sms: expected an integer"),
            (Group, no_rank, crossdock.InvalidArgument, r"expert_ranks\[3\] = 2"),
            (LowLatency, CONFIG, TypeError, "config: expected a LowLatencyConfig, got EpConfig"),
            (
                LowLatency,
                low_latency_config_of(max_tokens_per_rank=1025),
                crossdock.InvalidArgument,
                "1 to 1024",
            ),
            (Context, {}, TypeError, "config: expected a GemmConfig, got dict"),
            (Context, product(max_tokens=0), crossdock.InvalidArgument, "max_tokens = 0, expected"),
        ]:
            make = functools.partial(group, comm)
            right = functools.partial(make, good[group])
            peers_are_told(me, kind, text, functools.partial(make, wrong), right)
        for group, own, text in [
            (Group, config_of(hidden=8 + 8 * me.rank), "hidden|row"),
            (LowLatency, low_latency_config_of(in_flight=2 + me.rank), "in_flight"),
            (Group, config_of(expert_ranks=(me.rank,) * 4), "expert_ranks"),
            (Context, product(max_n=8 + me.rank), "max_n"),
        ]:
            with pytest.raises(crossdock.Mismatch, match=text):
                group(comm, own)
        with pytest.raises(TypeError, match="comm: expected a Comm, got NoneType"):
            Group(None, CONFIG)
        with Group(comm, CONFIG) as made:
            still_usable(made, me.rank)
        context = Context(comm, good[Context])
        assert context.comm is comm and context.config is good[Context]
        context.close()
        with pytest.raises(crossdock.InvalidArgument, match="this context has been closed"):
            context.wait()


def test_a_status_names_its_operation() -> None:
    found = {"status": "XD_ERROR_MISMATCH", "operation": 1}
    assert errors.in_words(found)["operation"] == "dispatch"
    assert errors.in_words(found | {"operation": 5})["operation"] == "ll_dispatch"
    numbers = _core.constants.GEMM_OPERATIONS
    assert errors.in_words(found | {"operation": numbers["bulk"]})["operation"] == "gemm_bulk"
    assert errors.operation_word(max(numbers.values()) + 1) is None


@on_ranks(2)
def test_bad_ids_are_reported_on_every_rank_with_a_usable_plan(me: Rank) -> None:
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


@on_ranks(2)
def test_repeated_ids_collapse_where_the_group_says_so(me: Rank) -> None:
    config = dataclasses.replace(CONFIG, duplicate_ids="collapse")
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        plan = group.prepare(np.array([[1, 1], [0, 1]]))
        assert plan.info()["bad_ids"] == 0
        tokens = np.ones((2, 8), np.float32)
        out = group.combine(plan, group.dispatch(plan, tokens).tokens)
        assert out[:, 0].tolist() == [1, 2]
        raises(crossdock.InvalidArgument, lambda: group.prepare(np.array([[9, 9], [0, 1]])))
        assert group.status().bad_ids == 4


@on_ranks(2)
def test_an_error_is_fatal_where_the_group_says_so(me: Rank) -> None:
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


@on_ranks(2)
def test_overflow_is_raised_on_every_rank(me: Rank) -> None:
    config = config_of(num_experts=2, max_topk=1, recv_capacity=4)
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        error = raises(crossdock.CapacityOverflow, lambda: group.prepare(np.ones((4, 1), np.int64)))
        assert (error.peer, error.status) == (1, "XD_ERROR_OVERFLOW")
        assert (error.needed_rows, error.capacity_rows) == (8, 4)
        status = group.status()
        assert (status.status, status.needed_rows) == ("XD_SUCCESS", 0)
        assert group.errors() == 1
        group.prepare(np.full((4, 1), me.rank))


@on_ranks(2)
def test_timeout_says_who_was_waited_for_and_where(me: Rank) -> None:
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


@on_ranks(2)
def test_peer_that_left_is_named(me: Rank) -> None:
    comm = me.comm()
    if me.rank == 1:
        comm.close()
        return
    error = raises(crossdock.PeerLost, comm.barrier)
    assert error.peer == 1 and "left" in error.text


@on_ranks(2)
def test_abort_releases_every_rank(me: Rank) -> None:
    comm = me.comm()
    if me.rank == 1:
        comm.abort()
    error = raises(crossdock.Aborted, comm.barrier)
    assert error.peer == 1
    comm.close()


BYTES, NUL = "expected 1 to 63 bytes", "expected a text without NUL"
MISTAKES_OF_A_COMM = {
    TypeError: [
        ({"rank": "0"}, "rank: expected a whole number, got '0'"),
        ({"num_ranks": 1.5}, "num_ranks: expected a whole number, got 1.5"),
        ({"name": None}, "name: expected a str, got None"),
        ({"timeout": "9"}, "timeout: expected seconds or None, got '9'"),
        ({"device": 3}, "device: expected a str, got 3"),
        ({"host": 3}, "host: expected a str or None, got 3"),
        ({"silence_ms": 2.5}, "silence_ms: expected a whole number, got 2.5"),
        ({"net_interface": 3}, "net_interface: expected a str or None, got 3"),
    ],
    ValueError: [
        ({"rank": 1 << 40}, "rank: expected a number of 32 bits, got 1099511627776"),
        ({"device": "gpu"}, "device: expected 'cpu'"),
        ({"timeout": -1}, "timeout: expected seconds above 0"),
        ({"on_peer_loss": "no"}, "on_peer_loss: expected 'fatal' or 'mask', got 'no'"),
        ({"host": "a\0b"}, f"host: {NUL}"),
        ({"silence_ms": 1 << 40}, "silence_ms: expected a number of 32 bits"),
        ({"net_interface": "e\0"}, f"net_interface: {NUL}"),
    ],
    crossdock.InvalidArgument: [
        ({"rank": 2, "num_ranks": 2}, "rank = 2"),
        ({"host": "h" * 64}, BYTES),
        ({"host": ""}, BYTES),
        *(({"silence_ms": ms}, f"config.silence_ms = {ms}, expect") for ms in (1, 999, -2)),
    ],
}


@pytest.mark.parametrize("kind, options, text", rows_of(MISTAKES_OF_A_COMM))
def test_mistakes_in_arguments_of_a_communicator_are_named(
    kind: type[Exception], options: dict[str, object], text: str
) -> None:
    with pytest.raises(kind, match=text):
        crossdock.Comm(crossdock.unique_id(), **{"rank": 0, "num_ranks": 1} | options)


NOT_THREE = "expert_ranks: expected the ranks of num_experts = 3 experts, got 2"
LAYOUT = "layout: expected 'expert_major' or 'rank_major', got 'expert'"


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: config_of(dtype="float64"), TypeError, "dtype: .*float64"),
        (lambda: config_of(dtype=np.dtype(">f4")), TypeError, "dtype: .* byte order, got '>f4'"),
        (lambda: config_of(layout="expert"), ValueError, LAYOUT),
        (
            lambda: low_latency_config_of(on_peer_loss="skip"),
            ValueError,
            "on_peer_loss: expected 'fatal' or 'mask', got 'skip'",
        ),
        (lambda: config_of(num_experts=3, expert_ranks=[0, 1]), ValueError, NOT_THREE),
        (
            lambda: config_of(num_experts=1, expert_ranks=["0"]),
            TypeError,
            r"expert_ranks: expected a rank for each expert, got \['0'\]",
        ),
        (
            lambda: _core.recv_bound(num_ranks=2, num_experts=3, expert_ranks=[0, 1]),
            ValueError,
            NOT_THREE,
        ),
        (
            lambda: config_of(num_experts=3).recv_bound(2),
            crossdock.InvalidArgument,
            "num_experts = 3, expected a multiple of num_ranks = 2",
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
