"""The wires of combine: the form in which a rank's sum of a token's rows crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from crossdock._core import constants
from crossdock._quantise import WAYS

__all__ = ["WIRES", "Wire", "wire_formats", "wire_number", "wire_of_rows"]

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


def wire_of_rows(wire: Any, formats: Sequence[str], shape: Sequence[int], owner: str) -> int:
    """The library's number for the wire of a combine.

    Args:
        wire: as the caller names it.
        formats: the ``wire_formats`` of `owner`, the group or its config.
        shape: of expert_out.

    Raises:
        ValueError: there is no such wire, the group does not have it, or the rows do not fit it.
    """
    number = wire_number(wire)
    if not number:
        return 0
    if number not in [WIRES[one] for one in formats]:
        raise ValueError(
            f"wire: expected 'same' or one of the {owner}'s wire_formats = {tuple(formats)}, got "
            f"{wire!r}"
        )
    block = WAYS["fp8_block128"].block  # of all ways that a wire can be
    if wire != "float32" and shape and shape[-1] % block:
        raise ValueError(
            f"expert_out: expected a multiple of {block} columns with wire = {wire!r}, got shape "
            f"{tuple(shape)}"
        )
    return number


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
