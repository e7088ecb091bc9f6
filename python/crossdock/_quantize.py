"""The ways in which dispatch quantises rows on their way."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["QUANTIZATIONS", "Quantization", "quantization"]


class Quantization(NamedTuple):
    """A way: ``xd_ep_quantise`` of ``crossdock/ep.h``, which defines every bit of the result."""

    code: int
    block: int  # columns that share a scale
    scale: str  # dtype of the scales: float32, or float8_e8m0fnu


QUANTIZATIONS: dict[str, Quantization] = {
    "fp8_block128": Quantization(1, 128, "float32"),
    "fp8_block128_pow2": Quantization(2, 128, "float32"),
    "fp8_block128_e8m0": Quantization(3, 128, "float8_e8m0fnu"),
    "mxfp8": Quantization(4, 32, "float8_e8m0fnu"),
}


def quantization(quantize: bool | str) -> Quantization | None:
    """The way that an argument ``quantize`` names; True is fp8_block128, False none.

    Raises:
        TypeError, ValueError: it is neither a bool nor the name of a way.
    """
    if isinstance(quantize, bool):
        return QUANTIZATIONS["fp8_block128"] if quantize else None
    if not isinstance(quantize, str):
        raise TypeError(f"quantize: expected a bool or a str, got {type(quantize).__name__}")
    way = QUANTIZATIONS.get(quantize)
    if way is None:
        raise ValueError(
            f"quantize: expected a bool or one of {', '.join(QUANTIZATIONS)}, got {quantize!r}"
        )
    return way
