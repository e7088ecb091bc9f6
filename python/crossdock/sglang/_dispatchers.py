"""The two kinds of traffic of SGLang's DeepEP dispatcher, on Crossdock's operations themselves.

Stages, hooks, types of rows and overlap stay SGLang's: only what its classes ask a buffer for is
done here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe.token_dispatcher.deepep import (
    DeepEPConfig,
    _deepep_precompile_tp_barrier,
    _DeepEPDispatcherImplLowLatency,
    _DeepEPDispatcherImplNormal,
)
from sglang.srt.layers.moe.utils import get_deepep_config
from sglang.srt.runtime_context import get_resources, get_server_args

import crossdock.torch as xd
from crossdock._core import constants
from crossdock.compat._traffic import Traffic, beside, dispatch_bulk, telling
from crossdock.deep_ep.utils import EventOverlap

__all__ = ["CrossdockLowLatency", "CrossdockNormal"]

_ALIGNMENT = 128  # of the numbers of rows that DeepGEMM is told
_KEY = "crossdock"  # in SGLang's buffers of this process
_FEWEST = 1024  # tokens that the group for prefill takes in any case


class _Done:
    """The event of an operation for which the current stream waits already."""

    def current_stream_wait(self) -> None:
        """Has nothing to do."""


_Received = tuple[Any, torch.Tensor, torch.Tensor, list[int], _Done]


def _traffic(group: Any) -> Traffic:
    """The communicator and groups of these ranks, for all layers."""
    kept = get_resources().buffers.setdefault(_KEY, {})
    if group not in kept:
        kept[group] = Traffic(group)
    found: Traffic = kept[group]
    return found


def _most_tokens() -> int:
    """Tokens of a rank in a batch of prefill, at most, as all ranks know it."""
    args = get_server_args()
    chunk = args.chunked_prefill_size or 0
    return max(_FEWEST, chunk if chunk > 0 else args.max_prefill_tokens)


class CrossdockNormal(_DeepEPDispatcherImplNormal):
    """Many tokens: a row per (token, rank), by source rank, then token, as many as come."""

    def _group(self, rows: torch.Tensor, topk: int) -> xd.EpGroup:
        """The group of such rows. Collective the first time."""
        return _traffic(self.group).bulk(
            rows.device,
            layout="rank_major",
            num_experts=self.num_experts,
            max_topk=topk,
            max_tokens_per_rank=_most_tokens(),
            hidden=self.hidden_size,
            dtype=self.params_dtype,
            num_sms=DeepEPConfig.get_instance().num_sms if get_deepep_config() else 0,
        )

    def _dispatch_core(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        previous_event: EventOverlap | None,
    ) -> _Received:
        rows, given = x if isinstance(x, tuple) else (x, None)
        scales = given
        if given is not None and given.dtype == torch.int32:  # four bytes that travel as they are
            scales = given.view(torch.float32)
        _traffic(self.group).look()
        group = self._group(rows, topk_ids.shape[1])
        _deepep_precompile_tp_barrier()
        weights = topk_weights.float()
        with beside(group.comm, previous_event, rows, scales, topk_ids, weights) as used_here:
            batch = dispatch_bulk(
                group, rows, scales, topk_ids, weights, quantise=None, most=None, cleared=False
            )
        used_here(batch.tokens, batch.scales, batch.topk_idx, batch.weights, batch.back.plan.data)
        self.handle = batch.back
        assert batch.host_counts is not None
        unit = _ALIGNMENT if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        counts = [-(-count // unit) * unit for count in batch.host_counts.tolist()]
        self._record(group, counts, topk_ids)
        received: Any = batch.tokens
        if batch.scales is not None and given is not None:
            received = batch.tokens, batch.scales.view(given.dtype)
        return received, batch.topk_idx, batch.weights, counts, _Done()

    def _record(self, group: xd.EpGroup, counts: list[int], topk_ids: torch.Tensor) -> None:
        """Tells SGLang's statistics where tokens have gone."""
        layout = group.routing_layout(topk_ids)
        get_global_expert_distribution_recorder().on_deepep_dispatch_normal(
            counts,
            num_tokens_per_rank=layout.rows_per_rank,
            num_tokens_per_rdma_rank=None,
            num_tokens_per_expert=layout.rows_per_expert,
        )

    def _combine_core(
        self, x: torch.Tensor, previous_event: EventOverlap | None
    ) -> tuple[torch.Tensor, _Done]:
        back: Any = self.handle
        _deepep_precompile_tp_barrier()
        out = x.new_empty(back.plan.num_tokens, x.shape[1])
        with beside(back.plan.group.comm, previous_event, x, out, back.plan.data):
            back.combine(x, out)
        return out, _Done()


class CrossdockLowLatency(_DeepEPDispatcherImplLowLatency):
    """Few tokens: rows in slots ``[L, S, H]`` of their expert."""

    handle: Any
    packed_recv_count: Any

    def _get_buffer(self) -> SimpleNamespace:
        """The part of a buffer that `dispatch_a` reads."""
        return SimpleNamespace(group_size=self.group.size())

    def _group(self, rows: torch.Tensor, topk: int) -> xd.LowLatencyGroup:
        """The group of such rows. Collective the first time."""
        return _traffic(self.group).few(
            rows.device,
            num_experts=self.num_experts,
            max_topk=topk,
            max_tokens_per_rank=self.num_max_dispatch_tokens_per_rank,
            hidden=self.hidden_size,
            dtype=self.params_dtype,
        )

    def _dispatch_core(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[Any, torch.Tensor, _Done, Callable[[], None]]:
        for name in ("use_nvfp4", "use_mxfp4", "use_mxfp8"):
            if getattr(self, name):
                raise ValueError(f"{name}: expected False, as rows are bfloat16 or FP8; got True")
        packed = self.use_fp8 and (
            deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and deep_gemm_wrapper.DEEPGEMM_BLACKWELL
        )
        way = False if not self.use_fp8 else "fp8_block128_e8m0" if packed else "fp8_block128"
        _traffic(self.group).look()
        group = self._group(hidden_states, topk_ids.shape[1])
        _deepep_precompile_tp_barrier()
        with telling(group, constants.LL_DISPATCH):
            slots = group.slots(
                hidden_states.shape[1],
                hidden_states.dtype,
                way,
                packed_scales=packed,
                column_major_scales=True,
            )
            slots.counts.zero_()  # experts look at them even if this fails on a GPU
        sent = xd.ll_dispatch_send(group, hidden_states, topk_ids, quantise=way)

        def hook() -> None:
            sent.receive(out=slots)

        self.handle, self.packed_recv_count = slots.plan, slots.counts
        rows = slots.tokens if slots.scales is None else (slots.tokens, slots.scales)
        if not self.return_recv_hook:
            hook()
        return rows, slots.counts, _Done(), hook

    def _combine_core(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, _Done, Callable[[], None]]:
        plan, overlap = self.handle, self.overlap_args
        where: Any = nullcontext()
        if overlap is not None:
            if overlap.overlap:
                plan.group.refuse(
                    constants.LL_COMBINE,
                    ValueError,
                    "overlap: expected False, as all rows are read at once and no signal is waited "
                    "for, got True",
                )
            overlap.stream.wait_event(overlap.wait_event)
            where = torch.cuda.stream(overlap.stream)
        out = hidden_states.new_empty(plan.num_tokens, hidden_states.shape[-1])
        with where:
            _deepep_precompile_tp_barrier()
            sent = xd.ll_combine_send(plan, hidden_states, topk_weights.float())

        def hook() -> None:
            if overlap is not None and out.is_cuda:  # operations of a group follow one another
                torch.cuda.current_stream(out.device).wait_stream(overlap.stream)
            sent.receive(out=out)

        if not self.return_recv_hook:
            hook()
        self.handle = self.packed_recv_count = None
        return out, _Done(), hook
