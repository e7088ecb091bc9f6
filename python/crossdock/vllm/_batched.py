"""vLLM's layers whose experts take slots: low latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.fused_moe.utils import normalize_batched_scales_shape
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
)

import crossdock.torch as xd
from crossdock._core import constants
from crossdock.compat._traffic import telling

from ._layers import (
    PrepareAndFinalize,
    Prepared,
    Receiver,
    in_blocks,
    later_scale,
    quantised_later,
    reads_all_rows,
)
from ._manager import Handle

__all__ = ["CrossdockBatched"]

_Hook = Callable[[], None]


class CrossdockBatched(PrepareAndFinalize):
    """Rows in slots ``[L, S, H]`` of their expert, S = `max_tokens_per_rank` * ranks.

    Args:
        buffer: the manager's handle.
        max_tokens_per_rank: tokens of a rank in one batch, at most.
        num_dispatchers: ranks.
        use_fp8_dispatch: whether experts want FP8 rows with a scale per 128 columns.
        global_to_physical: [E] the place of each expert where they are dealt round, else None.
        physical_to_global, local_expert_global_ids: not read.

    Raises:
        ValueError: vLLM's variable for NVFP4 rows is set, which do not travel.
    """

    def __init__(
        self,
        buffer: Handle,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: torch.Tensor | None = None,
        physical_to_global: torch.Tensor | None = None,
        local_expert_global_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__(buffer, num_dispatchers)
        if envs.VLLM_DEEPEPLL_NVFP4_DISPATCH:
            raise ValueError(
                "VLLM_DEEPEPLL_NVFP4_DISPATCH: expected 0, as rows are no NVFP4, got 1"
            )
        self._most = max_tokens_per_rank
        self._fp8 = use_fp8_dispatch
        self._packed = False
        self._places = global_to_physical
        self._groups: dict[Any, xd.LowLatencyGroup] = {}

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """BatchedExperts."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """As given."""
        return self._most

    def post_init_setup(self, fused_experts: Any) -> None:
        """Lets scales be powers of two, four in an int32, if experts take that."""
        self._packed = self._fp8 and bool(fused_experts.supports_packed_ue8m0_act_scales())

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
    ) -> tuple[_Hook, Receiver]:
        """Sends rows ``[M, H]`` to slots of their experts ``[M, K]``. Collective.

        Weights travel with them, and are those of finalize. With two micro-batches the hook takes
        in what has come, else it has come already.

        Raises:
            ValueError: experts want quantised rows that nothing here makes.
        """
        self.handle.manager.traffic.look()
        _check(quant_config, defer_input_quant, self._fp8, a1)
        a1 = self.weighted_input(a1, topk_weights, apply_router_weight_on_input)
        group = self._group(a1, topk_ids.shape[1], num_experts)
        ids = topk_ids
        if self._places is not None:
            ids = torch.where(ids < 0, -1, self._places[ids.clamp(min=0)].to(ids.dtype))
        way = False if not self._fp8 else "fp8_block128_e8m0" if self._packed else "fp8_block128"
        weights = None if apply_router_weight_on_input else topk_weights.float()
        place, going_on = dbo_current_ubatch_id(), self.handle.manager.traffic.going_on
        clear = not self._fp8 and reads_all_rows(quant_config)
        with telling(group, constants.LL_DISPATCH):
            slots = group.slots(
                a1.shape[1],
                a1.dtype,
                way,
                packed_scales=self._packed,
                column_major_scales=True,
            )
            slots.counts.zero_()  # experts look at them even if this fails on a GPU
            if clear:
                slots.tokens.zero_()
        self.back[place] = slots.plan
        hook = _nothing
        if dbo_enabled():
            sent = xd.ll_dispatch_send(group, a1, ids, weights, quantise=way)

            def hook() -> None:
                with going_on():
                    sent.receive(out=slots)
        else:
            with going_on():
                xd.ll_dispatch(group, a1, ids, weights, quantise=way, out=slots)
        return hook, lambda: self._received(slots, quant_config)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[_Hook, Callable[[], None]]:
        """Sends results ``[L, S, H]`` back; the hook writes their weighted sums to output."""
        plan, going_on = self._plan(weight_and_reduce_impl)
        dbo_maybe_run_recv_hook()
        sent = xd.ll_combine_send(plan, fused_expert_output)

        def hook() -> None:
            with going_on():
                sent.receive(out=output)

        return hook, _nothing

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Writes the weighted sums to output: as `finalize_async`, whole."""
        plan, going_on = self._plan(weight_and_reduce_impl)
        dbo_maybe_run_recv_hook()
        with going_on():
            xd.ll_combine(plan, fused_expert_output, out=output)

    def _plan(self, reduce_impl: Any) -> tuple[xd.SlotPlan, Any]:
        """The plan of this micro-batch, and what a lost rank is met with."""
        if not isinstance(reduce_impl, TopKWeightAndReduceDelegate):
            raise ValueError(
                "weight_and_reduce_impl: expected TopKWeightAndReduceDelegate, as combine weights "
                f"and sums, got {type(reduce_impl).__name__}"
            )
        return self.take(dbo_current_ubatch_id()), self.handle.manager.traffic.going_on

    def _received(self, slots: xd.Slots, config: Any) -> Prepared:
        """The slots as experts take them."""
        rows, scales = slots.tokens, slots.scales
        if not self._fp8:
            local, _, hidden = rows.shape
            dtype = None if config.quant_dtype == "nvfp4" else config.quant_dtype
            flat, scales = quantised_later(
                rows.view(-1, hidden), config, dtype, config.per_act_token_quant
            )
            rows = flat.view(local, -1, hidden)
            if dtype is not None:
                scales = normalize_batched_scales_shape(scales, local)
        meta = mk.ExpertTokensMetadata(slots.counts, None)
        return rows, scales, meta, None, None

    def _group(self, rows: torch.Tensor, topk: int, num_experts: int) -> xd.LowLatencyGroup:
        """The group of such rows. Collective the first time."""
        manager = self.handle.manager
        key = (rows.device, rows.dtype, rows.shape[1], topk, num_experts, manager.num_sms)
        if key not in self._groups:
            self._groups[key] = manager.traffic.few(
                rows.device,
                num_experts=num_experts,
                max_topk=topk,
                hidden=rows.shape[1],
                dtype=rows.dtype,
                num_sms=manager.num_sms,
                max_tokens_per_rank=self._most,
            )
        return self._groups[key]


def _nothing() -> None:
    """Ends what has ended already."""


def _check(config: Any, deferred: bool, fp8: bool, rows: torch.Tensor) -> None:
    """Refuses what low latency does not do, on all ranks alike."""
    if deferred:
        raise ValueError(
            "defer_input_quant: expected experts that take quantised rows, got True: choose other "
            "experts, or --all2all-backend deepep_v2"
        )
    if fp8 and not in_blocks(config, rows.shape[1], rows.dtype):
        raise ValueError(
            "a1: expected bfloat16 rows of a multiple of 128 columns, to be quantised; got "
            f"{rows.dtype} of shape {tuple(rows.shape)}"
        )
    scale = later_scale(config)
    if scale is None:
        scale = config.a2_scale
    if not fp8 and scale is not None and scale.numel() != 1:
        raise ValueError(
            f"a1_scale: expected one scale for all rows, got {scale.numel()}: slots of no row have "
            "none"
        )
