"""vLLM's layers whose experts take one tensor of rows: high throughput, and DeepEP 2's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

import crossdock.torch as xd
from crossdock.compat._traffic import Batch, BulkReturn, FewReturn, dispatch_bulk, dispatch_few

from ._layers import (
    PrepareAndFinalize,
    Prepared,
    Receiver,
    in_blocks,
    quantised_later,
    reads_all_rows,
)
from ._manager import Handle

__all__ = ["CrossdockStandard"]

_Groups = tuple[xd.LowLatencyGroup | None, xd.EpGroup | None]

# Tokens of a rank up to which rows go through a low-latency group, whose memory grows with them.
_FEW = 512


class CrossdockStandard(PrepareAndFinalize):
    """Rows ``[N, H]``, one per (token, rank), by source rank, then token.

    Args:
        buffer: the manager's handle.
        num_dispatchers, dp_size: ranks.
        rank_expert_offset: the first expert of this rank.
        num_experts: of all; None = in DeepEP's high-throughput place, where experts take no -1 and
            two micro-batches take turns.
        num_topk, use_fp8_dispatch: not read: batches say them.
        use_cudagraph: whether shapes are static: there is memory for the rows of as many tokens per
            rank as the next power of two, and no host waits.
        sp_size: ranks that share a DP rank's tokens.
    """

    def __init__(
        self,
        buffer: Handle,
        num_dispatchers: int,
        dp_size: int,
        rank_expert_offset: int,
        num_experts: int | None = None,
        num_topk: int | None = None,
        use_fp8_dispatch: bool = False,
        use_cudagraph: bool = False,
        sp_size: int = 1,
    ) -> None:
        super().__init__(buffer, num_dispatchers)
        self._first = rank_expert_offset
        self._in_turns = num_experts is None
        self._static = use_cudagraph
        self._shared_by = sp_size
        self._groups: dict[Any, _Groups] = {}

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Standard."""
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """None: experts need not know."""
        return None

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Receiver:
        """Sends rows ``[M, H]`` to the ranks of their experts ``[M, K]``. Collective.

        Rows are quantised on their way if experts want blocks of 128, by vLLM if they want other
        blocks or MXFP8, and else when they have come.
        """
        self.handle.manager.traffic.look()
        a1 = self.weighted_input(a1, topk_weights, apply_router_weight_on_input)
        rows, scales, way = _quantised(a1, quant_config, defer_input_quant)
        later = not defer_input_quant and scales is None and way is None
        most = self._most_tokens(len(a1))
        few, bulk = self._groups_for(a1, topk_ids.shape[1], num_experts, scales is not None)
        how: dict[str, Any] = {
            "quantise": way,
            "most": most,
            "cleared": most is not None and later and reads_all_rows(quant_config),
        }
        if self._in_turns:
            dbo_yield_and_switch_from_compute_to_comm()
            self._used_here(rows, scales, topk_ids, topk_weights)
        choices = topk_ids, topk_weights.float()
        if few is not None and most is not None and most <= few.max_tokens_per_rank:
            batch = dispatch_few(few, rows, *choices, **how)
        else:
            assert bulk is not None
            batch = dispatch_bulk(bulk, rows, scales, *choices, **how)
        self.back[dbo_current_ubatch_id()] = batch.back
        if self._in_turns:
            dbo_switch_to_compute_sync()
        return lambda: self._received(batch, num_experts, quant_config, later)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Begins to write the sums over all ranks to output ``[M, H]``; the result waits for them.

        Experts' results are weighted and summed for each row before, if they are not already.
        """
        back = self.take(dbo_current_ubatch_id())
        rows = _reduced(
            back,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        if not self._in_turns:
            end: Callable[[], None] = back.start(rows, output)
            return end
        dbo_yield_and_switch_from_compute_to_comm()
        self._used_here(rows, output)
        later = None
        if dbo_enabled():
            back.combine(rows, output)
        else:
            later = back.start(rows, output)
        dbo_switch_to_compute()

        def receive() -> None:
            if later is not None:
                later()
            dbo_switch_to_comm()
            dbo_yield_and_switch_from_comm_to_compute()

        return receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Writes the sums to output: as `finalize_async`, whole. Not with two micro-batches."""
        back = self.take(dbo_current_ubatch_id())
        given = (fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)
        back.combine(_reduced(back, *given, weight_and_reduce_impl), output)

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reduce_impl: Any
    ) -> torch.Tensor | None:
        """Memory that peers can read, for results that experts have weighted and summed."""
        back: FewReturn | BulkReturn | None = self.back[dbo_current_ubatch_id()]
        if back is None or not isinstance(reduce_impl, TopKWeightAndReduceNoOP):
            return None
        return back.results(tuple(shape), dtype)

    def _received(self, batch: Batch, num_experts: int, config: Any, later: bool) -> Prepared:
        """The batch as experts take it."""
        rows, scales, ids = batch.tokens, batch.scales, batch.topk_idx
        self._used_here(rows, scales, ids, batch.weights, batch.counts, batch.ends)
        absent = -1
        if self._in_turns:  # an expert of another rank
            absent = num_experts - 1 if self._first == 0 else 0
        if self._first or absent != -1:
            ids = torch.where(ids < 0, absent, ids + self._first)
        meta = mk.ExpertTokensMetadata(
            batch.counts, batch.host_counts, psum_recv_per_rank=batch.ends
        )
        swizzled = config.is_scale_swizzled
        if later:
            rows, scales = quantised_later(
                rows, config, config.quant_dtype, False, is_scale_swizzled=swizzled
            )
        elif scales is not None and config.quant_dtype == "mxfp8" and swizzled:
            scales = swizzle_mxfp8_scale(scales, M=rows.shape[0], K=rows.shape[1])
        return rows, scales, meta, ids, batch.weights

    def _most_tokens(self, here: int) -> int | None:
        """Tokens of any rank, at most, as all ranks know it; None: hosts wait for their number."""
        if not self._static:
            return None
        told = get_forward_context().dp_metadata
        if told is not None:
            here = -(-int(told.num_tokens_across_dp_cpu.max()) // self._shared_by)
        return min(1 << max(here - 1, 0).bit_length(), self.handle.most)

    def _groups_for(
        self, rows: torch.Tensor, topk: int, num_experts: int, quantised: bool
    ) -> _Groups:
        """The groups that batches of such rows go through. Collective the first time.

        Where both may be needed both are made, so that none is missing when graphs are captured.
        """
        manager, most = self.handle
        columns = rows.shape[1]
        key = (rows.device, rows.dtype, columns, topk, num_experts, quantised, manager.num_sms)
        if key not in self._groups:
            sizes = {
                "num_experts": num_experts,
                "max_topk": topk,
                "hidden": columns,
                "dtype": rows.dtype,
                "num_sms": manager.num_sms,
            }
            few = bulk = None
            if self._static and not quantised:  # such groups take rows that dispatch quantises
                few = manager.traffic.few(
                    rows.device, receive="by_rank", max_tokens_per_rank=min(most, _FEW), **sizes
                )
            if few is None or most > _FEW:
                bulk = manager.traffic.bulk(
                    rows.device, layout="rank_major", max_tokens_per_rank=most, **sizes
                )
            self._groups[key] = few, bulk
        return self._groups[key]

    def _used_here(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the memory of tensors of the other stream of two micro-batches."""
        if not dbo_enabled():
            return
        comm = next(one.comm for pair in self._groups.values() for one in pair if one is not None)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                comm.record_stream(tensor, torch.cuda.current_stream(tensor.device))


def _quantised(
    rows: torch.Tensor, config: Any, deferred: bool
) -> tuple[torch.Tensor, torch.Tensor | None, str | None]:
    """Rows to send, scales beside them, and how dispatch quantises them."""
    if deferred or not (config.is_block_quantized or config.quant_dtype == "mxfp8"):
        return rows, None, None
    if in_blocks(config, rows.shape[1], rows.dtype):
        powers = is_deep_gemm_e8m0_used()
        return rows, None, "fp8_block128_pow2" if powers else "fp8_block128"
    made, scales = moe_kernel_quantize_input(
        rows,
        config.a1_scale,
        quant_dtype=config.quant_dtype,
        per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape,
        is_scale_swizzled=False,  # each row travels with its own
        mx_alignment=config.mx_alignment,
    )
    return made, scales, None


def _reduced(
    back: FewReturn | BulkReturn,
    results: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    on_input: bool,
    reduce_impl: Any,
) -> torch.Tensor:
    """``[N, H]``: experts' results, weighted and summed for each row."""
    if results.numel() == 0 or isinstance(reduce_impl, TopKWeightAndReduceNoOP):
        return results
    if isinstance(reduce_impl, TopKWeightAndReduceDelegate):
        reduce_impl = TopKWeightAndReduceContiguous()
    out = back.results((len(ids), results.shape[-1]), results.dtype)
    reduced: torch.Tensor = reduce_impl.apply(out, results, weights, ids, on_input)
    return reduced
