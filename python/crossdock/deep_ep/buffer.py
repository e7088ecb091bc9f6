"""Buffer: expert parallelism through the interface of DeepEP 1.2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist

from crossdock import _core
from crossdock._core import constants
from crossdock.torch._calls import described

from ._agreement import mismatch, text_of
from ._arguments import (
    Bias,
    Rows,
    read_bias,
    read_choices,
    read_results,
    read_tokens,
    read_weights,
)
from ._combine import BAD_COLUMNS, columns_of_weights, combine, pieces_of
from ._config import Config, require_positive, require_sms
from ._dispatch import Received, dispatch_new, request_of
from ._expand import Padding
from ._few import dispatch_along, require_rows
from ._groups import Groups
from ._handle import Handle, Routing, routing_of
from ._low_latency_calls import LowLatencyCalls
from ._plain import plain
from ._session import AllGather, Session
from ._stream_work import StreamWork
from ._wire import first_wire, number_of_wire
from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from mpi4py import MPI

_X = TypeVar("_X", torch.Tensor, tuple[torch.Tensor, torch.Tensor], Rows)
_Layout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]
_Dispatched = tuple[
    Rows,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    Handle | None,
    EventOverlap,
]
_Events = tuple[Any, Any, Any]  # previous_event, async_finish, allocate_on_comm_stream
_MOST_RDMA_BYTES = 1 << 62  # the most that the library takes


class Buffer(LowLatencyCalls):
    """Dispatches tokens to the ranks of their experts, and combines the results.

    `dispatch` and `combine` are for many tokens, `low_latency_dispatch` and `low_latency_combine`
    for few. All ranks call them in the same order, also with T = 0 tokens. On GPUs
    operations run on a stream that the Buffer owns; unless ``async_finish`` is set the caller's
    stream waits for them. W ranks, E experts, K choices per token, H columns; rank r holds experts
    ``r * E/W .. (r + 1) * E/W - 1``. Receive tensors have rows ordered by source rank, then token.

    A mistake in one rank's arguments raises ValueError there and ``crossdock.errors.Mismatch`` on
    its peers; no row moves, and the Buffer stays usable. On GPUs, peers that do not wait for the
    host learn it in their next `dispatch` that does. See ``crossdock.errors`` for other errors.

    Tensors are on the current CUDA device at the time of construction; on the CPU where there is no
    CUDA device or the library was built without CUDA.

    Args:
        group: torch.distributed group whose members make this Buffer; any backend.
        num_nvl_bytes: symmetric memory to begin with. More is taken when a dispatch needs it.
        num_rdma_bytes: between machines, about how many bytes of buffers each group has for rows of
            other machines; 0 = as many as the library chooses. Equal on all ranks of several hosts.
        low_latency_mode: whether the low-latency methods may be called; the others may as well, in
            any order. Equal on all ranks of several hosts; False on GPUs of several machines.
        num_qps_per_rank: ignored: the library makes one endpoint of its own.
        allow_nvlink_for_low_latency_mode: ignored.
        allow_mnnvl: ignored: ranks share memory if they are on one machine.
        use_fabric: ignored: memory is shared by file descriptors.
        explicitly_destroy: whether `destroy` will be called; else the garbage collector frees.
        enable_shrink: low-latency operations go on when a rank is lost, without it; not between
            machines.
        comm: mpi4py communicator, instead of `group`.

    Attributes:
        num_sms: of the class: multiprocessors that operations without a ``config`` may use.
        combine_wire: of the class: the form in which each rank's sum of a token's rows crosses in
            `combine` without `topk_weights` and `bias`, and in `low_latency_combine`, of bfloat16
            rows: ``"same"``: bfloat16; ``"fp8"`` (or ``"fp8_block128"``), ``"fp8_block128_pow2"``,
            ``"fp8_block128_e8m0"``: as `crossdock.torch.combine` has them, hidden a multiple of
            128; ``"logfmt"``: "fp8" in calls with ``use_logfmt=True``, and "same" in all others.
            Equal on all ranks. The environment's XD_DEEP_EP_COMBINE_WIRE is what it begins with;
            on GPUs there is only "same" so far, and any other raises ValueError.
        rank, group_size: the place of this rank.
        num_rdma_ranks: hosts of the ranks.
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink:
            as they were given.

    Raises:
        ValueError: neither `group` nor `comm`, or a negative size.
        CrossdockError: ranks could not meet, or disagree, or there is no Buffer between their
            machines; see ``crossdock.errors``.
    """

    num_sms: int = 20
    combine_wire: str = first_wire()

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: MPI.Comm | None = None,
    ) -> None:
        self._groups: Groups | None = None
        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        if group is not None:
            self.rank, self.group_size = group.rank(), group.size()
            gather = _gather_through_group(group)
        elif comm is not None:
            self.rank, self.group_size = comm.Get_rank(), comm.Get_size()
            gather = comm.allgather
        else:
            raise ValueError("group: expected a process group, or comm, got None for both")
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._local: torch.Tensor | None = None
        session = Session(
            self.rank,
            self.group_size,
            gather,
            _device(),
            num_nvl_bytes,
            bool(low_latency_mode),
            min(int(num_rdma_bytes), _MOST_RDMA_BYTES),
            enable_shrink,
        )
        self._groups = Groups(session)
        self.num_rdma_ranks = session.num_hosts

    def destroy(self) -> None:
        """Waits for this rank's operations and leaves. Peers that need this rank later fail.

        Handles that are alive go on: the rank leaves with the last of them.

        Raises:
            ValueError: the Buffer was made without ``explicitly_destroy``, or is destroyed already.
        """
        if not self.explicitly_destroy:
            raise ValueError("explicitly_destroy: expected True for destroy(), got False")
        self._live_groups().close()
        self._groups = self._local = None

    def __del__(self) -> None:
        groups = getattr(self, "_groups", None)
        if groups is not None and not sys.is_finalizing():
            groups.close()

    def _live_groups(self) -> Groups:
        if self._groups is None:
            raise ValueError("Buffer: expected one in use, got one that is destroyed")
        return self._groups

    def _live(self) -> Session:
        return self._live_groups().session

    # ---- Static facts ----------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether the library was built for GPUs."""
        return _core.feature_available("cuda")

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets `Buffer.num_sms`, for calls without a ``config``; 0 = chosen by the library.

        Raises:
            TypeError, ValueError: no whole number, an odd or a negative one.
        """
        require_sms(new_num_sms, "new_num_sms")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The config of `dispatch` and `combine` by default, for any number of ranks."""
        require_positive(num_ranks=num_ranks)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that operations run on: a ``torch.cuda.Stream``; on the CPU a stand-in."""
        return self._live().stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """A view of ``num_nvl_bytes`` bytes of this rank's memory, which operations leave alone.

        Args:
            dtype: of the elements.
            size: shape; None = all that follows `offset`, in one dimension.
            offset: in bytes, a multiple of the element's size.
            use_rdma_buffer: of the memory for other hosts, of which the caller has 0 bytes.

        Raises:
            ValueError: out of bounds.
        """
        session = self._live()
        checks = session.checks
        bound, most = "num_nvl_bytes", self.num_nvl_bytes
        if use_rdma_buffer:
            bound, most = "bytes for other hosts", 0
        if not 0 <= offset <= most or offset % dtype.itemsize != 0:
            expected = f"a multiple of {dtype.itemsize} from 0 to {bound} = {most}"
            checks.fail("offset", expected, offset)
        end = most - (most - offset) % dtype.itemsize
        if use_rdma_buffer:
            elements = torch.zeros(0, dtype=dtype, device=session.device)
        else:
            if self._local is None:
                self._local = torch.zeros(most, dtype=torch.uint8, device=session.device)
            elements = self._local[offset:end].view(dtype)
        if size is None:
            return elements
        size = torch.Size(size)
        if size.numel() > elements.numel():
            checks.fail("size", f"at most {elements.numel()} elements", tuple(size))
        return elements[: size.numel()].view(size)

    # ---- Operations ------------------------------------------------------------------------------

    @plain
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> _Layout:
        """Counts where this rank's tokens go. Local: no rank waits for another.

        Args:
            topk_idx: [T,K] int64, K at most 32: expert of each choice; -1 = none.
            num_experts: E, of all ranks.
            previous_event: what to wait for; None = all work of the current stream so far.
            async_finish: the current stream does not wait; the returned event does that.
            allocate_on_comm_stream: needs `previous_event` and `async_finish`. With a
                `previous_event` results belong to the Buffer's stream in any case.

        Returns:
            ``num_tokens_per_rank`` [W] int32, ``num_tokens_per_rdma_rank`` [num_rdma_ranks] int32
            (None = there is one host), ``num_tokens_per_expert`` [E] int32, ``is_token_in_rank``
            [T,W] bool, and the event (empty without `async_finish`).

        Raises:
            ValueError: a bad argument.
        """
        session = self._live()
        checks = session.checks
        checks.events(previous_event, async_finish, allocate_on_comm_stream)
        checks.topk_idx(topk_idx)
        checks.experts(num_experts, "num_experts")
        ranks, hosts = self.group_size, self.num_rdma_ranks

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=session.device)

        with StreamWork(session, previous_event, async_finish) as work:
            with work.allocating():
                per_rank, per_expert = numbers(ranks), numbers(num_experts)
                per_host = numbers(hosts) if hosts > 1 else None
                in_rank = numbers(topk_idx.shape[0], ranks, dtype=torch.bool)
            fields: dict[str, object] = {
                "topk_idx": topk_idx,
                "rows_per_rank": per_rank,
                "rows_per_expert": per_expert,
                "token_in_rank": in_rank.view(torch.uint8),
                "num_experts": num_experts,
                "stream": work.stream(),
            }
            session.comm.routing_layout(described(fields))
            if per_host is not None:
                with work.running():
                    session.count_by_host(in_rank, per_host)
            event = work.finish((topk_idx,), (per_rank, per_host, per_expert, in_rank))
        return per_rank, per_host, per_expert, in_rank, event

    @overload
    def dispatch(
        self,
        x: _X,
        handle: None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_X, torch.Tensor | None, torch.Tensor | None, list[int], Handle, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: _X,
        handle: Handle,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: None = None,
        topk_weights: None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_X, None, None, None, None, EventOverlap]: ...

    @plain
    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> _Dispatched:
        """Sends each token's row to every rank that it goes to. Collective.

        Without `handle` the host waits for the number of rows, and the ranks agree over it where
        they need a larger group. With `handle`, or with `num_worst_tokens` from the second such
        call on, nothing waits for the host.

        Args:
            x: [T,H] bfloat16, float16, float32, or bytes: fp8, uint8, int8 or packed 4-bit numbers;
                or a pair of [T,H] bytes and [T,S] or [T] scales, float32 or int32, of any strides.
            handle: from an earlier dispatch of T tokens, also of another Buffer of these ranks, and
                if that is gone: its routing again. float32 rows need one that was made when rows at
                least as long had been dispatched before.
            num_tokens_per_rank: [W] int32; needed without `handle`. This and the next three follow
                from `topk_idx`, by which alone rows go. On the CPU these numbers are checked.
            num_tokens_per_rdma_rank: None, or [num_rdma_ranks] int32; not read.
            is_token_in_rank: [T,W] bool; needed without `handle`. Part of the new handle, and the
                routing where there is no `topk_idx`. On the CPU its numbers of tokens are checked.
            num_tokens_per_expert: [E] int32; needed without `handle`.
            topk_idx: [T,K] int64, the routing: expert of each choice; -1 = none, and so are an
                expert's second and later mentions in a row.
            topk_weights: [T,K] float32, with `topk_idx`.
            expert_alignment: what numbers of rows per expert are rounded up to.
            num_worst_tokens: rows to return, at least W times the tokens of any rank; equal on all
                ranks; needs `topk_idx`. 0 = exactly as many as there are. Ignored with `handle`.
            config: its ``num_sms`` counts, without `handle`; None = `Buffer.num_sms`.
            previous_event, async_finish, allocate_on_comm_stream: as in `get_dispatch_layout`.

        Returns:
            ``recv_x`` [N,H], or a pair with row-major scales if x is one; ``recv_topk_idx`` [N,K]
            int64 experts of this rank, counted from 0, -1 elsewhere; ``recv_topk_weights`` [N,K]
            float32, 0 elsewhere; rows per expert of this rank as a list (empty with
            `num_worst_tokens`); ``handle``; event. With `handle` the four in the middle are None,
            without `topk_idx` the first two of them. With `num_worst_tokens` the rows behind the
            last one are zero, and their indices -1.

        Raises:
            ValueError: a bad argument; ids that are no experts (InvalidArgument, on all ranks).
        """
        events = previous_event, async_finish, allocate_on_comm_stream
        if handle is not None:
            checks, routing = self._live().checks, self._known(handle)
            with routing.batch.turns(constants.DISPATCH):
                checks.none("handle", topk_idx=topk_idx, topk_weights=topk_weights)
                checks.num_sms(config, Buffer.num_sms)
                received, event = self._dispatch_along(x, routing, None, False, events)
            return received.x, None, None, None, None, event
        groups, checks, worst_tokens = self._live_groups(), self._live().checks, num_worst_tokens
        layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        try:
            tokens = read_tokens(checks, x)
            choices = read_choices(checks, tokens.rows.shape[0], *layout, topk_idx, topk_weights)
            per_host, hosts = num_tokens_per_rdma_rank, (self.num_rdma_ranks,)
            checks.optional(per_host, "num_tokens_per_rdma_rank", hosts, torch.int32)
            checks.events(*events)
            checks.at_least(expert_alignment, "expert_alignment", 1)
            checks.at_least(worst_tokens, "num_worst_tokens", 0)
            if worst_tokens > 0 and choices.topk_idx is None:
                checks.fail("topk_idx", "a tensor, as num_worst_tokens is given", None)
            num_sms = checks.num_sms(config, Buffer.num_sms)
        except Exception as error:
            groups.refuse(text_of(error))
            raise
        numbers = expert_alignment, worst_tokens, events[:2]
        found = groups.dispatch(
            request_of(tokens, choices, worst_tokens, num_sms),
            lambda batch, give_up: dispatch_new(batch, tokens, choices, *numbers, give_up),
        )
        got, sums, in_rank = found.received, found.sums, choices.in_rank
        assert sums.rank_rows is not None and in_rank is not None
        made = Handle.of(sums.rank_rows, sums.prefix, in_rank, found.routing)
        return got.x, got.topk_idx, got.topk_weights, found.per_expert, made, found.event

    @plain
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows over the ranks. Collective; no host waits on one machine.

        Sums are float32, by ascending rank, then the sum of the biases; rounded once. With a bias
        rows travel as float32: for 16-bit rows twice the bytes.

        Args:
            x: [N,H] bfloat16, float16 or float32, as many rows as dispatch gave, and as many
                columns; of any of these types, the same on all ranks.
            handle: from that dispatch.
            topk_weights: [N,K] float32, K from 1 to 32, to be summed over the ranks like the rows;
                None on all ranks or on none, with the same K.
            bias: [T,H] of the type of x, or a pair of such, of which either may be None. Either all
                ranks give a bias or none.
            config: ignored, but checked.
            previous_event, async_finish, allocate_on_comm_stream: as in `get_dispatch_layout`.

        Returns:
            ``combined_x`` [T,H] of the type of x, zero plus bias for a token that went nowhere;
            ``combined_topk_weights`` [T,K] float32, or None; event.

        Raises:
            ValueError: a bad argument.
            Mismatch: the ranks' arguments disagree, or another rank's are bad; on GPUs the next
                dispatch that waits for the host may be what raises it.
        """
        events = previous_event, async_finish, allocate_on_comm_stream
        return self._combine_along(x, self._known(handle), topk_weights, bias, events, config)

    internode_dispatch = dispatch
    internode_combine = combine

    def _dispatch_along(
        self, x: Any, routing: Routing, topk_weights: Any, with_choices: bool, events: _Events
    ) -> tuple[Received, EventOverlap]:
        """Dispatches along a handle's routing, in a turn of its group.

        Args:
            topk_weights, with_choices: as of `dispatch_along`.
        """
        checks, most = self._live().checks, routing.batch.sizes.row_bytes
        checks.events(*events)
        tokens, made_for = read_tokens(checks, x), "as the handle was made for"
        if tokens.rows.shape[0] != routing.num_tokens:
            checks.fail("x", f"{routing.num_tokens} rows, {made_for}", tokens.rows.shape[0])
        if tokens.row_bytes > most:
            checks.fail(
                "x", f"rows of at most {most} bytes, {made_for}", f"{tokens.row_bytes} bytes"
            )
        shape = routing.num_tokens, routing.topk
        checks.optional(topk_weights, "topk_weights", shape, torch.float32)
        if routing.few:
            require_rows(checks, tokens)
        return dispatch_along(tokens, routing, events[:2], topk_weights, with_choices)

    def _combine_along(
        self,
        x: Any,
        routing: Routing,
        topk_weights: Any,
        bias: Any,
        events: _Events,
        config: Any = None,
        wide: bool = False,
        padding: Padding | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Combines along a handle's routing, in turns of its group.

        Args:
            wide: whether rows travel as float32 in any case.
            padding: of rows by expert, if x has another one than the routing.
        """
        session, row_bytes = self._live(), routing.batch.sizes.row_bytes
        checks, by_expert = session.checks, routing.by_expert
        num_rows = routing.num_rows if padding is None else padding.num_rows
        pieces = pieces_of(x, bias, row_bytes, wide)
        turns, columns, first, peer = [constants.COMBINE] * pieces, 0, 0, 0
        if not by_expert or routing.few:
            columns = columns_of_weights(topk_weights)
            if by_expert:
                columns = 0 if topk_weights is None else routing.topk
            first, peer = session.weight_columns_of_first(columns)
            turns += [constants.DISPATCH] * (by_expert and first > 0)
            turns += [constants.COMBINE] * (first > 0)
        elif topk_weights is not None:
            turns[0] = constants.DISPATCH_BWD
        # As many turns as the peers take, also where this rank's arguments are bad.
        with routing.batch.turns(*turns):
            checks.events(*events)
            checks.num_sms(config, Buffer.num_sms)
            wire = number_of_wire(self.combine_wire, session.device, apart=session.apart)
            read_results(checks, x, num_rows, row_bytes, pieces)
            biases = read_bias(checks, bias, (routing.num_tokens, x.shape[1]), x.dtype)
            if topk_weights is not None:
                read_weights(checks, topk_weights, num_rows, by_expert)
            # A first rank that refuses its weights tells so itself.
            if first != columns and (columns == 0 or first != BAD_COLUMNS):
                given = "other ones" if first == BAD_COLUMNS else first
                text = f"columns of topk_weights (0 = not given) = {columns} on rank {self.rank}"
                text += f" and {given} on rank {peer}, expected equal values"
                raise mismatch("combine", text, self.rank, peer, "combine")
            if padding is not None:
                x = padding.without(x)
                topk_weights = None if topk_weights is None else padding.without(topk_weights)
            return combine(x, routing, topk_weights, biases, pieces, events[:2], wide, wire)

    def _known(self, handle: Any) -> Routing:
        """The routing of the handle, if it is one of this Buffer's or of another like it."""
        checks, routing = self._live().checks, routing_of(handle, Routing, 6)
        if routing is None:
            checks.fail("handle", "what dispatch of a Buffer returned", type(handle))
        return self._usable(routing)

    def _usable(self, routing: Routing) -> Routing:
        session = self._live()
        made_by = routing.batch.session
        if made_by is not session:
            place = made_by.rank, made_by.num_ranks, made_by.device
            if place != (self.rank, self.group_size, session.device):
                session.checks.fail(
                    "handle",
                    f"one of rank {self.rank} of {self.group_size} on {session.device}",
                    "one of rank {} of {} on {}".format(*place),
                )
            self._live_groups().use(routing.batch)
        return routing


def _device() -> torch.device:
    """Where tensors are: the current CUDA device if the library can use it."""
    if torch.cuda.is_available() and _core.feature_available("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_through_group(group: dist.ProcessGroup) -> AllGather:
    def gather(sent: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, sent, group=group)
        return gathered

    return gather
