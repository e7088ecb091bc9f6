"""The buffers of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import crossdock.torch as xd

from ._options import CommOverlapType, UserBufferQuantizationMode, layer_configs, refuse
from ._overlap import (
    CommOverlap,
    CommOverlapCore,
    CommOverlapHelper,
    CommOverlapP2P,
    refuse_cublasmp,
)

__all__ = ["destroy_ub", "get_ub", "initialize_ub"]

_helper: CommOverlapHelper | None = None
_buffers: dict[str, CommOverlapCore] = {}


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Mapping[str, Any]] | Sequence[Mapping] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
    *,
    comm: xd.Comm | None = None,
) -> None:
    """Makes the buffers of all layers. Collective.

    Args:
        shape: ``[tokens, hidden]``, tokens of all ranks that have a layer together.
        tp_size: their number: so many ranks in a row of torch.distributed's default group, or all
            ranks as `crossdock.torch.init` finds them.
        use_fp8, quantization_modes: no fp8: see the page.
        dtype: of activations.
        ub_cfgs: options per layer and pass, such as ``{"fc1_fprop": {"aggregate": True}}``; or a
            list with one such dictionary.
        bootstrap_backend: backend of the groups through which the ranks meet; None = that of the
            default group.
        with_cublasmp: False.
        comm: Crossdock's communicator of the ranks that have a layer together, which stays the
            caller's; None = one of its own.

    Raises:
        RuntimeError: there are buffers already.
        TypeError, ValueError: an option that is unknown or refused, by its name.
        CrossdockError: as `crossdock.torch.init` and `crossdock.torch.tp.TpContext`.
    """
    global _helper
    if _helper is not None:
        raise RuntimeError("initialize_ub: there are buffers already: call destroy_ub() first")
    _refuse_fp8(use_fp8, quantization_modes)
    refuse_cublasmp("with_cublasmp", with_cublasmp)
    configs = layer_configs(_single(ub_cfgs), tp_size)
    for name, config in configs.items():
        if config["fp8_buf"]:
            refuse(f"ub_cfgs[{name!r}]['fp8_buf']", True, _NO_FP8)
    helper = CommOverlapHelper(_ranks_in_a_row(tp_size, bootstrap_backend, comm), comm=comm)
    try:
        for name, config in configs.items():
            _buffers[name] = _make_buffer(list(shape), dtype, helper, tp_size, config)
    except BaseException:
        _buffers.clear()
        helper.close()
        raise
    _helper = helper


def get_ub(name: str, use_fp8: bool = False) -> CommOverlapCore:
    """The buffer of a layer and pass, such as "fc1_fprop".

    Raises:
        RuntimeError: there are none: call initialize_ub first.
        ValueError: there is none of that name; `use_fp8`.
    """
    if not _buffers:
        raise RuntimeError("get_ub: there are no buffers: call initialize_ub() first")
    if use_fp8:
        refuse("use_fp8", use_fp8, _NO_FP8)
    if name not in _buffers:
        raise ValueError(f"name: expected one of {', '.join(_buffers)}; got {name!r}")
    return _buffers[name]


def destroy_ub() -> None:
    """Frees the buffers. Local; does nothing where there are none."""
    global _helper
    _buffers.clear()
    if _helper is not None:
        _helper.close()
    _helper = None


_NO_FP8 = "buffers hold no fp8; crossdock.torch.tp has products of fp8. Expected none"


def _refuse_fp8(use_fp8: bool, modes: Sequence[UserBufferQuantizationMode] | None) -> None:
    if use_fp8:
        refuse("use_fp8", use_fp8, _NO_FP8)
    for mode in modes or ():
        if mode != UserBufferQuantizationMode.NONE:
            refuse("quantization_modes", mode, _NO_FP8)


def _single(configs: Any) -> Mapping[str, Mapping[str, Any]]:
    """One dictionary of layers: a list has one for each quantisation mode."""
    if configs is None:
        return {}
    if isinstance(configs, Sequence) and not isinstance(configs, str):
        if len(configs) != 1:
            refuse("ub_cfgs", configs, "expected one dictionary, as for quantization_modes")
        configs = configs[0]
    if not isinstance(configs, Mapping):
        raise TypeError(f"ub_cfgs: expected a dictionary, got {configs!r}")
    return configs


def _ranks_in_a_row(tp_size: int, backend: str | None, comm: xd.Comm | None) -> Any:
    """The group of the ranks that have a layer together; None = as `crossdock.torch.init`."""
    if comm is not None or not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.get_world_size()
    if tp_size < 1 or world % tp_size:
        refuse("tp_size", tp_size, f"expected a divisor of the default group's {world} ranks")
    if tp_size == world and backend is None:
        return dist.group.WORLD
    ranks = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
    return dist.new_subgroups_by_enumeration(ranks, backend=backend)[0]


def _make_buffer(
    shape: list[int],
    dtype: torch.dtype,
    helper: CommOverlapHelper,
    tp_size: int,
    config: Mapping[str, Any],
) -> CommOverlapCore:
    comm_type = CommOverlapType.RS if config["is_reduce_scatter"] else CommOverlapType.AG
    common: dict[str, Any] = {
        "comm_type": comm_type,
        "comm_cga_size": config["cga_size"],
        "gemm_priority": config["gemm_priority"],
        "comm_priority": config["comm_priority"],
        "num_comm_sm": config["num_sm"],
        "set_sm_margin": config["set_sm_margin"],
        "atomic_gemm": config["atomic_gemm"],
    }
    if config["method"] in ("ring_exchange", "external"):
        return CommOverlapP2P(
            shape,
            dtype,
            helper,
            tp_size,
            use_ce=config["use_ce"],
            aggregate=config["aggregate"],
            **common,
        )
    return CommOverlap(
        shape,
        dtype,
        helper,
        tp_size,
        num_splits=config["num_splits"],
        rs_overlap_first_gemm=config["pipeline_rs_overlap_first_gemm"],
        **common,
    )
