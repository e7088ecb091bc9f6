"""The names of SGLang that the plug-in uses, and the versions that it is tested with."""

from __future__ import annotations

import dataclasses

from crossdock._engine import Engine

_DISPATCHERS = "srt/layers/moe/token_dispatcher"
_QUANTISER = "sglang_per_token_group_quant_fp8"

ENGINE = Engine(
    title="SGLang",
    package="sglang",
    tested=("0.5.23",),
    names={
        f"{_DISPATCHERS}/deepep.py": {
            "Buffer": None,
            "Config": None,
            "use_deepep": None,
            "_deepep_import_error": None,
            _QUANTISER: None,
        },
        f"{_DISPATCHERS}/deepep_v2.py": {
            "ElasticBuffer": None,
            "use_deepep_v2": None,
            "_deepep_v2_import_error": None,
            _QUANTISER: None,
        },
    },
    callers=(f"{_DISPATCHERS}/deepep.py", f"{_DISPATCHERS}/deepep_v2.py"),
    instead="--moe-a2a-backend none without XD_ENGINE",
    backends="--moe-a2a-backend deepep and deepep_v2",
)

_IMPL = "_DeepEPDispatcherImpl"

# The classes of ours, which are SGLang's but for what these ask a buffer for.
OWN = dataclasses.replace(
    ENGINE,
    names={
        **ENGINE.names,
        f"{_DISPATCHERS}/deepep.py": {
            **ENGINE.names[f"{_DISPATCHERS}/deepep.py"],
            "_deepep_precompile_tp_barrier": "",
            "DeepEPConfig.get_instance": "cls",
            "DeepEPConfig.num_sms": None,
            **{
                f"{_IMPL}Base.{name}": None
                for name in (
                    "group",
                    "handle",
                    "hidden_size",
                    "num_experts",
                    "num_max_dispatch_tokens_per_rank",
                    "overlap_args",
                    "params_dtype",
                    "use_fp8",
                    "use_mxfp4",
                    "use_mxfp8",
                    "use_nvfp4",
                )
            },
            f"{_IMPL}Normal._combine_core": "self, x, previous_event",
            f"{_IMPL}Normal._dispatch_core": "self, x, topk_ids, topk_weights, previous_event",
            f"{_IMPL}LowLatency._combine_core": "self, hidden_states, topk_ids, topk_weights",
            f"{_IMPL}LowLatency._dispatch_core": "self, hidden_states, topk_ids, topk_weights",
            f"{_IMPL}LowLatency._get_buffer": "self",
            f"{_IMPL}LowLatency.return_recv_hook": None,
        },
        "srt/batch_overlap/single_batch_overlap.py": {
            f"CombineOverlapArgs.{name}": None for name in ("overlap", "stream", "wait_event")
        },
        "srt/eplb/expert_distribution.py": {
            "get_global_expert_distribution_recorder": "",
            "ExpertDistributionRecorder.on_deepep_dispatch_normal": (
                "self, local_physical_count_of_layer, num_tokens_per_rank, "
                "num_tokens_per_rdma_rank, num_tokens_per_expert"
            ),
        },
        "srt/layers/deep_gemm_wrapper/configurer.py": {
            "DEEPGEMM_BLACKWELL": None,
            "ENABLE_JIT_DEEPGEMM": None,
        },
        "srt/layers/moe/utils.py": {"get_deepep_config": ""},
        "srt/runtime_context.py": {"get_resources": "", "get_server_args": ""},
    },
    instead="XD_ENGINE=deep_ep, --moe-a2a-backend none without XD_ENGINE",
    way="has classes of its own for",
    backends="--moe-a2a-backend deepep, and is DeepEP for deepep_v2",
)
