"""Words, layers and per-layer options, with TransformerEngine's defaults."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

__all__ = [
    "LAYERS",
    "CommOverlapAlgo",
    "CommOverlapType",
    "UserBufferQuantizationMode",
    "layer_configs",
    "refuse",
]


class CommOverlapType(enum.IntEnum):
    """The transfer beside a product."""

    RS = 0
    AG = 1


class CommOverlapAlgo(enum.IntEnum):
    """TransformerEngine's ways to overlap; no argument here takes one."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7
    EXTERNAL_BULK_OVERLAP_AG = 8


class UserBufferQuantizationMode(enum.Enum):
    """The type of the elements of a layer's buffers."""

    NONE = "none"
    FP8 = "fp8"


# The default method of every layer and pass.
LAYERS = {
    "qkv_fprop": "ring_exchange",
    "qkv_dgrad": "bulk",
    "qkv_wgrad": "bulk",
    "proj_fprop": "pipeline",
    "proj_dgrad": "ring_exchange",
    "proj_wgrad": "external",
    "fc1_fprop": "ring_exchange",
    "fc1_dgrad": "bulk",
    "fc1_wgrad": "bulk",
    "fc2_fprop": "pipeline",
    "fc2_dgrad": "ring_exchange",
    "fc2_wgrad": "external",
}
_METHODS = ("bulk", "external", "pipeline", "ring_exchange")
_SUMS = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
# Gradients whose rows may be summed and scattered by the product itself; the pass beside it has no
# transfer then.
_EITHER = {"qkv_dgrad": "qkv_wgrad", "fc1_dgrad": "fc1_wgrad"}


def refuse(option: str, value: Any, why: str) -> None:
    """Raises ValueError for an option that is not there."""
    raise ValueError(f"{option} = {value!r}: {why}")


def layer_configs(
    given: Mapping[str, Mapping[str, Any]],
    tp_size: int,
    mode: UserBufferQuantizationMode = UserBufferQuantizationMode.NONE,
) -> dict[str, dict]:
    """The options of every layer that has a buffer.

    Raises:
        TypeError, ValueError: a layer, a key or a method that TransformerEngine does not know, by
            its name; options that contradict one another.
    """
    for name, options in given.items():
        if name not in LAYERS:
            raise ValueError(f"ub_cfgs: expected layers of {', '.join(LAYERS)}; got {name!r}")
        if not isinstance(options, Mapping):
            raise TypeError(f"ub_cfgs[{name!r}]: expected a dictionary, got {options!r}")
    configs = {}
    for name in LAYERS:
        if name in configs or not _has_buffer(name, given):
            continue
        configs[name] = config = _layer_config(name, given.get(name, {}), tp_size)
        _set_fp8_buf(name, config, mode == UserBufferQuantizationMode.FP8)
    return configs


def _set_fp8_buf(name: str, config: dict[str, Any], quantised: bool) -> None:
    """As there, gathers of fp8 alone have buffers of it, whatever their option says."""
    if quantised and not config["is_reduce_scatter"]:
        config["fp8_buf"] = True
    elif config["fp8_buf"]:
        why = "no sums travel in fp8" if quantised else "expected quantization_modes=[FP8]"
        refuse(f"ub_cfgs[{name!r}]['fp8_buf']", True, why)


def _has_buffer(name: str, given: Mapping[str, Mapping[str, Any]]) -> bool:
    for dgrad, wgrad in _EITHER.items():
        if name == wgrad and given.get(dgrad, {}).get("method", "bulk") != "bulk":
            if name in given:
                raise ValueError(
                    f"ub_cfgs[{name!r}]: expected none, as {dgrad} with method "
                    f"{given[dgrad]['method']!r} sums its own rows"
                )
            return False
    return True


def _layer_config(name: str, given: Mapping[str, Any], tp_size: int) -> dict[str, Any]:
    method = given.get("method", LAYERS[name])
    if method not in _METHODS:
        raise ValueError(
            f"ub_cfgs[{name!r}]['method']: expected one of {', '.join(_METHODS)}; got {method!r}"
        )
    ring = method in ("ring_exchange", "external")
    config = {
        "method": method,
        "is_reduce_scatter": name in _SUMS or (name in _EITHER and method != "bulk"),
        "num_sm": 1 if ring else 16,
        "cga_size": 1 if ring else 2,
        "set_sm_margin": not ring,
        "num_splits": tp_size if ring else 4,
        "aggregate": False,
        "atomic_gemm": False,
        "use_ce": True,
        "fp8_buf": False,
        "comm_priority": 0,
        "gemm_priority": 0,
        "pipeline_rs_overlap_first_gemm": False,
    }
    for key in given:
        if key not in config:
            known = ", ".join(config)
            raise ValueError(f"ub_cfgs[{name!r}]: expected keys of {known}; got {key!r}")
    return config | dict(given)
