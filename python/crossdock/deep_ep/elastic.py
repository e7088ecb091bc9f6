"""ElasticBuffer: expert parallelism through the interface of DeepEP 2."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from crossdock._core import constants
from crossdock._quantise import widest_scale_bytes

from ._agreement import text_of
from ._arguments import Bias, Rows
from ._batch import Batch, GiveUp
from ._dispatch import Dispatched, dispatch_new, request_of
from ._elastic_batch import (
    Numbers,
    by_token,
    column_major,
    handle_of,
    parts_of,
    read_batch,
    with_padding,
)
from ._elastic_handle import EPHandle
from ._few import dispatch_few, takes_few
from ._plain import plain
from ._session import Session
from ._stream_work import StreamWork
from .buffer import Buffer
from .utils import EventHandle, EventOverlap

__all__ = ["ElasticBuffer"]

_Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]

_DEFAULT_TOPK = 32  # where a Buffer is sized for any


class ElasticBuffer:
    """Dispatches tokens to the ranks of their experts, and combines the results. One interface.

    All ranks make the same calls in the same order, also with T = 0 tokens, and give the same
    numbers (``num_experts``, ``num_max_tokens_per_rank``, ``num_sms``, ``do_cpu_sync``). R ranks, E
    experts, L = E / R of them on each, T tokens of this rank, K choices each, H columns. Received
    rows come by source rank, then token, always in the same order. Streams, errors and memory are
    as `Buffer` has them, which does the work.

    Args:
        group: torch.distributed group; any backend.
        num_bytes: symmetric memory to begin with; None = as the next numbers need.
        num_cpu_bytes: ignored: no memory of the host is used.
        num_max_tokens_per_rank: largest T of any rank, also of calls that do not say it.
        hidden, num_topk, use_fp8_dispatch: of the batches, for the memory to begin with.
        deterministic: ignored: the order of rows always is.
        allow_hybrid_mode, sl_idx, num_allocated_qps: ignored: the library chooses its ways.
        allow_multiple_reduction: whether a token's rows by expert are added up and rounded on the
            rank that has them before they travel; else, and with a bias, sums travel as float32.
        prefer_overlap_with_compute: ignored: see `get_theoretical_num_sms`.
        num_cpu_timeout_secs, num_gpu_timeout_secs: ignored: XD_TIMEOUT_MS bounds all waits.
        explicitly_destroy: whether `destroy` will be called; else the garbage collector frees.

    Attributes:
        rank_idx, num_ranks: the place of this rank; also by DeepEP 1's names, ``rank`` and
            ``group_size``.
        num_scaleout_ranks, num_scaleup_ranks: as `get_logical_domain_size` has them.
        scaleout_rank_idx, scaleup_rank_idx: the place of this rank in them.
        num_rdma_ranks, num_nvlink_ranks: as `get_physical_domain_size` has them.
        few_tokens: of the class, or of one buffer: batches with up to so many
            ``num_max_tokens_per_rank`` go through the low-latency operations, which need no
            prepare; 0 (so at first) = none. At most 1024, and equal on all ranks.
        group, num_bytes, num_max_tokens_per_rank, num_allocated_qps, deterministic,
            allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute,
            explicitly_destroy: as they were given.

    Raises:
        ValueError: neither bytes nor numbers are given, or a negative one.
    """

    few_tokens: int = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        sizes = (num_max_tokens_per_rank, hidden, num_topk)
        if min(sizes) < 0:
            raise ValueError(
                "num_max_tokens_per_rank, hidden, num_topk: expected at least 0, got {}, {}, {}"
                "".format(*sizes)
            )
        if num_bytes is None:
            if not num_max_tokens_per_rank or not hidden:
                raise ValueError(
                    "num_bytes: expected a number, or num_max_tokens_per_rank and hidden, got None "
                    f"beside {num_max_tokens_per_rank} and {hidden}"
                )
            num_bytes = self.get_buffer_size_hint(group, *sizes, use_fp8_dispatch)
        self._buffer = Buffer(group, num_bytes, explicitly_destroy=explicitly_destroy)
        self.group = group
        self.rank_idx = self.rank = self._buffer.rank
        self.num_ranks = self.group_size = self._buffer.group_size
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy

    def destroy(self) -> None:
        """Waits for this rank's operations and leaves. Peers that need this rank later fail.

        Raises:
            ValueError: made without ``explicitly_destroy``, or destroyed already.
        """
        self._buffer.destroy()

    # ---- Facts -----------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of received tensors of one dispatch: rows, scales, weights and indices."""
        topk = num_topk or _DEFAULT_TOPK
        row = hidden + widest_scale_bytes(hidden) if use_fp8_dispatch else 2 * hidden
        return group.size() * num_max_tokens_per_rank * (row + (4 + 8) * topk)

    @staticmethod
    def capture() -> EventHandle:
        """An event at this point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that operations run on; on the CPU a stand-in."""
        return self._buffer.get_comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(hosts, ranks of this rank's host)."""
        session = self._session()
        return session.num_hosts, session.num_local

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(ranks to scale out, ranks to scale up): (1, R), on any hosts, as rows are ordered."""
        return 1, self.group_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Multiprocessors for an operation: `Buffer.num_sms`, for any sizes."""
        return Buffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: none are needed."""
        return 0

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits on the host until all ranks are here, and their work so far on both streams ends.

        More than is asked, whatever the arguments say. Collective.
        """
        session = self._session()
        if session.device.type == "cuda":
            torch.cuda.current_stream(session.device).synchronize()
        session.synchronize()
        session.host.all_gather(b"\0")

    # ---- Operations ------------------------------------------------------------------------------

    @plain
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
        previous_event_before_epilogue: EventOverlap | EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> _Dispatched:
        """Sends each token's row to every rank that has one of its experts. Collective.

        Args:
            x: [T,H] as of `Buffer.dispatch`: rows, or a pair of bytes and scales.
            topk_idx: [T,K] int64; -1 = none. Needed without `handle`.
            topk_weights: [T,K] float32, on all ranks or on none. None = 1 for each choice; with
                `handle` none travel.
            cumulative_local_expert_recv_stats: [L] int32: this batch's counts are added to it.
                Not with `handle`.
            num_experts: E. Needed without `handle`.
            num_max_tokens_per_rank: largest T of any rank; None = the Buffer's.
            expert_alignment: what rows of an expert are padded to a multiple of; None = 1. With
                `handle` these three are None, or as they were.
            num_sms: multiprocessors; 0 = `Buffer.num_sms`, or with `few_tokens` as many as serve.
            num_qps: ignored.
            previous_event: what to wait for; None = all work of the current stream so far.
            previous_event_before_epilogue: waited for beside it, before anything is sent.
            async_with_compute_stream: the current stream does not wait; the event does that.
            allocate_on_comm_stream: ignored: with `previous_event` results belong to the Buffer's
                stream.
            handle: an earlier batch's: rows of x go the same way. `topk_idx` is None then.
            do_handle_copy: whether the handle has a copy of `topk_idx`.
            do_cpu_sync: whether the host waits for the number of rows. Else there are
                ``R * num_max_tokens_per_rank`` of them, or as many as can ever be needed by expert.
                None = True. Ignored with `handle`.
            do_expand: a row for each (token, local expert), grouped by expert; equal on all ranks.
                With `handle` True needs one that was made with it; False gives a row per token,
                for which the handle may have to be looked at: see `EPHandle`.
            do_zero_padding: ignored: padding rows are zero in any case.
            use_tma_aligned_col_major_sf: received scales lie column by column, each column at a
                multiple of 16 bytes.

        Returns:
            Received rows; [N,K] local experts, -1 elsewhere (None with `do_expand`); their weights
            [N,K], or one per row with `do_expand` (None with `handle` and no `topk_weights`);
            handle, the given one if there is one; event.

        Raises:
            ValueError: a bad argument.
        """
        waits = (previous_event, previous_event_before_epilogue, async_with_compute_stream)
        stats, most = cumulative_local_expert_recv_stats, num_max_tokens_per_rank
        if handle is not None:
            sizes = {
                "num_experts": num_experts,
                "num_max_tokens_per_rank": most,
                "expert_alignment": expert_alignment,
            }
            none = {"topk_idx": topk_idx, "cumulative_local_expert_recv_stats": stats}
            form = do_expand, use_tma_aligned_col_major_sf
            return self._dispatch_again(x, handle, topk_weights, sizes, none, form, waits)
        numbers = Numbers(
            num_experts=num_experts,
            most_tokens=self.num_max_tokens_per_rank if most is None else most,
            alignment=1 if expert_alignment is None else expert_alignment,
            num_sms=num_sms or Buffer.num_sms,
            few_sms=num_sms or 0,
            do_expand=do_expand,
            host_waits=do_cpu_sync is None or bool(do_cpu_sync),
        )
        form = do_handle_copy, use_tma_aligned_col_major_sf
        return self._dispatch_new(x, topk_idx, topk_weights, stats, numbers, form, waits)

    @plain
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
        previous_event_before_epilogue: EventOverlap | EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows, unweighted. Collective; no host waits on one machine.

        Args:
            x: [N,H] or, with ``do_expand``, rows by expert; as of `Buffer.combine`. Padding may
                hold anything.
            handle: from dispatch.
            topk_weights: float32, on all ranks or on none: [N,K], summed over the ranks like the
                rows; or with ``do_expand`` one per row of x, each of which goes to its choice.
            bias: [T,H] of the type of x, or a pair, added to the sum before the one rounding.
            num_sms, num_qps, allocate_on_comm_stream: ignored: see dispatch.
            previous_event, previous_event_before_epilogue, async_with_compute_stream: as there.

        Returns:
            [T,H]; [T,K] summed weights, or None where none were given; event.

        Raises:
            ValueError: a bad argument.
        """
        buffer, session = self._buffer, self._session()
        if not isinstance(handle, EPHandle):
            session.checks.fail("handle", "what dispatch returned", type(handle).__name__)
        routing, padding = buffer._usable(handle.routing), handle.padding
        event = self._after(previous_event, previous_event_before_epilogue)
        if padding is not None:
            event = self._after(event, EventOverlap())  # the current stream takes it out
        wide = routing.by_expert and not self.allow_multiple_reduction
        events = event, async_with_compute_stream, False
        return buffer._combine_along(x, routing, topk_weights, bias, events, None, wide, padding)

    def _session(self) -> Session:
        return self._buffer._live()

    def _dispatch_new(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None,
        numbers: Numbers,
        form: tuple[bool, bool],
        waits: tuple[Any, Any, bool],
    ) -> _Dispatched:
        """Dispatch without a handle.

        Args:
            form: do_handle_copy, use_tma_aligned_col_major_sf.
        """
        groups, (do_copy, columns_first) = self._buffer._live_groups(), form
        checks = groups.session.checks
        try:
            tokens, choices = read_batch(checks, numbers, x, topk_idx, topk_weights, stats)
            event = self._after(*waits[:2])
            checks.events(event, waits[2], False)
            most = checks.at_least(self.few_tokens, "few_tokens", 0, constants.LL_MAX_TOKENS)
            few = takes_few(groups.session, tokens, numbers.most_tokens, most)
            assert topk_idx is not None
            if topk_weights is None:
                # Made by the current stream, for which an operation with an event does not wait.
                event = self._after(event, EventOverlap())
                ones = torch.ones(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
                choices = dataclasses.replace(choices, topk_weights=ones)
        except Exception as error:
            groups.refuse(text_of(error))
            raise
        worst = 0 if numbers.host_waits else self.group_size * numbers.most_tokens
        sms = numbers.few_sms if few else numbers.num_sms
        request = request_of(tokens, choices, worst, sms, numbers.most_tokens, few)
        how = numbers.alignment, worst, (event, waits[2])

        def run(batch: Batch, give_up: GiveUp | None) -> Dispatched:
            if few:
                return dispatch_few(batch, tokens, choices, request, *how, give_up, keep=do_copy)
            return dispatch_new(batch, tokens, choices, *how, give_up, counted=True)

        found = groups.dispatch(request, run)
        with StreamWork(groups.session, found.event, waits[2]) as work:
            with work.allocating():
                kept = found.routing.topk_idx
                if kept is None:
                    kept = topk_idx.clone() if do_copy else topk_idx
                made = handle_of(found, numbers, kept)
                if stats is not None:
                    stats += made.num_unaligned_recv_tokens_per_expert
                received = with_padding(made.padding, found.received)
                rows = column_major(received.x) if columns_first else received.x
            done = work.finish((), (*parts_of(rows), *received, *made.tensors()))
        return rows, received.topk_idx, received.topk_weights, made, done

    def _dispatch_again(
        self,
        x: Rows,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        sizes: dict[str, int | None],
        none: dict[str, torch.Tensor | None],
        form: tuple[bool, bool],
        waits: tuple[Any, Any, bool],
    ) -> _Dispatched:
        """Dispatch along a handle.

        Args:
            sizes: arguments that are None or the handle's own.
            none: arguments that are None.
            form: do_expand, use_tma_aligned_col_major_sf.
        """
        session, checks = self._session(), self._session().checks
        if not isinstance(handle, EPHandle):
            checks.fail("handle", "what dispatch returned", type(handle).__name__)
        (do_expand, columns_first), event = form, self._after(*waits[:2])
        routing = self._buffer._usable(handle.routing)
        looks = routing.by_expert and not do_expand and not handle.has_looked
        with routing.batch.turns(*[constants.DISPATCH] * (1 + looks)):
            checks.none("handle", **none)
            for name, size in sizes.items():
                known = getattr(handle, name)
                if size is not None and size != known:
                    checks.fail(name, f"None or {known}, as the handle was made for", size)
            if do_expand and not routing.by_expert:
                checks.fail("do_expand", "False, as the handle was made without it", do_expand)
            if routing.by_expert and not do_expand:
                handle.look()
                event = self._after(event, EventOverlap())  # the current stream writes it
            received, done = self._buffer._dispatch_along(
                x, routing, topk_weights, not routing.by_expert, (event, waits[2], False)
            )
        with StreamWork(session, done, waits[2]) as work:
            with work.allocating():
                received = with_padding(handle.padding, received)
                if routing.by_expert and not do_expand:
                    received = by_token(handle, received)
                rows = column_major(received.x) if columns_first else received.x
            done = work.finish((), (*parts_of(rows), *received, *handle.tensors()))
        return rows, received.topk_idx, received.topk_weights, handle, done

    @staticmethod
    def _after(first: Any, second: Any) -> EventOverlap | None:
        """The event that an operation waits for, or None for all work of the current stream.

        The current stream waits itself for two events, or one without a first one.
        """
        given = [
            EventOverlap(one) if isinstance(one, EventHandle) else one for one in (first, second)
        ]
        wrong = [one for one in given if one is not None and not isinstance(one, EventOverlap)]
        if wrong or given[1] is None:
            return wrong[0] if wrong else given[0]  # a wrong one is for the operation to refuse
        for event in given:
            if event is not None and event.event is not None:
                event.current_stream_wait()
        return None
