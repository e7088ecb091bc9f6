"""Contexts of products on torch tensors. A context is found by its number inside operators."""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock._gemm import GemmPlan
from crossdock._gemm_config import Algo, GemmOperation, fail_context, gemm_word, whole_number

from .._calls import DTYPE_CODES
from .._comm import Comm, default_comm
from .._handles import new_handle
from .._membership import Membership, Operations
from ._operands import ALL_GATHER, REDUCE_SCATTER, Operands

__all__ = ["OPERANDS", "TpContext", "context_of", "find_shared", "rows_of_d", "shared_context"]

# Element types of operands.
OPERANDS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

_contexts: weakref.WeakValueDictionary[int, TpContext] = weakref.WeakValueDictionary()


def context_of(handle: int) -> TpContext:
    """The context with this handle.

    Raises:
        RuntimeError: it is gone; models must keep their context.
    """
    context = _contexts.get(handle)
    if context is None:
        raise RuntimeError(f"context: expected the handle of a living TpContext, got {handle}")
    return context


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """The bounds of a context that is shared."""

    max_tokens: int
    max_k: int
    max_n: int
    dtype: torch.dtype

    def cover(self, other: _Bounds) -> bool:
        """Whether whatever fits `other` fits here."""
        return (
            self.max_tokens >= other.max_tokens
            and self.max_k >= other.max_k
            and self.max_n >= other.max_n
            and self.dtype.itemsize >= other.dtype.itemsize
        )


class TpContext(Membership):
    """Bounds and memory of products of matrices that are spread over the ranks.

    The operations of a context are collective and form one sequence, the same on all ranks, forward
    and backward, also on a rank without tokens. Layers that run one after the other share one. On a
    GPU its operations belong on one stream, or on streams that wait for one another. Keep it as
    long as compiled functions and captured graphs use it.

    Attributes:
        comm: its Comm.
        handle: a number by which operators find it.
        num_ranks, rank: of the communicator.
        max_tokens, max_k, max_n, dtype: as given.
        order: stands for the operations so far, so that compilers keep them, in their order.
        core: the context of the extension.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_k: int,
        max_n: int,
        dtype: torch.dtype = torch.bfloat16,
        operations: Sequence[GemmOperation] = (
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "bulk",
        ),
        algo: Algo = "auto",
        num_comm_sms: int = 0,
        allow_fallback: bool = False,
        nccl_comm: int | None = None,
        comm: Comm | None = None,
    ) -> None:
        """Makes the context. Collective, blocking.

        Arguments are equal on all ranks, but for `num_comm_sms` in contexts that are not made for
        cuBLASMp, and `nccl_comm`, which all ranks give or none.

        Args:
            max_tokens: largest number of tokens of a rank.
            max_k: largest row that is gathered, in elements of `dtype`: inputs of a column-parallel
                layer; outputs of a row-parallel one, whose gradient is gathered.
            max_n: largest row that is summed over ranks: these as well; and largest number of
                columns of a product of gathered rows: this rank's share of a layer.
            dtype: widest element that is transferred.
            operations: those that the context has memory for. Gradients need that of the other
                direction, and "bulk".
            algo: for calls that name none; "auto" = by the cost model of `explain`.
            num_comm_sms: CUDA: multiprocessors that a kernel over the ranks may take; 0 = all.
            allow_fallback: whether a call whose algorithm cannot run takes "auto" instead.
            nccl_comm: CUDA: address of an ``ncclComm_t`` of the same ranks in the same order, with
                which cuBLASMp transfers. It makes the context for cuBLASMp; keep it until the
                context has been closed, and use it for nothing else. An error that finishes the
                context's communicator may revoke it. None = cuBLASMp, where `algo` names it, gets
                one of its own.
            comm: None = the default communicator.

        Raises:
            TypeError, ValueError: a bad argument, on this rank; InvalidArgument where the library
                finds it.
            Mismatch: bounds differ between ranks, or another rank's argument is bad.
            Unsupported: oneDNN, or on CUDA cuBLASLt, is not installed.
            OutOfMemory: no memory left here (Mismatch on the others).
        """
        self.comm = default_comm() if comm is None else comm
        given = {"max_tokens": max_tokens, "max_k": max_k, "max_n": max_n}
        try:
            config = {name: whole_number(name, value, 31) for name, value in given.items()}
            config |= _words(dtype, operations, algo)
            if nccl_comm is not None:
                config["nccl_comm"] = whole_number("nccl_comm", nccl_comm, 64)
            config["num_comm_sms"] = whole_number("num_comm_sms", num_comm_sms, 31)
        except (TypeError, ValueError):
            fail_context(self.comm.core)
            raise
        self.max_tokens, self.max_k, self.max_n, self.dtype = max_tokens, max_k, max_n, dtype
        self.rank, self.num_ranks = self.comm.rank, self.comm.num_ranks
        self.core = _core.GemmContext(
            self.comm.core, allow_fallback=int(bool(allow_fallback)), **config
        )
        self.order = torch.zeros(1, dtype=torch.float32, device=self.comm.device)
        self._tag = 0  # of what ranks have agreed to do since the last operation
        self.handle = new_handle(self.rank, self.num_ranks)
        _contexts[self.handle] = self

    def add_tag(self, tag: int) -> None:
        """Lets the next operation compare a number below 256 between the ranks, beside others."""
        self._tag = zlib.crc32(bytes((tag,)), self._tag)

    def take_tag(self, tag: int) -> int:
        """The tag of an operation that itself has a number of 4 bits."""
        taken, self._tag = ((self._tag & 0xFFFFFFF) << 4) + tag, 0
        return taken

    def refuse(
        self, operation: int | Operations | None, kind: type[Exception], problem: str
    ) -> NoReturn:
        """As of Membership. Peers that hear of it have compared their tags: so has this rank."""
        if operation is not None:
            self._tag = 0
        super().refuse(operation, kind, problem)

    def explain(
        self,
        operation: GemmOperation,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        tokens_per_rank: Sequence[int] | None = None,
        algo: Algo = "auto",
    ) -> GemmPlan:
        """Says what a product would do: its algorithm, estimates, and why others cannot run. Local.

        Args:
            operation: "all_gather", "reduce_scatter" or "all_reduce".
            a: ``[m, K]``, or of all ranks' tokens ``[M, K]``; its elements are not read.
            b: ``[K, N]``, likewise.
            tokens_per_rank, algo: as of the operation.

        Raises:
            TypeError, ValueError, InvalidArgument, Unsupported: as the call would here.
        """
        number = gemm_word("operation", operation, constants.GEMM_OPERATIONS)
        wide = a.dtype if a.dtype.itemsize > 1 else torch.bfloat16
        operands = Operands(a, b)
        rows = rows_of_d(self, number, a.shape[0], tokens_per_rank)
        fields = operands.options() | {
            "d": (0, (rows, b.shape[1]), DTYPE_CODES[wide]),
            "tokens_per_rank": tokens_per_rank,
            "algo": gemm_word("algo", algo, constants.GEMM_ALGOS),
        }
        return GemmPlan.of(self.core.explain(number, fields))

    def __repr__(self) -> str:
        return (
            f"TpContext({self.num_ranks} ranks, max_tokens={self.max_tokens}, max_k={self.max_k}, "
            f"max_n={self.max_n}, dtype={self.dtype})"
        )


def rows_of_d(context: TpContext, operation: int, rows: Any, tokens: Sequence[Any] | None) -> Any:
    """The rows of a result, where a has `rows`; the library checks them."""
    if operation == ALL_GATHER:
        return rows * context.num_ranks if tokens is None else sum(tokens)
    if operation == REDUCE_SCATTER:
        return rows // context.num_ranks if tokens is None else tokens[context.rank]
    return rows


@overload
def shared_context(
    comm: Comm | None, max_tokens: int, max_k: int, max_n: int, dtype: torch.dtype
) -> TpContext: ...
@overload
def shared_context(
    comm: Comm | None,
    max_tokens: int,
    max_k: int,
    max_n: int,
    dtype: torch.dtype,
    *,
    may_make: bool,
) -> TpContext | None: ...
def shared_context(
    comm: Comm | None,
    max_tokens: int,
    max_k: int,
    max_n: int,
    dtype: torch.dtype,
    *,
    may_make: bool = True,
) -> TpContext | None:
    """A context of the communicator with at least these bounds. Collective if none has them.

    Contexts that are made here live as long as their communicator is open, so that all ranks find
    the same ones.

    Args:
        may_make: whether to make one; else None where there is none.
    """
    comm = default_comm() if comm is None else comm
    place = find_shared(comm, max_tokens, max_k, max_n, dtype)
    if place >= 0:
        return list(comm.contexts.values())[place]
    if not may_make:
        return None
    context = TpContext(max_tokens=max_tokens, max_k=max_k, max_n=max_n, dtype=dtype, comm=comm)
    comm.contexts[_Bounds(max_tokens, max_k, max_n, dtype)] = context
    return context


def find_shared(comm: Comm, max_tokens: int, max_k: int, max_n: int, dtype: torch.dtype) -> int:
    """The place of such a context among those of the communicator; -1 = there is none. Local."""
    wanted = _Bounds(max_tokens, max_k, max_n, dtype)
    for place, (bounds, context) in enumerate(comm.contexts.items()):
        if bounds.cover(wanted) and not context.core.closed:
            return place
    return -1


def _words(dtype: Any, operations: Any, algo: Any) -> dict[str, int]:
    if dtype not in OPERANDS:
        raise ValueError(f"dtype: expected one of {list(OPERANDS)}, got {dtype!r}")
    if isinstance(operations, str) or not isinstance(operations, Sequence):
        raise TypeError(f"operations: expected a sequence of words, got {operations!r}")
    bits = {gemm_word("operations", one, constants.GEMM_BITS) for one in operations}
    return {
        "dtype": DTYPE_CODES[dtype],
        "operations": sum(bits),
        "algo": gemm_word("algo", algo, constants.GEMM_ALGOS),
    }
