"""The names of vLLM that the plug-in uses, and the versions that it is tested with."""

from __future__ import annotations

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
