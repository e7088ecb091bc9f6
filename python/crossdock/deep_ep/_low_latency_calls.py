"""The methods of Buffer for few tokens, as in decoding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from crossdock import _core
from crossdock._core import constants

from ._agreement import text_of
from ._arguments import Rows
from ._config import also_named, require_positive
from ._low_latency import (
    MOST,
    RECEIVE,
    Hook,
    SlotHandle,
    allocate,
    check_finish,
    operate,
    read_shape,
    read_way,
    slot_routing,
    telling,
)
from ._plain import plain
from ._slot_group import Shape
from ._wire import number_of_wire
from .utils import EventOverlap

if TYPE_CHECKING:
    from ._groups import Groups

_T = TypeVar("_T")

# With ``overlap``, the keywords of DeepEP's forks by which combine begins before x is complete, and
# waits for a signal of each block of rows. Without it the forks read none of them.
_OF_OVERLAP = (
    "packed_recv_count",
    "comp_signal",
    "block_m",
    "threshold",
    "num_sms",
    "src_signals",
    "src_signal_expect_value",
)


def _names_foreign_arguments(function: Callable[..., _T]) -> Callable[..., _T]:
    """Names all keywords that a call has too many, as those of a fork of DeepEP."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> _T:
        foreign = [name for name in options if name not in known]
        if foreign:
            raise TypeError(
                f"{function.__name__}() got unexpected keyword arguments {', '.join(foreign)}: "
                "DeepEP 1.2 has none of that name, though a fork of it may"
            )
        return function(*args, **options)

    return checked


def _knows_overlap(combine: Callable[..., _T]) -> Callable[..., _T]:
    """Takes the keywords of forks for an x that is still being computed, and refuses such an x."""

    @functools.wraps(combine)
    def checked(self: LowLatencyCalls, *args: Any, overlap: bool = False, **options: Any) -> _T:
        rest = {name: value for name, value in options.items() if name not in _OF_OVERLAP}
        if overlap:
            given = inspect.signature(combine).bind(self, *args, **rest).arguments
            self._refuse_overlap(given["handle"])
        return combine(self, *args, **rest)

    vars(checked)["also_named"] = frozenset(("overlap", *_OF_OVERLAP))
    return checked


class LowLatencyCalls:
    """The part of Buffer that needs ``low_latency_mode``."""

    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    combine_wire: str
    _live_groups: Callable[[], Groups]

    @staticmethod
    @also_named(num_max_dispatch_tokens_per_rank="max_tokens")
    def get_low_latency_rdma_size_hint(
        max_tokens: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency operations of such sizes will take on a rank, at most.

        For ``num_rdma_bytes``, which is not read: the first dispatch takes what it needs.

        Args:
            max_tokens: also by its name in DeepEP, ``num_max_dispatch_tokens_per_rank``.
            hidden, num_ranks, num_experts: positive.

        Raises:
            ValueError: a number out of range.
        """
        require_positive(
            max_tokens=max_tokens, hidden=hidden, num_ranks=num_ranks, num_experts=num_experts
        )
        shape = Shape(max_tokens, hidden, num_experts, min(num_experts, constants.MAX_TOPK))
        cuda = torch.cuda.is_available() and _core.feature_available("cuda")
        device_type = constants.DEVICE_TYPES["cuda" if cuda else "cpu"]
        memory = _core.ll_group_memory(
            num_ranks=num_ranks, device_type=device_type, **shape.sizes(mask=False)
        )
        return memory["symmetric_bytes"] + memory["private_bytes"]

    @_names_foreign_arguments
    @plain
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, SlotHandle, EventOverlap, Hook | None]:
        """Copies each token's row to a slot of every expert that it has chosen. Collective.

        L = num_experts / W local experts with S = W * num_max_dispatch_tokens_per_rank slots each.
        Nothing waits for the host. The first call with certain sizes makes memory for them, which
        takes milliseconds and happens on all ranks together.

        Args:
            x: [T,H] bfloat16, T up to num_max_dispatch_tokens_per_rank.
            topk_idx: [T,K] int64; -1 = none, and so are an expert's later mentions in a row.
            num_max_dispatch_tokens_per_rank: up to 1024; equal on all ranks.
            num_experts: a multiple of the ranks.
            cumulative_local_expert_recv_stats: [L] int32, to which the counts are added.
            dispatch_wait_recv_cost_stats: [W] int64, to which is added how long each source was
                waited for, in nanoseconds.
            use_fp8: float8_e4m3fn with a scale per 128 columns; else bfloat16.
            round_scale: scales are powers of two.
            use_ue8m0: with `round_scale`: scales are e8m0, four in an int32.
            async_finish: the operation runs on the Buffer's stream, and the event stands for it.
            return_recv_hook: only send; calling the hook, once, receives, on its caller's stream.
                Hooks are called in the order of their dispatches, and two may be outstanding.

        Returns:
            ``recv_x`` [L,S,H], with `use_fp8` a pair with scales [L,S,H/128] float32 or [L,S,H/512]
            int32, which lie column by column; ``recv_count`` [L] int32; handle; event; hook, or
            None. The rows of expert e are the first ``recv_count[e]`` of its slots, by source rank,
            then token; what is behind them has no meaning.

        Raises:
            ValueError: a bad argument; ids that are no experts (InvalidArgument, on all ranks).
        """
        groups = self._low_latency("low_latency_dispatch")
        checks, shape, most = groups.session.checks, None, num_max_dispatch_tokens_per_rank
        load, wait = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        try:
            check_finish(checks, async_finish, return_recv_hook)
            shape = read_shape(checks, x, topk_idx, most, num_experts)
            if len(x) > most:
                checks.fail("x", f"at most {MOST} = {most} rows", len(x))
            way = read_way(checks, shape.hidden, use_fp8, round_scale, use_ue8m0)
            local = num_experts // self.group_size
            checks.optional(load, "cumulative_local_expert_recv_stats", (local,), torch.int32)
            ranks = (self.group_size,)
            checks.optional(wait, "dispatch_wait_recv_cost_stats", ranks, torch.int64)
        except Exception as error:
            groups.refuse_slots(shape, text_of(error))
            raise
        group = groups.slots_for(shape)

        made = allocate(group, way, use_ue8m0, len(x))
        (src_info, layout_range, *_), plan = made.handle, made.handle.routing.plan

        def run(phase: int) -> None:
            group.run(
                "dispatch",
                {
                    "tokens": x if phase != RECEIVE else None,
                    "topk_idx": topk_idx if phase != RECEIVE else None,
                    "plan": plan,
                    "recv_tokens": made.x,
                    "recv_scales": made.scales,
                    "counts": made.counts,
                    "source_ranges": layout_range,
                    "source_tokens": src_info,
                    "expert_load": load,
                    "wait_ns": wait,
                    "phase": phase,
                    "quantise": 0 if way is None else way.code,
                },
            )

        halves = group.dispatch_halves if return_recv_hook else None
        inputs = [x, topk_idx, load, wait]
        results = [*made[:3], src_info, layout_range, plan]
        event, hook = operate(group, run, inputs, results, async_finish, halves)
        rows = made.x if made.scales is None else (made.x, made.scales)
        return rows, made.counts, made.handle, event, hook

    @_knows_overlap
    @_names_foreign_arguments
    @plain
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sums each token's weighted results. Collective; a handle may be combined several times.

        Each rank sums its rows in float32 and rounds once; then the ranks' sums are added likewise.
        Of the keywords of DeepEP's forks that begin with a part of `x`, ``overlap`` is refused
        unless it is False, and the others mean nothing then.

        Args:
            x: [L,S,H] bfloat16: the result for each row that dispatch gave.
            topk_idx: [T,K] int64, as dispatch had it. Not read: the handle knows the routing.
            topk_weights: [T,K] float32.
            handle: from that dispatch.
            use_logfmt: sums travel as bfloat16 all the same, which is more exact, unless
                `Buffer.combine_wire` is "logfmt": then as float8 with a scale per 128 columns,
                which has fewer bytes than DeepEP's 10 bits.
            zero_copy: read what `get_next_low_latency_combine_buffer` gave, in place of `x`.
            async_finish, return_recv_hook: as in `low_latency_dispatch`.
            out: [T,H] bfloat16 to write; None = a new one.
            combine_wait_recv_cost_stats: as in `low_latency_dispatch`.

        Returns:
            ``combined_x`` [T,H], zero for a token that went nowhere; event; hook, or None.

        Raises:
            ValueError: a bad argument.
        """
        routing = slot_routing(self._low_latency("low_latency_combine"), handle)
        group, wait = routing.group, combine_wait_recv_cost_stats
        checks, batch = group.session.checks, (routing.num_tokens, routing.topk)
        sums = (routing.num_tokens, group.shape.hidden)
        with telling(group):
            check_finish(checks, async_finish, return_recv_hook)
            slots = (group.local_experts, group.num_slots, group.shape.hidden)
            checks.tensor(x, "x", slots, (torch.bfloat16,))
            checks.tensor(topk_idx, "topk_idx", batch, (torch.int64,))
            checks.tensor(topk_weights, "topk_weights", batch, (torch.float32,))
            checks.optional(out, "out", sums, torch.bfloat16)
            ranks = (self.group_size,)
            checks.optional(wait, "combine_wait_recv_cost_stats", ranks, torch.int64)
            wire = number_of_wire(
                self.combine_wire, group.device, bool(use_logfmt), apart=group.session.apart
            )
        rows = group.combine_buffer() if zero_copy else x

        if out is None:
            out = torch.empty(sums, dtype=torch.bfloat16, device=group.device)

        def run(phase: int) -> None:
            group.run(
                "combine",
                {
                    "plan": routing.plan,
                    "expert_out": rows if phase != RECEIVE else None,
                    "topk_weights": topk_weights if phase != RECEIVE else None,
                    "out": out,
                    "wait_ns": wait,
                    "phase": phase,
                    "wire": wire,
                },
            )

        halves = group.combine_halves if return_recv_hook else None
        inputs = [rows, topk_weights, routing.plan, wait]
        return out, *operate(group, run, inputs, [out], async_finish, halves)

    def get_next_low_latency_combine_buffer(self, handle: object) -> torch.Tensor:
        """[L,S,H] bfloat16, for the `x` of the next combine with ``zero_copy``. The same each time.

        Combine reads `x` wherever it lies, so this saves nothing over a tensor of the caller's. The
        current stream may write to it at once: it waits for what still reads it.
        """
        groups = self._low_latency("get_next_low_latency_combine_buffer")
        return slot_routing(groups, handle).group.combine_buffer()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing needs cleaning, so this does nothing but with ``enable_shrink``.

        There it is collective, brings the ranks that are not masked back into step, and forgets
        what is between dispatch and its hook: a rank that was unmasked on all sides can go on.
        """
        groups = self._live_groups()
        if self.enable_shrink:
            groups.reset_slots(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves out a rank from the next operation on, or no longer. Local.

        Raises:
            ValueError: the own rank, no rank, or a Buffer without ``enable_shrink``.
        """
        groups = self._shrinking("low_latency_update_mask_buffer")
        checks = groups.session.checks
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            expected = f"a rank from 0 to {self.group_size - 1}, and not this one"
            checks.fail("rank_to_mask", expected, rank_to_mask)
        groups.set_mask(rank_to_mask, bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each rank that is left out, by the caller or because it was lost; else 0.

        Args:
            mask_status: [W] int32.

        Raises:
            ValueError: another tensor, or a Buffer without ``enable_shrink``.
        """
        groups = self._shrinking("low_latency_query_mask_buffer")
        groups.session.checks.tensor(mask_status, "mask_status", (self.group_size,), (torch.int32,))
        groups.read_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is left out any more, in this rank's view. Local.

        Raises:
            ValueError: a Buffer without ``enable_shrink``.
        """
        groups = self._shrinking("low_latency_clean_mask_buffer")
        for rank in range(self.group_size):
            if rank != self.rank:
                groups.set_mask(rank, False)

    def _bring_back_in_step(self) -> None:
        """Does `clean_low_latency_buffer` for all sizes that have been used. Collective."""
        self._shrinking("_bring_back_in_step").reset_all_slots()

    def _refuse_overlap(self, handle: Any) -> NoReturn:
        """Refuses ``overlap`` in a combine, of which the peers hear."""
        groups = self._low_latency("low_latency_combine")
        routing = slot_routing(groups, handle)
        with telling(routing.group):
            expected = "False, as all rows of x are read at once and no signal is waited for"
            groups.session.checks.fail("overlap", expected, True)

    def _low_latency(self, method: str) -> Groups:
        if not self.low_latency_mode:
            raise ValueError(f"low_latency_mode: expected True for {method}(), got False")
        return self._live_groups()

    def _shrinking(self, method: str) -> Groups:
        if not self.enable_shrink:
            raise ValueError(f"enable_shrink: expected True for {method}(), got False")
        return self._low_latency(method)
