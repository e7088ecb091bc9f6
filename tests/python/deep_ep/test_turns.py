"""Turns and streams on a GPU, with stand-ins for group, streams and the ranks' agreement.

Each stand-in writes down what it is asked for; nothing runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from crossdock._core.constants import COMBINE, DISPATCH, PREPARE

from crossdock.deep_ep import (
    Buffer,
    ElasticBuffer,
    EventHandle,
    EventOverlap,
    _batch,
    _groups,
    _stream_work,
    elastic,
)
from crossdock.deep_ep._agreement import Request
from crossdock.deep_ep._arguments import Checks, Choices, Tokens
from crossdock.deep_ep._batch import Batch
from crossdock.deep_ep._combine import combine
from crossdock.deep_ep._dispatch import dispatch_new
from crossdock.deep_ep._groups import Groups
from crossdock.deep_ep._handle import Routing
from crossdock.deep_ep._low_latency import operate
from crossdock.deep_ep._memory import Wanted
from crossdock.deep_ep._session import HostNumbers
from crossdock.deep_ep._stream_work import StreamWork
from crossdock.errors import InvalidArgument, Mismatch

TOKENS, HIDDEN, TOPK, EXPERTS, RANKS = 3, 8, 2, 4, 2
STREAM, CALLER = 7, 0
FAILED = torch.full((EXPERTS,), -1, dtype=torch.int32).numpy().tobytes()

BAD = InvalidArgument("bad", status="XD_ERROR_INVALID_ARGUMENT")

Log = list[Any]


class Stream:
    """A stream that says that it waits for an event."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        self._log = log

    def wait_event(self, event: object) -> None:
        self._log.append(f"{self.name} waits for an event")


class Group:
    """A group whose calls succeed, or fail as `errors` says by name."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.errors: dict[str, Exception] = {}

    def _call(self, name: str) -> None:
        self._log.append(name)
        if name in self.errors:
            raise self.errors[name]

    def prepare(self, *_: Any) -> None:
        self._call("prepare")

    def dispatch(self, *_: Any) -> None:
        self._call("dispatch")

    def combine(self, *_: Any) -> None:
        self._call("combine")

    def join_failed(self, operation: int, text: str, stream: int) -> None:
        assert stream == STREAM
        self._log.append((operation, text))
        raise InvalidArgument(text, status="XD_ERROR_INVALID_ARGUMENT")


class Device:
    """One rank of a Buffer on a GPU.

    Args:
        log: what happens, in order.
        failures: what reading the group's state gives in turn; None once they are used up.
    """

    def __init__(self, log: Log, failures: list[Exception] | None = None) -> None:
        self.log = log
        self.failures, self.errors_at_once = failures or [], 1
        self.rank, self.num_ranks, self.device = 0, RANKS, torch.device("cpu")
        self.cuda, self.stream, self.raw_stream = True, Stream("scope", log), STREAM
        self.current_stream = lambda: CALLER
        self.wait_for_host_data = lambda: log.append("host waits")
        self.memory = self
        self.group = Group(log)
        self.batch: Any = Batch.__new__(Batch)
        vars(self.batch).update(
            group=self.group,
            plan_bytes=64,
            errors=0,
            failure=self.failure,
            session=self,
            sizes=SimpleNamespace(
                few=False, tokens=TOKENS, zones=0, row_bytes=2 * HIDDEN, num_sms=(1,) * RANKS
            ),
        )
        self.host = SimpleNamespace(all_gather=self.all_gather, rank=0)

    def failure(self) -> Exception | None:
        self.log.append("state read")
        self.batch.errors += self.errors_at_once if self.failures else 0
        return self.failures.pop(0) if self.failures else None

    def all_gather(self, row: bytes) -> list[bytes]:
        self.log.append(("gather", row))
        return [row] * RANKS

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def tensors(self, wanted: Sequence[Wanted]) -> list[torch.Tensor | None]:
        return [None if one is None else self.empty(*one) for one in wanted]

    def serve(self, handle: object) -> None:
        pass

    def order(self, first: int, second: int) -> None:
        names = {CALLER: "caller", STREAM: "scope"}
        self.log.append(f"{names[second]} waits for {names[first]}")

    def host_numbers(self, count: int) -> HostNumbers:
        return HostNumbers.of(*(torch.zeros(n, dtype=torch.int32) for n in (1, count)))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found: Log = []

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(_stream_work.torch.cuda, "stream", on)
    monkeypatch.setattr(
        _stream_work.torch.cuda, "current_stream", lambda _: Stream("caller", found)
    )
    monkeypatch.setattr(_batch, "is_capturing", lambda _: False)
    return found


def dispatch(
    device: Device,
    topk: bool = True,
    worst_tokens: int = 0,
    previous_event: EventOverlap | None = None,
    give_up: Callable[[bool], bool] | None = None,
) -> Any:
    topk_idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64) if topk else None
    choices = Choices(
        EXPERTS,
        topk_idx,
        torch.zeros(TOKENS, TOPK) if topk else None,
        torch.ones(EXPERTS, dtype=torch.int32),
        torch.ones(TOKENS, RANKS, dtype=torch.bool),
    )
    tokens = Tokens(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), None)
    events = previous_event, False
    return dispatch_new(device.batch, tokens, choices, 1, worst_tokens, events, give_up)


def session_of(log: Log) -> Any:
    return Device(log)


def turns(log: Log) -> Log:
    """The turns that peers take part in, and the points where the host waits."""
    order = [one for one in log if not isinstance(one, str) or not one.startswith(("on ", "scope"))]
    return [one for one in order if one != "caller waits for scope"]


def mismatch() -> Mismatch:
    return Mismatch("of earlier", status="XD_ERROR_MISMATCH")


def some_event() -> EventOverlap:
    event = EventHandle()
    event.event = SimpleNamespace()
    return EventOverlap(event)


READ = ["prepare", "host waits", "state read"]
END = ["host waits", "state read"]
COUNTS = torch.ones(EXPERTS, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize("topk", [True, False])
def test_rank_that_hears_of_an_earlier_failure_takes_its_turns(log: Log, topk: bool) -> None:
    """Without top-k, peers hear of it in the exchange of counts."""
    with pytest.raises(Mismatch, match="of earlier"):
        dispatch(Device(log, [mismatch()]), topk)
    exchange = [] if topk else [("gather", FAILED)]
    assert turns(log) == [*READ, *exchange, (DISPATCH, "of earlier"), *END]


def test_peers_of_a_rank_that_fails_without_topk_hear_it_in_the_exchange(log: Log) -> None:
    device = Device(log)
    device.host.all_gather = lambda row: [COUNTS, FAILED]
    with pytest.raises(Mismatch, match=r"dispatch: rank 1 failed \(rank 0\)") as found:
        dispatch(device, topk=False)
    assert found.value.peer == 1
    assert turns(log) == [*READ, (DISPATCH, str(found.value)), *END]


def test_rank_that_is_interrupted_takes_part_in_the_dispatch(log: Log) -> None:
    device = Device(log)

    def interrupt() -> None:
        raise KeyboardInterrupt("now")

    device.wait_for_host_data = interrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        dispatch(device)
    assert turns(log) == ["prepare", (DISPATCH, "now")]


@pytest.mark.parametrize(
    "operation, worst_tokens, expected",
    [
        # A mistake that the call finds is not told again.
        ("dispatch", 0, [*READ, "dispatch", *END]),
        # The host does not wait for a failure that peers hear of later.
        ("prepare", 8, ["prepare", (DISPATCH, "bad")]),
    ],
)
def test_mistake_that_a_call_finds_is_told_once(
    log: Log, operation: str, worst_tokens: int, expected: Log
) -> None:
    device = Device(log)
    device.group.errors[operation] = BAD
    with pytest.raises(InvalidArgument, match="bad"):
        dispatch(device, worst_tokens=worst_tokens)
    assert turns(log) == expected


@pytest.mark.parametrize("topk", [True, False])
def test_good_dispatch_joins_nothing(log: Log, topk: bool) -> None:
    dispatch(Device(log), topk)
    exchange = [] if topk else [("gather", COUNTS)]
    assert turns(log) == [*READ, *exchange, "dispatch"]


def test_rank_whose_event_is_bad_takes_its_turns(log: Log) -> None:
    device = Device(log)

    def refuse(event: object) -> None:
        raise RuntimeError("no event")

    device.stream.wait_event = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no event"):
        dispatch(device, previous_event=some_event())
    assert turns(log) == [(PREPARE, "no event"), (DISPATCH, "no event"), *END]


@pytest.mark.parametrize("topk", [True, False])
def test_rank_that_errs_before_turns_that_are_given_up_takes_the_first(
    log: Log, topk: bool
) -> None:
    """Peers wait for it there, and nowhere else."""
    device, asked = Device(log), list[bool]()
    device.host_numbers = fail_with(MemoryError("no memory"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no memory"):
        dispatch(device, topk, give_up=lambda first: asked.append(first) is None)
    assert turns(log) == [(PREPARE, "no memory"), *END] and asked == [True]


@pytest.mark.parametrize("topk", [True, False])
def test_rank_that_errs_behind_the_first_of_turns_that_are_given_up_takes_none(
    log: Log, topk: bool
) -> None:
    asked = list[bool]()
    with pytest.raises(Mismatch, match="of earlier"):
        dispatch(Device(log, [mismatch()]), topk, give_up=lambda first: asked.append(first) is None)
    assert turns(log) == [*READ, *END] and asked == [False]


@pytest.mark.parametrize("error", [TypeError("no tensor"), MemoryError()])
def test_rank_whose_arguments_the_library_is_not_given_takes_their_turn(
    log: Log, error: Exception
) -> None:
    """With a text in any case."""
    device, text = Device(log), str(error) or "MemoryError()"
    device.group.errors["prepare"] = error
    with pytest.raises(type(error)):
        dispatch(device)
    assert turns(log) == ["prepare", (PREPARE, text), (DISPATCH, text), *END]


def groups_of(device: Device, kind: int, asked: bool) -> Any:
    """Of ranks whose first goes to a group of this kind, and waits for the number of rows.

    Args:
        asked: whether a rank that asks for an agreement is the first.
    """
    groups: Any = Groups.__new__(Groups)
    vars(groups).update(
        session=device,
        _batches={kind: device.batch},
        _used=[device.batch],
        _decisions={},
        _may_ask=False,
        _first_requests=SimpleNamespace(
            calls=1, of_first=lambda number: (kind | _groups._WAITS, 1)
        ),
        _first_asks=SimpleNamespace(of=lambda call, number: int(asked)),
    )
    return groups


@pytest.mark.parametrize("kind", [_groups._BY_RANK_ALONE, _groups._BY_RANK])
@pytest.mark.parametrize("asked", [True, False])
def test_rank_with_bad_arguments_takes_the_turns_of_its_peers(
    log: Log, kind: int, asked: bool
) -> None:
    """They wait in the exchange of counts, too, unless they agree over their hosts."""
    groups_of(Device(log), kind, asked).refuse("bad")
    told = [one for one in turns(log) if one[0] == "gather"]
    assert turns(log)[0] == (PREPARE, "bad")
    if asked:
        assert len(told) == 1 and b"bad" in told[0][1]
        assert turns(log) == [(PREPARE, "bad"), *END, *told]
    else:
        assert len(told) == (kind == _groups._BY_RANK_ALONE)
        assert turns(log) == [(PREPARE, "bad"), *told, (DISPATCH, "bad"), *END]


@pytest.mark.parametrize("earlier", [True, False])
def test_rank_that_asks_tells_of_an_earlier_failure(log: Log, earlier: bool) -> None:
    """The group remembers the first, which is not that of the prepare that this rank has failed."""
    device = Device(log, [mismatch()])
    device.errors_at_once = 1 + earlier
    groups = groups_of(device, _groups._BY_RANK, asked=True)
    groups._agreed_now = lambda request: log.append("agrees")
    request = Request(topk=TOPK, experts=EXPERTS)
    if not earlier:
        groups.dispatch(request, lambda *_: None)
        assert turns(log)[1:] == [*END, "state read", "agrees"]
        return
    with pytest.raises(Mismatch, match="of earlier"):
        groups.dispatch(request, lambda *_: None)
    told = turns(log)[-1]
    assert turns(log)[1:] == [*END, told]
    assert b"an earlier operation: of earlier" in told[1]


def test_memory_of_a_call_that_fails_halfway_waits_for_what_has_been_enqueued(log: Log) -> None:
    device = Device(log)
    combine_one = device.group.combine

    def fail_next(*args: Any) -> None:
        combine_one(*args)
        device.group.errors["combine"] = BAD

    device.group.combine = fail_next  # type: ignore[method-assign]
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    routing = Routing(device.batch, torch.zeros(64, dtype=torch.uint8), TOKENS, TOKENS, TOPK)
    with pytest.raises(InvalidArgument, match="bad"):
        with device.batch.turns(COMBINE, COMBINE):
            combine(x, routing, torch.zeros(TOKENS, TOPK), [], 1, (None, True))
    ran = [one for one in log if one != "on scope"]
    assert ran == ["scope waits for caller", "combine", "combine", "caller waits for scope"]


def fail_with(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any) -> NoReturn:
        raise error

    return fail


def test_caller_waits_for_an_asynchronous_operation_that_ends_with_an_error(log: Log) -> None:
    """The group tells of an earlier one when this one has been enqueued, so no event comes."""
    group: Any = SimpleNamespace(session=session_of(log), check=fail_with(mismatch()))
    with pytest.raises(Mismatch, match="of earlier"):
        operate(group, lambda phase: log.append("run"), [], [], True, None)
    assert log == [
        "scope waits for caller",
        "on scope",
        "run",
        "caller waits for scope",
    ]


@pytest.mark.parametrize("along_a_handle", [False, True])
def test_caller_waits_where_work_behind_an_asynchronous_dispatch_fails(
    log: Log, along_a_handle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows, which are on their way, and the tensors that they are in."""
    device = Device(log)
    device.checks = Checks(device.rank, RANKS, device.device)  # type: ignore[attr-defined]
    groups = SimpleNamespace(
        session=device, dispatch=lambda request, run: run(device.batch, None), close=lambda: None
    )
    buffer: Any = ElasticBuffer.__new__(ElasticBuffer)
    inner: Any = Buffer.__new__(Buffer)
    vars(inner).update(_groups=groups, rank=0, group_size=RANKS)
    vars(buffer).update(_buffer=inner, num_max_tokens_per_rank=TOKENS, group_size=RANKS)
    monkeypatch.setattr(StreamWork, "_record", lambda *_: None)
    monkeypatch.setattr(_stream_work, "EventHandle", lambda *_: some_event().event)
    monkeypatch.setattr(inner, "_usable", lambda routing: routing)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    given = {"topk_idx": topk_idx, "num_experts": EXPERTS, "do_cpu_sync": False}
    if along_a_handle:
        *_, handle, _ = buffer.dispatch(x, **given)
        given = {"handle": handle}
    monkeypatch.setattr(elastic, "with_padding", fail_with(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        buffer.dispatch(x, **given, async_with_compute_stream=True)
    assert "dispatch" in log and log[-1] == "caller waits for scope"


def test_error_before_the_lane_has_joined_orders_nothing(log: Log) -> None:
    """In a capture its work would wait outside of it."""
    with pytest.raises(MemoryError):
        with StreamWork(session_of(log), None, False) as work, work.allocating():
            raise MemoryError
    assert log == []


def test_error_in_a_capture_takes_no_turn(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch, "is_capturing", lambda _: True)
    device = Device(log)
    device.empty = fail_with(MemoryError("no memory"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no memory"):
        dispatch(device, worst_tokens=8)
    assert turns(log) == ["prepare"] and log[-1] == "caller waits for scope"


def test_lane_waits_for_what_the_callers_allocation_has_waited_for(log: Log) -> None:
    with StreamWork(session_of(log), None, False) as work:
        for _ in range(2):  # as the host may wait between them
            with work.allocating():
                log.append("allocated")
            for _ in range(2):
                assert work.stream() == STREAM
    assert log == ["allocated", "scope waits for caller"] * 2


def test_lane_that_allocates_does_not_wait_for_the_caller(log: Log) -> None:
    with StreamWork(session_of(log), some_event(), True) as work:
        with work.allocating():
            log.append("allocated")
        assert work.stream() == STREAM
    assert log == ["scope waits for an event", "on scope", "allocated"]
