"""The communicator of a serving engine's ranks, its groups, and batches that travel by rank.

Layers of equal sizes share a group: they run one after the other. Groups are made when the first
batch of their sizes comes, in which all ranks take part, and are kept until the engine ends.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock import _core
from crossdock._core import constants
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock.errors import CrossdockError, PeerLost
from crossdock.torch._calls import E8M0, is_capturing, run
from crossdock.torch._custom_ops import as_packed, as_rows

__all__ = [
    "Batch",
    "BulkReturn",
    "FewReturn",
    "Traffic",
    "beside",
    "dispatch_bulk",
    "dispatch_few",
    "telling",
]

_Group = TypeVar("_Group", xd.EpGroup, xd.LowLatencyGroup)

_SETS = 2  # tensors of received rows, or of results, that symmetric memory has room for


class Traffic:
    """The communicator of a process group, and the groups on it by their sizes.

    Args:
        process_group: of torch.distributed.
        masks: whether low-latency groups go on without a rank that is lost.

    Attributes:
        masks: as given.
    """

    def __init__(self, process_group: dist.ProcessGroup, masks: bool = False) -> None:
        self.masks = masks
        self._process_group = process_group
        self._comm: xd.Comm | None = None
        self._groups: dict[Any, Any] = {}
        self._errors: dict[Any, int] = {}

    def bulk(self, device: torch.device, **sizes: Any) -> xd.EpGroup:
        """The group for many tokens of these sizes. Collective the first time."""
        sizes |= {"duplicate_ids": "collapse", "zero_tail": False, "symmetric_tensors": _SETS}
        return self._group(xd.EpGroup, device, sizes)

    def few(self, device: torch.device, **sizes: Any) -> xd.LowLatencyGroup:
        """The low-latency group of these sizes. Collective the first time."""
        loss = "mask" if self.masks else "fatal"
        sizes |= {"duplicate_ids": "collapse", "on_peer_loss": loss}
        return self._group(xd.LowLatencyGroup, device, sizes)

    def _group(self, kind: type[_Group], device: torch.device, sizes: dict[str, Any]) -> _Group:
        key = (kind, device, *sorted(sizes.items()))
        found: _Group | None = self._groups.get(key)
        if found is not None:
            return found
        if is_capturing(device):
            raise ValueError(
                "sizes: expected those of a batch before, in the capture of a CUDA graph, which "
                f"can make no group; got {sizes}"
            )
        with torch.inference_mode(False):  # their tensors are changed within it and without
            if self._comm is None:
                loss: Any = "mask" if self.masks else "fatal"
                self._comm = xd.init(self._process_group, device, on_peer_loss=loss)
            made = self._groups[key] = kind(comm=self._comm, **sizes)
        return made

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self._groups)

    def look(self) -> None:
        """Raises what operations on a GPU have met since the last look; on the CPU they raise.

        Errors in replays of graphs are among them. Not in a capture. It waits for nothing.
        """
        for key, group in self._groups.items():
            if group.comm.device.type != "cuda" or is_capturing(group.comm.device):
                return
            errors = group.errors()
            if errors != self._errors.get(key, 0):
                self._errors[key] = errors
                with self.going_on():
                    group.check()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Lets an operation on the CPU end that leaves out a lost rank, if groups mask them.

        On a GPU nothing is raised then. Outputs are complete but for that rank's share.
        """
        try:
            yield
        except PeerLost as error:
            if error.fatal or not self.masks:
                raise

    def mask(self, num_ranks: int, device: torch.device) -> torch.Tensor:
        """``[W]`` int32: 1 for each rank that some low-latency group leaves out."""
        found = torch.zeros(num_ranks, dtype=torch.int32, device=device)
        for group in self._masking():
            torch.maximum(found, group.mask(), out=found)
        return found

    def bring_back(self) -> None:
        """Brings all ranks into step once more, those that were left out too. Collective.

        Each rank must have cleared its mask before one may wait for it.

        Raises:
            RuntimeError: on the first rank, of those that do not come; on others of the first.
        """
        groups = self._masking()
        for group in groups:
            for rank in range(group.comm.num_ranks):
                if rank != group.comm.rank:
                    group.mask_set(rank, False)
        patience = datetime.timedelta(milliseconds=_core.default_timeout_ms())
        dist.monitored_barrier(self._process_group, patience, wait_all_ranks=True)
        for group in groups:
            group.reset()

    def _masking(self) -> list[xd.LowLatencyGroup]:
        return [one for one in self._groups.values() if isinstance(one, xd.LowLatencyGroup)]

    def close(self) -> None:
        """Closes groups and communicator. Local."""
        while self._groups:
            self._groups.popitem()[1].close()
        if self._comm is not None:
            self._comm.close()
            self._comm = None


class FewReturn(NamedTuple):
    """The way back of few tokens that have come by rank: all that stays until combine."""

    plan: xd.SlotPlan

    def combine(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the sums of rows ``[N, H]``, or more, over the ranks to out ``[T, H]``."""
        xd.ll_combine(self.plan, rows, out=out)

    def start(self, rows: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Sends what `combine` does; the result takes in what has come, into out."""
        sent = xd.ll_combine_send(self.plan, rows)

        def end() -> None:
            sent.receive(out=out)

        return end

    def results(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """None: combine reads results wherever they lie, and sends them from there."""
        return None


class BulkReturn(NamedTuple):
    """The way back of many tokens, as `FewReturn` that of few."""

    plan: xd.Plan

    def combine(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the sums of rows ``[N, H]``, or more, over the ranks to out ``[T, H]``."""
        given = {"expert_out": as_rows(rows), "out": out}
        _run(self.plan, constants.COMBINE, given)

    def start(self, rows: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begins `combine` beside what the current stream does next; the result waits for it."""
        if not rows.is_cuda:
            self.combine(rows, out)
            return _nothing
        comm, here = self.plan.group.comm, torch.cuda.current_stream(rows.device)
        stream = _stream_beside(rows.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            self.combine(rows, out)
        for tensor in (rows, out, self.plan.data):
            comm.record_stream(tensor, stream)
        return lambda: torch.cuda.current_stream(rows.device).wait_stream(stream)

    def results(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for results that peers read in place."""
        return self.plan.group.comm.empty_symmetric(shape, dtype)


class Batch(NamedTuple):
    """Rows that have come by rank. K choices.

    Attributes:
        tokens: ``[N, H]``; scales: ``[N, S]``, or None.
        topk_idx: ``[N, K]`` int64: local experts; -1 elsewhere and past the last row.
        weights: ``[N, K]`` float32, 0 elsewhere.
        back: the way back.
        ends: ``[W]`` int32: one past the last row of each source rank; None where the host knows
            the number of rows.
        counts, host_counts: ``[L]`` int32 on the device and on the host: pairs of token and local
            expert. None unless the host knows the number of rows.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    weights: torch.Tensor
    back: FewReturn | BulkReturn
    ends: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    host_counts: torch.Tensor | None = None


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process on which bulk operations run beside others."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    return _streams[device]


@contextmanager
def beside(
    comm: xd.Comm, previous: Any, *inputs: torch.Tensor | None
) -> Iterator[Callable[..., None]]:
    """Within it work goes to a stream of its own, for which the current stream waits behind it.

    On the CPU it does nothing.

    Args:
        comm: of the tensors.
        previous: an event of `crossdock.deep_ep` that the work waits for; None = all that the
            current stream has been given.
        inputs: tensors of the current stream that it uses.

    Yields:
        A function to be given tensors that the work has made, and that the current stream uses.
    """
    if comm.device.type != "cuda":
        yield lambda *made: None
        return
    here, stream = torch.cuda.current_stream(comm.device), _stream_beside(comm.device)
    event = None if previous is None or previous.event is None else previous.event.event
    stream.wait_stream(here) if event is None else stream.wait_event(event)

    def used_by(user: torch.cuda.Stream, tensors: tuple[torch.Tensor | None, ...]) -> None:
        for tensor in tensors:
            if tensor is not None:
                comm.record_stream(tensor, user)

    used_by(stream, inputs)
    try:
        with torch.cuda.stream(stream):
            yield lambda *made: used_by(here, made)
    finally:
        here.wait_stream(stream)


@contextmanager
def telling(group: Any, operation: int) -> Iterator[None]:
    """Lets the peers' calls of `operation` hear of torch's errors within it, of memory mostly."""
    try:
        yield
    except CrossdockError:
        raise
    except RuntimeError as error:
        group.refuse(operation, type(error), str(error))


def _nothing() -> None:
    """Ends what has ended already."""


def dispatch_few(
    group: xd.LowLatencyGroup,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    *,
    quantise: str | None,
    most: int,
    cleared: bool,
) -> Batch:
    """Sends few tokens by rank, and takes those that come. No host waits. Collective.

    Args:
        group: with ``receive="by_rank"``.
        tokens, topk_idx, weights: ``[T, H]``, ``[T, K]`` int32 or int64, ``[T, K]`` float32.
        quantise: as of `xd.ll_dispatch`; None = not.
        most: tokens of any rank; equal on all. N is W times that.
        cleared: whether rows behind the last are zero; else they hold anything.
    """
    hidden, topk = tokens.shape[1], topk_idx.shape[1]
    with telling(group, constants.LL_DISPATCH):
        slots = group.slots(hidden, tokens.dtype, quantise, topk=topk, max_tokens=most)
        if cleared:
            slots.tokens.zero_()
        if slots.row_offsets is not None:
            slots.row_offsets.zero_()  # experts look at them even if this fails on a GPU
    slots = xd.ll_dispatch(
        group, tokens, topk_idx, weights, quantise=quantise or False, max_tokens=most, out=slots
    )
    ends, idx, beside = slots.row_offsets, slots.topk_idx, slots.weights
    assert ends is not None and idx is not None and beside is not None
    back = FewReturn(slots.plan)
    return Batch(slots.tokens, slots.scales, idx, beside, back, ends[1:].int())


def dispatch_bulk(
    group: xd.EpGroup,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    *,
    quantise: str | None,
    most: int | None,
    cleared: bool,
) -> Batch:
    """Sends tokens by rank, and takes those that come. Collective.

    Args:
        group: with ``layout="rank_major"``.
        tokens: ``[T, H]``; scales: ``[T, S]`` that travel beside them, or None.
        topk_idx, weights, quantise, cleared: as of `dispatch_few`.
        most: tokens of any rank, which says how many rows there is memory for; None = as many as
            come, for whose number the host waits.
    """
    device = tokens.device
    if most is None and is_capturing(device):
        raise ValueError("prepare: expected no capture of a CUDA graph where hosts wait, got one")
    plan, parts = group.prepare(topk_idx.contiguous()), group.plan_parts
    ends = counts = host_counts = None
    if most is None:
        numbers = plan.info.cpu()
        if device.type == "cuda":
            group.check()  # prepare may have failed without raising: the number is wrong then
        rows = int(numbers[parts.total])
        counts, host_counts = plan.counts, numbers[parts.counts]
    else:
        rows = group.comm.num_ranks * most
        ends = plan.rank_rows[:, group.comm.rank].cumsum(0, dtype=torch.int32)
    way = None if quantise is None else quantise_way(quantise)
    choices = (rows, topk_idx.shape[1])
    with telling(group, constants.DISPATCH):
        received, found = _memory(group.comm, tokens, scales, way, rows)
        idx = torch.empty(choices, dtype=torch.int64, device=device)
        shares = torch.empty(choices, dtype=torch.float32, device=device)
        if cleared:
            received.zero_()
    given = {
        "tokens": as_rows(tokens),
        "scales": scales,
        "topk_weights": as_packed(weights),
        "recv_tokens": received,
        "recv_scales": found,
        "recv_weights": shares,
        "recv_topk_idx": idx,
    }
    _run(plan, constants.DISPATCH, given, quantise=0 if way is None else way.code)
    return Batch(received, found, idx, shares, BulkReturn(plan), ends, counts, host_counts)


def _memory(
    comm: xd.Comm,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    way: QuantiseWay | None,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for rows that come, into which peers write, and for scales beside them."""
    dtype, columns, kind = tokens.dtype, 0, torch.float32
    if way is not None:
        dtype, columns = torch.float8_e4m3fn, tokens.shape[1] // way.block
        kind = torch.float32 if way.scale == "float32" else E8M0
    elif scales is not None:
        columns, kind = scales.shape[1], scales.dtype
    received = comm.pool.empty((rows, tokens.shape[1]), dtype)
    if not columns:
        return received, None
    return received, torch.empty(rows, columns, dtype=kind, device=tokens.device)


def _run(plan: xd.Plan, operation: int, tensors: dict[str, Any], **numbers: int) -> None:
    """Calls the library; of what it cannot be called with, the peers hear."""
    group = plan.group
    try:
        name = constants.OPERATIONS[operation]
        run(group.core, name, plan.data, {"plan": plan.data, **tensors}, **numbers)
    except TypeError as error:  # a dtype that the library has no number for
        group.refuse(operation, TypeError, str(error))
