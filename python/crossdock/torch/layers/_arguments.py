"""The arguments with which a layer is made: checks, and the group that it makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from crossdock import _core
from crossdock._config import Overflow, fail_group
from crossdock._overlap import OverlapOption
from crossdock._quantise import WAYS
from crossdock._router import capacity_rows
from crossdock._wire import Wire, wire_number

from .._calls import SUMMABLE
from .._comm import Comm, default_comm
from .._experts import require_ordered
from .._group import EpGroup
from .placed import require_free

KNOWN_DTYPES = ", ".join(str(dtype) for dtype in SUMMABLE)


@contextlib.contextmanager
def peers_told(group: EpGroup | None, comm: Comm | None) -> Iterator[None]:
    """Tells peers of a bad argument, who are making a group for the layer; none where it is given.

    Without a communicator there are no peers.
    """
    try:
        yield
    except (TypeError, ValueError):
        if group is None:
            with contextlib.suppress(RuntimeError):
                fail_group((comm or default_comm()).core, _core.Group)
        raise


class Sizes(NamedTuple):
    hidden: int
    num_experts: int
    topk: int


def make_group(
    sizes: Sizes,
    comm: Comm | None,
    dtype: torch.dtype | None,
    combine_wire: Wire,
    max_tokens_per_rank: int | None,
    recv_capacity: int,
    overflow: Overflow,
    capacity_factor: float | None,
) -> EpGroup:
    if max_tokens_per_rank is None:
        raise ValueError("max_tokens_per_rank: expected a number, as no group is given; got None")
    comm = default_comm() if comm is None else comm
    experts, topk, ranks = sizes.num_experts, sizes.topk, comm.num_ranks
    alignment = alignment_of(torch.bfloat16)  # the largest: autocast may ask for it
    if capacity_factor is not None and not recv_capacity:
        recv_capacity = capacity_rows(
            capacity_factor, max_tokens_per_rank, topk, experts, ranks, alignment
        )
    return EpGroup(
        num_experts=experts,
        hidden=sizes.hidden,
        max_topk=topk,
        max_tokens_per_rank=max_tokens_per_rank,
        dtype=dtype or torch.get_default_dtype(),
        recv_capacity=recv_capacity,
        overflow=overflow,
        alignment=alignment,
        wire_formats=(combine_wire,),
        comm=comm,
    )


def check_factor(factor: float | None) -> None:
    if factor is not None and not 0 < factor < float("inf"):
        raise ValueError(f"capacity_factor: expected a positive number, got {factor}")


def check_wire(wire: Wire, hidden: int, group: EpGroup | None, overlap: OverlapOption) -> None:
    if not wire_number(wire, "combine_wire"):
        return
    block = WAYS["fp8_block128"].block  # columns that share a scale
    if wire != "float32" and hidden % block:
        expected = f"expected a multiple of {block} beside combine_wire={wire!r}"
        raise ValueError(f"hidden: {expected}, got {hidden}")
    if overlap is not False:
        raise ValueError(f"combine_wire: expected 'same' beside overlap, got {wire!r}")
    if group is not None and wire_number(wire) not in map(wire_number, group.wire_formats):
        raise ValueError(
            f"combine_wire: expected 'same' or one of the group's wire_formats "
            f"{list(group.wire_formats)}, got {wire!r}"
        )


def alignment_of(dtype: torch.dtype) -> int:
    """Of each expert's rows.

    Torch's grouped kernel wants the start of every zone at 16 bytes also when rows are what is
    summed over.
    """
    return 8 if dtype == torch.bfloat16 else 1


def dtype_of(experts: nn.Module) -> torch.dtype | None:
    """The dtype of parameters: of the first of floating point; None where there is none."""
    dtypes = [p.dtype for p in experts.parameters() if p.is_floating_point()]
    return dtypes[0] if dtypes else None


def check_param_dtype(param_dtype: torch.dtype | None, **parts: Any) -> None:
    if param_dtype is None:
        return
    if param_dtype not in SUMMABLE:
        raise TypeError(f"param_dtype: expected one of {KNOWN_DTYPES}, got {param_dtype}")
    for name, part in parts.items():
        own = dtype_of(part) if isinstance(part, nn.Module) else None
        if own not in (None, param_dtype):
            raise ValueError(
                f"param_dtype: expected None or {own}, which the parameters of {name} have, got "
                f"{param_dtype}"
            )


def check_group(
    group: EpGroup, hidden: int, num_experts: int, topk: int, dtype: torch.dtype | None
) -> None:
    if group.layout != "expert_major":
        raise ValueError(f"group: expected layout 'expert_major', got {group.layout!r}")
    require_ordered(group)
    require_free(group)
    expected = group.num_logical_experts or group.num_experts
    if expected != num_experts:
        raise ValueError(f"num_experts: expected the group's {expected}, got {num_experts}")
    if hidden > group.hidden:
        raise ValueError(f"hidden: expected at most the group's {group.hidden}, got {hidden}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk: expected 1 to {num_experts}, the experts, got {topk}")
    if topk > group.max_topk:
        raise ValueError(f"topk: expected at most the group's {group.max_topk}, got {topk}")
    if dtype is not None and dtype != group.dtype:
        raise ValueError(f"dtype: expected the group's {group.dtype}, got {dtype}")
