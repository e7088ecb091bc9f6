"""The wires of combine: the form in which a rank's sum of a token's rows crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from crossdock._core import constants

__all__ = ["WIRES", "Wire", "wire_formats", "wire_number"]

Wire = Literal["same", "float32", "fp8", "fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0"]

# By name the library's numbers: ``xd_ep_wire`` of ``crossdock/quantise.h``, which defines every bit
# of the result. "fp8" is "fp8_block128".
WIRES: dict[str, int] = constants.WIRES


def wire_number(wire: Any, name: str = "wire") -> int:
    """The library's number for a wire.

    Raises:
        ValueError: there is no such wire.
    """
    if not isinstance(wire, str) or wire not in WIRES:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, WIRES))}, got {wire!r}")
    return WIRES[wire]


def wire_formats(wires: Sequence[str]) -> int:
    """The library's set of the wires that a group's combine may have.

    Raises:
        TypeError, ValueError: it is no sequence of wires.
    """
    if isinstance(wires, str) or not isinstance(wires, Sequence):
        raise TypeError(f"wire_formats: expected a sequence of wires, got {wires!r}")
    formats = 0
    for wire in wires:
        formats |= 1 << wire_number(wire, "wire_formats")
    return formats
