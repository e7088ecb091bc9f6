"""The wire of a Buffer's combines: `Buffer.combine_wire`."""

from __future__ import annotations

import os
from typing import Any

import torch

from crossdock._wire import WIRES

LOGFMT = "logfmt"
_VARIABLE = "XD_DEEP_EP_COMBINE_WIRE"
_CODED = ("fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0")  # need no memory of their own


def first_wire() -> str:
    """`Buffer.combine_wire` to begin with. It is read, and checked, by every combine."""
    return os.environ.get(_VARIABLE, "") or "same"


def formats_on(device: torch.device, apart: bool = False) -> int:
    """The ``wire_formats`` of a group on a device: what `number_of_wire` may answer there.

    Args:
        device: of the group's tensors.
        apart: whether its ranks are on several machines, where CUDA devices have no wires.
    """
    if device.type == "cuda" and apart:
        return 0
    return sum(1 << WIRES[wire] for wire in _CODED)


def number_of_wire(
    wire: Any, device: torch.device, logfmt: bool | None = None, *, apart: bool = False
) -> int:
    """The library's number of the wire of one combine.

    Args:
        wire: `Buffer.combine_wire`.
        logfmt: ``use_logfmt`` of the call; None = the call has no such argument.
        device, apart: as of `formats_on`.

    Raises:
        ValueError: no such wire, or none on this device.
    """
    known = ("same", "fp8", *_CODED, LOGFMT)
    if not isinstance(wire, str) or wire not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"Buffer.combine_wire (or {_VARIABLE}): expected {names}, got {wire!r}")
    if wire == LOGFMT:
        wire = "fp8_block128" if logfmt else "same"
    number = WIRES[wire]
    if number and not formats_on(device, apart) >> number & 1:
        raise ValueError(
            f"Buffer.combine_wire: expected 'same' on {device} of several machines, got {wire!r}"
        )
    return number
