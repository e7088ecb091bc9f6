"""The names of SGLang that the plug-in uses, and the versions that it is tested with."""

from __future__ import annotations

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
