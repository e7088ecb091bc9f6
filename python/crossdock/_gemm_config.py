"""Bounds of products that are spread over the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt

from crossdock import _core
from crossdock._comm_arguments import parse_device
from crossdock._core import constants
from crossdock._dtypes import dtype_name, pack
from crossdock.errors import CrossdockError

__all__ = [
    "Algo",
    "Epilogue",
    "GemmConfig",
    "GemmMemory",
    "GemmOperation",
    "fail_context",
    "gemm_word",
    "whole_number",
]

GemmOperation = Literal["all_gather", "reduce_scatter", "all_reduce", "bulk", "start_all_gather"]
Algo = Literal[
    "auto",
    "direct",
    "split",
    "sequential",
    "cublasmp",
    "cublasmp_split_p2p",
    "cublasmp_split_multicast",
    "cublasmp_atomic_p2p",
    "cublasmp_atomic_multicast",
    "cublasmp_no_overlap",
    "cublasmp_fused",
]
Epilogue = Literal["none", "gelu", "dgelu", "relu", "drelu"]


def gemm_word(name: str, word: Any, known: dict[str, int]) -> int:
    """The library's number for a word of the argument `name`.

    Raises:
        ValueError: there is no such word.
    """
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {word!r}")
    return known[word]


def whole_number(name: str, given: Any, bits: int) -> int:
    """A number of so many bits, of the argument `name`.

    Raises:
        TypeError, ValueError: it is no whole number, below 0, or too large.
    """
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {given!r}") from None
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name}: expected a whole number from 0 below 2^{bits}, got {given!r}")
    return number


def fail_context(core: _core.Comm) -> None:
    """Takes this rank's part in the making of a context whose config is bad: peers get Mismatch."""
    with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
        _core.GemmContext(core, max_tokens=-1)


@dataclasses.dataclass(frozen=True)
class GemmMemory:
    """Memory that a context takes on one rank, in bytes, to within a page and a few kilobytes."""

    symmetric_bytes: int  # shared with the peers: flags, gathered rows, partial sums
    private_bytes: int  # working memory of this rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """Bounds of what a `GemmContext` is used for.

    They are equal on all ranks, but for num_comm_sms where algo does not name cuBLASMp.

    Attributes:
        max_tokens: largest number of tokens of a rank.
        max_k: largest row that is gathered, in elements: K of all_gather, columns of what bulk
            gathers. On CUDA products with this K are measured, also where sums alone are computed.
        max_n: largest row that is summed over ranks, in elements, and largest N of all_gather.
        dtype: widest element that is transferred: bfloat16, float16, float32, float8_e4m3fn or
            float8_e5m2, as a dtype or by name.
        operations: those that the context has memory for: "all_gather", "reduce_scatter",
            "all_reduce", "bulk", "start_all_gather". Bulk and start_all_gather need that of the
            transfer, too.
        algo: for calls that name none: "auto" = by the cost model of `GemmContext.explain`.
        num_comm_sms: CUDA: multiprocessors that a kernel over the ranks may take; 0 = all.
        keep_gathered: whether rows that all_gather gathered stay for `GemmContext.gathered`.
        allow_fallback: whether a call whose algorithm cannot run takes "auto" instead of failing.

    Raises:
        TypeError, ValueError: a dtype or a word that does not exist. Numbers are checked by the
            calls that use them.
    """

    max_tokens: int
    max_k: int = 0
    max_n: int = 0
    dtype: npt.DTypeLike = "bfloat16"
    operations: Sequence[GemmOperation] = ("all_gather", "reduce_scatter", "all_reduce")
    algo: Algo = "auto"
    num_comm_sms: int = 0
    keep_gathered: bool = False
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.operations, str) or not isinstance(self.operations, Sequence):
            raise TypeError(f"operations: expected a sequence of words, got {self.operations!r}")
        object.__setattr__(self, "operations", tuple(self.operations))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self.options()

    def options(self) -> dict[str, Any]:
        """The keyword arguments of crossdock._core's functions."""
        bits = {gemm_word("operations", one, constants.GEMM_BITS) for one in self.operations}
        return {
            "max_tokens": self.max_tokens,
            "max_k": self.max_k,
            "max_n": self.max_n,
            "dtype": pack(self.dtype),
            "operations": sum(bits),
            "algo": gemm_word("algo", self.algo, constants.GEMM_ALGOS),
            "num_comm_sms": self.num_comm_sms,
            "keep_gathered": int(self.keep_gathered),
            "allow_fallback": int(self.allow_fallback),
        }

    def context_memory(self, num_ranks: int, device: str = "cpu") -> GemmMemory:
        """The memory that a context with this config will take on one rank with `device`."""
        return GemmMemory(
            **_core.gemm_memory(
                num_ranks=num_ranks, device_type=parse_device(device)[0], **self.options()
            )
        )
