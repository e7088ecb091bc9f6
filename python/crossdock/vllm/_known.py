"""The names of vLLM that the plug-in uses, and the versions that it is tested with."""

from __future__ import annotations

import dataclasses

from crossdock._engine import Engine

_LAYERS = "model_executor/layers/fused_moe"
_PREPARE = f"{_LAYERS}/prepare_finalize"
_MANAGERS = "distributed/device_communicators/all2all.py"
_BASE = "distributed/device_communicators/base_device_communicator.py"

ENGINE = Engine(
    title="vLLM",
    package="vllm",
    tested=("0.33.0",),
    names={
        "utils/import_utils.py": {
            "_has_module": "module_name",
            "has_deep_ep": "",
            "has_deep_ep_v2": "",
            "deep_ep_v2_unavailable_reason": "",
        },
        _MANAGERS: {
            "DeepEPAll2AllManagerBase.handle_cache": None,
            "DeepEPHTAll2AllManager.set_num_sms": "self, num_sms",
            "DeepEPLLAll2AllManager.clean_buffers": "self",
            "DeepEPV2All2AllManager._check_gin_support": "self, group",
        },
        _BASE: {"All2AllManagerBase.cpu_group": None, "Cache._cache": None},
        f"{_LAYERS}/all2all_utils.py": {
            "DEEPEP_QUANT_BLOCK_SHAPE": None,
            "DeepEPHTPrepareAndFinalize": None,
            "DeepEPLLPrepareAndFinalize": None,
            "DeepEPV2PrepareAndFinalize": None,
        },
        f"{_PREPARE}/deepep_ht.py": {"DeepEPHTPrepareAndFinalize": None},
        f"{_PREPARE}/deepep_ll.py": {
            "DEEPEP_QUANT_BLOCK_SHAPE": None,
            "DeepEPLLPrepareAndFinalize": None,
        },
        f"{_PREPARE}/deepep_v2.py": {"DeepEPV2PrepareAndFinalize": None},
    },
    callers=(
        _MANAGERS,
        f"{_PREPARE}/deepep_ht.py",
        f"{_PREPARE}/deepep_ll.py",
        f"{_PREPARE}/deepep_v2.py",
    ),
    instead="--all2all-backend allgather_reducescatter without XD_ENGINE",
    backends="deepep_high_throughput, deepep_low_latency and deepep_v2",
)

_KERNEL = f"{_LAYERS}/modular_kernel.py"
_MICRO_BATCHES = "v1/worker/ubatching.py"
_TO_PREPARE = (
    "self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, "
    "quant_config, defer_input_quant"
)
_TO_FINALIZE = (
    "self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, "
    "weight_and_reduce_impl"
)
_TO_REDUCE = (
    "self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input"
)
_REDUCERS = ("Contiguous", "Delegate", "NoOP")

# The classes of ours, and what they stand on. vLLM makes them as it makes those of `ENGINE`.
OWN = dataclasses.replace(
    ENGINE,
    names={
        "config/parallel.py": {
            "ParallelConfig.all2all_backend": None,
            "ParallelConfig.enable_fault_tolerance": None,
        },
        "config/scheduler.py": {"SchedulerConfig.max_num_batched_tokens": None},
        "config/vllm.py": {"get_current_vllm_config": ""},
        "envs.py": {"VLLM_DEEPEPLL_NVFP4_DISPATCH": None},
        "forward_context.py": {
            "get_forward_context": "",
            "ForwardContext.dp_metadata": None,
            "DPMetadata.num_tokens_across_dp_cpu": None,
        },
        "utils/import_utils.py": {"has_deep_ep": "", "has_deep_ep_v2": ""},
        "utils/deep_gemm.py": {"is_deep_gemm_e8m0_used": ""},
        _BASE: {
            "All2AllManagerBase.__init__": "self, cpu_group, tcp_store_group",
            "All2AllManagerBase.clean_buffers": "self",
            "All2AllManagerBase.cpu_group": None,
            "All2AllManagerBase.destroy": "self",
            "All2AllManagerBase.get_handle": "self, kwargs",
            "All2AllManagerBase.max_sms_used": "self",
            "All2AllManagerBase.query_active_mask": "self",
            "All2AllManagerBase.query_fault": "self",
            "All2AllManagerBase.set_num_sms": "self, num_sms",
            "All2AllManagerBase.support_fault_tolerance": None,
            "All2AllManagerBase.world_size": None,
        },
        _MANAGERS: {
            "DeepEPHTAll2AllManager.__init__": "self, cpu_group, tcp_store_group",
            "DeepEPLLAll2AllManager.__init__": "self, cpu_group, tcp_store_group",
            "DeepEPLLAll2AllManager._make_all2all_kwargs": (
                "self, max_num_tokens_per_dp_rank, token_hidden_size, num_ep_ranks, "
                "num_global_experts, num_local_experts"
            ),
            "DeepEPV2All2AllManager.__init__": "self, cpu_group, tcp_store_group, device_group",
            "DeepEPV2All2AllManager._make_all2all_kwargs": (
                "self, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch"
            ),
        },
        f"{_LAYERS}/all2all_utils.py": ENGINE.names[f"{_LAYERS}/all2all_utils.py"],
        f"{_LAYERS}/config.py": {
            f"FusedMoEQuantConfig.{name}": "self" if name != "mx_alignment" else None
            for name in (
                "a1_gscale",
                "a1_scale",
                "a2_scale",
                "block_shape",
                "is_block_quantized",
                "mx_alignment",
                "per_act_token_quant",
                "quant_dtype",
            )
        }
        | {"FusedMoEQuantConfig.is_scale_swizzled": None},
        _KERNEL: {
            "ExpertTokensMetadata.expert_num_tokens": None,
            "ExpertTokensMetadata.expert_num_tokens_cpu": None,
            "ExpertTokensMetadata.psum_recv_per_rank": None,
            "FusedMoEActivationFormat.BatchedExperts": None,
            "FusedMoEActivationFormat.Standard": None,
            "FusedMoEExperts.supports_packed_ue8m0_act_scales": "self",
            "FusedMoEPrepareAndFinalize.activation_format": "self",
            "FusedMoEPrepareAndFinalize.allocate_fused_expert_output": (
                "self, shape, dtype, device, weight_and_reduce_impl"
            ),
            "FusedMoEPrepareAndFinalize.max_num_tokens_per_rank": "self",
            "FusedMoEPrepareAndFinalize.num_dispatchers": "self",
            "FusedMoEPrepareAndFinalize.output_is_reduced": "self",
            "FusedMoEPrepareAndFinalize.post_init_setup": "self, fused_experts",
            "FusedMoEPrepareAndFinalize.supports_async": "self",
            "FusedMoEPrepareAndFinalize.topk_indices_dtype": "self",
            "FusedMoEPrepareAndFinalizeModular.finalize": _TO_FINALIZE,
            "FusedMoEPrepareAndFinalizeModular.finalize_async": _TO_FINALIZE,
            "FusedMoEPrepareAndFinalizeModular.prepare": _TO_PREPARE,
            "FusedMoEPrepareAndFinalizeModular.prepare_async": _TO_PREPARE,
        },
        f"{_LAYERS}/topk_weight_and_reduce.py": {
            f"TopKWeightAndReduce{name}.apply": _TO_REDUCE for name in _REDUCERS
        },
        f"{_LAYERS}/utils.py": {
            "moe_kernel_quantize_input": (
                "A, A_scale, quant_dtype, per_act_token_quant, block_shape, is_scale_swizzled, "
                "is_scale_transposed, quantization_emulation, mx_alignment"
            ),
            "normalize_batched_scales_shape": "scales, num_experts",
        },
        "model_executor/layers/quantization/utils/mxfp8_utils.py": {
            "swizzle_mxfp8_scale": "sf, M, K"
        },
        _MICRO_BATCHES: {
            "dbo_current_ubatch_id": "",
            "dbo_enabled": "",
            "dbo_maybe_run_recv_hook": None,
            "dbo_switch_to_comm": None,
            "dbo_switch_to_compute": None,
            "dbo_switch_to_compute_sync": None,
            "dbo_yield_and_switch_from_comm_to_compute": None,
            "dbo_yield_and_switch_from_compute_to_comm": None,
        },
        f"{_PREPARE}/deepep_ht.py": {
            "DeepEPHTPrepareAndFinalize.__init__": (
                "self, buffer, num_dispatchers, dp_size, rank_expert_offset"
            ),
            "DeepEPHTPrepareAndFinalize.maybe_roundup_layer_hidden_size": "hidden_size, dtype",
        },
        f"{_PREPARE}/deepep_ll.py": {
            "DeepEPLLPrepareAndFinalize.__init__": (
                "self, buffer, max_tokens_per_rank, num_dispatchers, use_fp8_dispatch, "
                "global_to_physical, physical_to_global, local_expert_global_ids"
            ),
            "DeepEPLLPrepareAndFinalize.maybe_roundup_layer_hidden_size": "hidden_size",
        },
        f"{_PREPARE}/deepep_v2.py": {
            "DeepEPV2PrepareAndFinalize.__init__": (
                "self, buffer, num_dispatchers, dp_size, rank_expert_offset, num_experts, "
                "num_topk, use_fp8_dispatch, use_cudagraph, sp_size"
            ),
            "DeepEPV2PrepareAndFinalize.maybe_roundup_layer_hidden_size": "hidden_size, dtype",
        },
    },
    callers=(),
    instead="XD_ENGINE=deep_ep, --all2all-backend allgather_reducescatter without XD_ENGINE",
    way="has classes of its own for",
)
