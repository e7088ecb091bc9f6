"""Communicators and buffers under TransformerEngine's names."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

import crossdock.torch as xd
from crossdock.torch.tp import TpContext
from crossdock.torch.tp._context import shared_context

from ._fp8 import BYTES
from ._options import CommOverlapType, refuse

__all__ = [
    "CommOverlap",
    "CommOverlapCore",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "refuse_cublasmp",
]


class CommOverlapHelper:
    """The ranks that have a layer together.

    Attributes:
        comm: their communicator.
    """

    def __init__(
        self,
        world_group: ProcessGroup | None = None,
        intra_node_group: ProcessGroup | None = None,
        *,
        comm: xd.Comm | None = None,
    ) -> None:
        """Collective, but with `comm`.

        Args:
            world_group: torch.distributed group of any backend; None = as `crossdock.torch.init`.
            intra_node_group: those of its ranks that have a layer together; None = all of them.
            comm: Crossdock's communicator of these ranks, in place of the groups. It stays the
                caller's.

        Raises:
            As `crossdock.torch.init`.
        """
        self._owned = comm is None
        self.comm = xd.init(intra_node_group or world_group) if comm is None else comm

    def close(self) -> None:
        """Leaves the communicator, unless it is the caller's."""
        if self._owned:
            self.comm.close()


class CommOverlapCore:
    """The common part of `CommOverlap` and `CommOverlapP2P`: a buffer, and how it is moved.

    Attributes:
        comm: the ranks.
    """

    _is_p2p = False

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: CommOverlapType,
        atomic_gemm: bool,
    ) -> None:
        self.comm = helper.comm
        if tp_size != self.comm.num_ranks:
            refuse("tp_size", tp_size, f"expected the {self.comm.num_ranks} ranks of helper")
        tokens, self._hidden = (operator.index(size) for size in buffer_shape)
        if tokens % tp_size:
            refuse("buffer_shape[0]", tokens, f"expected a multiple of {tp_size} ranks")
        self._tokens = tokens
        self._dtype = buffer_dtype
        if buffer_dtype == BYTES and comm_type != CommOverlapType.AG:
            refuse("buffer_dtype", buffer_dtype, "expected a wider one, as no sums travel in fp8")
        self._atomic = bool(atomic_gemm)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self.comm_type = CommOverlapType(comm_type)
        self.context(self._hidden)

    def context(self, columns: int) -> TpContext:
        """The context of products with so many columns; collective where none has room."""
        tokens = max(1, self._tokens // self.comm.num_ranks)
        most = max(columns, self._hidden)
        # Rows of fp8 are shorter than what the context has room for.
        dtype = torch.bfloat16 if self.is_fp8_ubuf() else self._dtype
        return shared_context(self.comm, tokens, self._hidden, most, dtype)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is `get_buffer()`, in any shape."""
        return self._buffers is not None and tensor.data_ptr() == self._buffers[0].data_ptr()

    def copy_into_buffer(
        self,
        input: torch.Tensor,  # noqa: A002
        local_chunk: bool = False,
    ) -> None:
        """Copies rows into the buffer: of all ranks, or with `local_chunk` this rank's."""
        self.get_buffer(local_chunk, input.shape).copy_(input)

    def get_buffer(
        self, local_chunk: bool = False, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The rows of all ranks, or with `local_chunk` this rank's.

        These are two tensors: rows that are gathered do not overlap the rank's own.

        Raises:
            ValueError: a shape of another number of elements.
        """
        if self._buffers is None:
            own = self._tokens // self.comm.num_ranks
            self._buffers = (
                self.comm.empty_symmetric((self._tokens, self._hidden), self._dtype),
                self.comm.empty_symmetric((own, self._hidden), self._dtype),
            )
        buffer = self._buffers[int(local_chunk)]
        if shape is None:
            return buffer
        if math.prod(shape) != buffer.numel():
            refuse("shape", tuple(shape), f"expected {buffer.numel()} elements")
        return buffer.view(*shape)

    def get_communication_stream(self) -> NoReturn:
        """There is none to wait for: an operation ends on the stream that it was called on."""
        raise NotImplementedError(
            "get_communication_stream: transfers end on the stream of their operation"
        )

    def get_tp_size(self) -> int:
        return self.comm.num_ranks

    def is_atomic_gemm(self) -> bool:
        return self._atomic

    def is_p2p_overlap(self) -> bool:
        return self._is_p2p

    def is_fp8_ubuf(self) -> bool:
        return self._dtype == BYTES

    def with_cublasmp(self) -> bool:
        return False


def refuse_cublasmp(option: str, given: Any) -> None:
    """Refuses products by cuBLASMp, by the option that asks for them."""
    if given:
        refuse(
            option,
            given,
            "cuBLASMp gives no gathered rows, which buffers hold; "
            "crossdock.torch.tp.TpContext(algo='cublasmp') has its products. Expected False",
        )


class CommOverlap(CommOverlapCore):
    """A buffer of the methods "pipeline" and "bulk"."""

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        use_cublasmp: bool = False,
        comm_type: CommOverlapType = CommOverlapType.RS,
        num_splits: int = 4,
        num_max_streams: int = 3,
        comm_cga_size: int = 2,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 16,
        set_sm_margin: bool = True,
        atomic_gemm: bool = False,
        rs_overlap_first_gemm: bool = False,
    ) -> None:
        """Collective where no context of the ranks has room yet; see the page for each option."""
        refuse_cublasmp("use_cublasmp", use_cublasmp)
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, comm_type, atomic_gemm)


class CommOverlapP2P(CommOverlapCore):
    """A buffer of the methods "ring_exchange" and "external"."""

    _is_p2p = True

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: CommOverlapType,
        num_max_streams: int = 3,
        comm_cga_size: int = 1,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 1,
        set_sm_margin: bool = False,
        atomic_gemm: bool = False,
        use_ce: bool = True,
        aggregate: bool = False,
        use_cublasmp: bool = False,
    ) -> None:
        """Collective where no context of the ranks has room yet; see the page for each option."""
        refuse_cublasmp("use_cublasmp", use_cublasmp)
        if not use_ce:
            refuse("use_ce", use_ce, "expected True: no multiprocessors move rows beside a product")
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, comm_type, atomic_gemm)
