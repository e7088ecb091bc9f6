"""The buffers of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import crossdock.torch as xd

from ._fp8 import BYTES
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
_Mode = UserBufferQuantizationMode
_buffers: dict[tuple[str, _Mode], CommOverlapCore] = {}


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
        use_fp8: whether gathers have buffers of fp8, where `quantization_modes` is not given.
        quantization_modes: for each of them there are buffers; None = one, as `use_fp8` says.
        dtype: of activations.
        ub_cfgs: options per layer and pass, such as ``{"fc1_fprop": {"aggregate": True}}``; or a
            list with such a dictionary for each of `quantization_modes`.
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
    refuse_cublasmp("with_cublasmp", with_cublasmp)
    modes = _modes(use_fp8, quantization_modes)
    given = zip(modes, _each(ub_cfgs, len(modes)))
    configs = {mode: layer_configs(layers, tp_size, mode) for mode, layers in given}
    helper = CommOverlapHelper(_ranks_in_a_row(tp_size, bootstrap_backend, comm), comm=comm)
    try:
        for mode, layers in configs.items():
            for name, config in layers.items():
                kind = BYTES if config["fp8_buf"] else dtype
                _buffers[name, mode] = _make_buffer(list(shape), kind, helper, tp_size, config)
    except BaseException:
        _buffers.clear()
        helper.close()
        raise
    _helper = helper


def get_ub(name: str, use_fp8: bool = False) -> CommOverlapCore:
    """The buffer of a layer and pass, such as "fc1_fprop".

    Args:
        use_fp8: whether it is that of the mode FP8.

    Raises:
        RuntimeError: there are none: call initialize_ub first.
        ValueError: there is none of that name, or none of that mode.
    """
    if not _buffers:
        raise RuntimeError("get_ub: there are no buffers: call initialize_ub() first")
    mode = _Mode.FP8 if use_fp8 else _Mode.NONE
    names = [one for one, of in _buffers if of == mode]
    if not names:
        refuse("use_fp8", use_fp8, f"expected {mode} among the quantization_modes")
    if name not in names:
        raise ValueError(f"name: expected one of {', '.join(names)}; got {name!r}")
    return _buffers[name, mode]


def destroy_ub() -> None:
    """Frees the buffers. Local; does nothing where there are none."""
    global _helper
    _buffers.clear()
    if _helper is not None:
        _helper.close()
    _helper = None


def _modes(use_fp8: bool, modes: Any) -> list[_Mode]:
    """The modes of the buffers that are to be made."""
    if not modes:
        return [_Mode.FP8 if use_fp8 else _Mode.NONE]
    for mode in modes:
        if not isinstance(mode, _Mode):
            raise TypeError(f"quantization_modes: expected {_Mode.__name__}s, got {mode!r}")
    if len(set(modes)) != len(modes):
        refuse("quantization_modes", modes, "expected each mode once")
    return list(modes)


def _each(configs: Any, modes: int) -> list[Mapping[str, Mapping[str, Any]]]:
    """The options of layers for each mode: a list has a dictionary for each."""
    if not isinstance(configs, Sequence) or isinstance(configs, str):
        configs = [configs] * modes
    if len(configs) != modes:
        refuse("ub_cfgs", configs, f"expected {modes} dictionaries, as of quantization_modes")
    for one in configs:
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(f"ub_cfgs: expected a dictionary, got {one!r}")
    return [one or {} for one in configs]


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
