"""The ways in which dispatch quantises rows on their way."""

from __future__ import annotations

import functools
from typing import NamedTuple

from crossdock._core import constants

__all__ = ["WAYS", "QuantiseWay", "quantise_way", "widest_scale_bytes"]


class QuantiseWay(NamedTuple):
    """A way: ``xd_ep_quantise`` of ``crossdock/quantise.h``, which defines every bit."""

    code: int
    block: int  # columns that share a scale
    scale: str  # dtype of the scales: float32, or float8_e8m0fnu


WAYS = {name: QuantiseWay(*fields) for name, fields in constants.QUANTISE.items()}


def quantise_way(quantise: bool | str) -> QuantiseWay | None:
    """The way that an argument ``quantise`` names; True is fp8_block128, False none.

    Raises:
        TypeError, ValueError: it is neither a bool nor the name of a way.
    """
    if isinstance(quantise, bool):
        return WAYS["fp8_block128"] if quantise else None
    if not isinstance(quantise, str):
        raise TypeError(f"quantise: expected a bool or a str, got {type(quantise).__name__}")
    way = WAYS.get(quantise)
    if way is None:
        raise ValueError(f"quantise: expected a bool or one of {', '.join(WAYS)}, got {quantise!r}")
    return way


@functools.lru_cache(maxsize=64)
def widest_scale_bytes(columns: int) -> int:
    """Bytes of the longest row of scales that any way makes beside so many columns."""
    return max(
        -(-columns // way.block) * (constants.DTYPES[way.scale] & 0xFF) // 8
        for way in WAYS.values()
    )
