"""Products of matrices that are spread over the ranks, on NumPy arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._arrays import Spec, describe
from crossdock._comm import Comm
from crossdock._core import constants
from crossdock._dtypes import DLPACK, OPERANDS, PAYLOADS, SUMMABLE, numpy_dtype
from crossdock._gemm_config import (
    Algo,
    Epilogue,
    GemmConfig,
    GemmOperation,
    fail_context,
    gemm_word,
    whole_number,
)
from crossdock._membership import Member, of_kind, optional
from crossdock.errors import CrossdockError, in_words

__all__ = ["GemmArgs", "GemmContext", "GemmPlan", "GemmStatus", "gemm_local_size"]

_NUMBERS = ("float32",)
_ROWS = (*PAYLOADS, "int32", "int64", "float8_e8m0fnu")
_OPERATIONS = constants.GEMM_OPERATIONS
_ALL_GATHER, _REDUCE_SCATTER, _BULK = (
    _OPERATIONS[word] for word in ("all_gather", "reduce_scatter", "bulk")
)


def gemm_local_size(total: int, rank: int, num_ranks: int) -> int:
    """A rank's share of rows or columns that are dealt out: ceil(total / W), fewer at the end."""
    return _core.gemm_local_size(total, rank, num_ranks)


@dataclasses.dataclass(frozen=True)
class GemmStatus:
    """The non-fatal error state of a context since it was last read.

    Operations on the CPU raise their errors, which are not repeated here. There is left the error
    of a gather beside other work that another operation has ended.
    """

    status: str  # name of the first error's status; "XD_SUCCESS" = none
    operation: str | None  # the operation that met it, as of CrossdockError; None = no error
    epoch: int  # its number in the context, from 1
    rank: int  # the lowest rank it is about; -1 = none
    text: str


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """The algorithm and costs of a call, as `GemmContext.explain` foresees them."""

    algo: str  # the algorithm that it would take
    num_products: int  # products that it computes one after the other
    same_bits: bool  # whether its bits are those of every other algorithm for which this is true
    estimate_us: float  # of the whole operation, in microseconds,
    gemm_us: float  # of the product alone,
    transfer_us: float  # and of the transfer alone
    text: str  # a line per algorithm of the operation: its estimate, or why it cannot run

    @classmethod
    def of(cls, found: dict[str, Any]) -> GemmPlan:
        """From ``xd_gemm_plan_info`` by its fields."""
        words = {number: word for word, number in constants.GEMM_ALGOS.items()}
        named = {"algo": words[found["algo"]], "same_bits": bool(found["same_bits"])}
        return cls(**found | named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmArgs:
    """The arguments of a product: D = act(alpha * op(A) * op(B) + beta * C + bias).

    m tokens of this rank, M of all ranks, K and N of this rank. Shapes are those of all_gather; in
    brackets what reduce_scatter has instead. all_reduce has M rows in a and d.

    Attributes:
        a: [m,K] ([M,K]), with transpose_a stored as [K,m]: bfloat16, float16, float32, or fp8.
        b: [K,N], with transpose_b stored as [N,K], as weights of linear layers are.
        out: D, [M,N] ([m,N]) to write; None = a new one.
        dtype: of a new D; None = that of a, and bfloat16 where a is fp8.
        c: shape and dtype of D; it may be `out`.
        transpose_a, transpose_b: how a and b are stored.
        alpha, beta: factors; beta is read with c alone.
        bias: [N], dtype of D or float32; added once, after the sum over ranks.
        epilogue: act: "none", "gelu" (tanh form), "relu", or with pre_activation their derivatives
            "dgelu", "drelu": D = x * act'(pre_activation).
        pre_activation: shape of D, bfloat16, float16 or float32: written by gelu and relu where
            given, read by dgelu and drelu.
        bias_grad: [N] float32 to write: column sums of this rank's rows of D.
        reduce_bias_grad: whether these are summed over the ranks.
        a_scale, b_scale: float32, of fp8: [1], or one per row, or one per 128 columns of K (b:
            [ceil(N/128), ceil(K/128)]); both in the same way.
        d_scale: [1] float32: D in fp8 is multiplied by it before it is rounded.
        d_amax: [1] float32 to write: the largest |D| of this rank before that.
        gathered: all_gather: a of all ranks, to write; dtype of a.
        gathered_scale: all_gather: its scales, to write.
        tokens_per_rank: m of each rank, equal on all ranks; None = equal shares.
        algo: "auto" = the context's.
        tag: any number below 2^32 that names the product, for example its layer; equal on all
            ranks, so that products in another order are a Mismatch. Not read of the product of
            `bulk`.
    """

    a: np.ndarray
    b: np.ndarray
    out: np.ndarray | None = None
    dtype: npt.DTypeLike | None = None
    c: np.ndarray | None = None
    transpose_a: bool = False
    transpose_b: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    bias: np.ndarray | None = None
    epilogue: Epilogue = "none"
    pre_activation: np.ndarray | None = None
    bias_grad: np.ndarray | None = None
    reduce_bias_grad: bool = False
    a_scale: np.ndarray | None = None
    b_scale: np.ndarray | None = None
    d_scale: np.ndarray | None = None
    d_amax: np.ndarray | None = None
    gathered: np.ndarray | None = None
    gathered_scale: np.ndarray | None = None
    tokens_per_rank: Sequence[int] | None = None
    algo: Algo = "auto"
    tag: int = 0

    def options(self, num_ranks: int) -> dict[str, Any]:
        """The keyword arguments of crossdock._core's products, but for `d`.

        Raises:
            TypeError, ValueError: a bad argument, by its name.
        """
        writes_activation = self.epilogue in ("gelu", "relu")
        return {
            "a": describe("a", self.a, OPERANDS),
            "b": describe("b", self.b, OPERANDS),
            "c": optional("c", self.c, SUMMABLE),
            "transpose_a": int(self.transpose_a),
            "transpose_b": int(self.transpose_b),
            "alpha": float(self.alpha),
            "beta": float(self.beta),
            "bias": optional("bias", self.bias, SUMMABLE),
            "epilogue": gemm_word("epilogue", self.epilogue, constants.GEMM_EPILOGUES),
            "pre_activation": optional(
                "pre_activation", self.pre_activation, SUMMABLE, write=writes_activation
            ),
            "bias_grad": optional("bias_grad", self.bias_grad, _NUMBERS, write=True),
            "reduce_bias_grad": int(self.reduce_bias_grad),
            "a_scale": optional("a_scale", self.a_scale, _NUMBERS),
            "b_scale": optional("b_scale", self.b_scale, _NUMBERS),
            "d_scale": optional("d_scale", self.d_scale, _NUMBERS),
            "d_amax": optional("d_amax", self.d_amax, _NUMBERS, write=True),
            "gathered": optional("gathered", self.gathered, OPERANDS, write=True),
            "gathered_scale": optional("gathered_scale", self.gathered_scale, _NUMBERS, write=True),
            "tokens_per_rank": _tokens(self.tokens_per_rank, num_ranks),
            "algo": gemm_word("algo", self.algo, constants.GEMM_ALGOS),
            "tag": whole_number("tag", self.tag, 32),
        }

    def shape_of_d(self, operation: int, rank: int, num_ranks: int) -> tuple[int, int]:
        """Rows and columns of D; the library checks them."""
        rows, columns = self.a.shape[int(self.transpose_a)], self.b.shape[int(not self.transpose_b)]
        tokens = _tokens(self.tokens_per_rank, num_ranks)
        if operation == _ALL_GATHER:
            rows = rows * num_ranks if tokens is None else max(0, sum(tokens))
        elif operation == _REDUCE_SCATTER:
            rows = rows // num_ranks if tokens is None else max(0, tokens[rank])
        return rows, columns

    def dtype_of_d(self) -> np.dtype:
        """The dtype of a new D."""
        if self.dtype is not None:
            return numpy_dtype(self.dtype)
        return self.a.dtype if self.a.dtype.name in SUMMABLE else numpy_dtype("bfloat16")


def _tokens(given: Sequence[int] | None, num_ranks: int) -> tuple[int, ...] | None:
    """tokens_per_rank as the library takes it, which checks their sizes.

    Raises:
        TypeError, ValueError: they are no whole numbers, or not one for each rank.
    """
    if given is None:
        return None
    try:
        tokens = tuple(operator.index(count) for count in given)
    except TypeError:
        problem = f"tokens_per_rank: expected a sequence of whole numbers, got {given!r}"
        raise TypeError(problem) from None
    if len(tokens) != num_ranks:
        raise ValueError(
            f"tokens_per_rank: expected the tokens of {num_ranks} ranks, got {len(tokens)}"
        )
    return tokens


class GemmContext(Member):
    """Multiplies matrices that are spread over the ranks of a communicator on the CPU.

    A context manager. All operations are collective: every rank calls them in the same order, also
    with m = 0 tokens. A mistake in one rank's arguments raises there (TypeError, ValueError, or
    InvalidArgument) and Mismatch on the others, and the context stays usable; the content of
    outputs is undefined then. Arrays are C-contiguous, and rows of matrices are multiples of 16
    bytes. New outputs lie in symmetric memory while it lasts, else in ordinary memory; inputs
    outside symmetric memory are copied once.

    Args:
        comm: kept alive by the context.
        config: bounds.

    Raises:
        TypeError, ValueError: on the rank where Python finds a bad config; Mismatch on the others.
        InvalidArgument: on the rank with a bad config, and Mismatch on the others; Mismatch naming
            the field in which configs differ; OutOfMemory; Unsupported: `comm` is not on the CPU,
            or oneDNN is not installed.
    """

    def __init__(self, comm: Comm, config: GemmConfig) -> None:
        super().__init__(comm)
        core = comm.core()
        try:
            self._core = _core.GemmContext(core, **of_kind("config", config, GemmConfig).options())
        except CrossdockError:  # the library has told them
            raise
        except Exception:
            fail_context(core)
            raise
        self._config = config
        # Of gathers beside other work: the library's until `wait`.
        self._under_way: list[np.ndarray] = []

    @property
    def config(self) -> GemmConfig:
        """The bounds the context was made with."""
        return self._config

    def status(self) -> GemmStatus:
        """Reads and clears the context's non-fatal error state. Never blocks."""
        return GemmStatus(**in_words(self._core.status()))

    def all_gather(self, a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        """The rows of all ranks times this rank's b: a column-parallel linear layer.

        Args:
            a: [m,K], this rank's tokens.
            b: [N,K].
            options: further fields of `GemmArgs`.

        Returns:
            [M,N], the rows of rank 0 first.

        Raises:
            TypeError, ValueError: a bad argument that is found in Python, such as a dtype.
            InvalidArgument: one that the library finds, such as a shape.
            Mismatch: the ranks' arguments disagree, or another rank's are bad.
            Unsupported: the context has no memory for the operation, or the algorithm does not
                exist for it, with the reason.
            CrossdockError: a fatal one, after which the communicator is finished: Timeout, PeerLost
                or Aborted.
        """
        return self._product("all_gather", a, b, options)

    def reduce_scatter(self, a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        """This rank's rows of the sum over ranks of a times b: a row-parallel linear layer.

        Args:
            a: [M,K], tokens of all ranks, of which this rank has K of the columns.
            b: [N,K].
            options: further fields of `GemmArgs`.

        Returns:
            [m,N].

        Raises:
            As all_gather.
        """
        return self._product("reduce_scatter", a, b, options)

    def all_reduce(self, a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        """All rows of the sum over ranks of a times b, equal on all ranks.

        Args:
            a: [M,K], tokens of all ranks, of which this rank has K of the columns.
            b: [N,K].
            options: further fields of `GemmArgs`. Terms that are added, or functions that are
                applied, after the sum must be equal on all ranks.

        Returns:
            [M,N].

        Raises:
            As all_gather.
        """
        return self._product("all_reduce", a, b, options)

    def bulk(
        self,
        collective: GemmOperation,
        array: np.ndarray,
        *,
        product: GemmArgs | None = None,
        tokens_per_rank: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        tag: int = 0,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Gathers or reduces one array, and computes a product of this rank alone beside it.

        Args:
            collective: "all_gather": array [m,H] -> [M,H], of any type; "reduce_scatter": [M,H] ->
                [m,H], bfloat16, float16 or float32, summed in float32 by ascending rank.
            array: rows of a multiple of 16 bytes.
            product: of any sizes, which may differ per rank. It reads none of `out`.
            tokens_per_rank: m of each rank; None = equal shares.
            out: array to write; None = a new one.
            tag: of the transfer, as of `GemmArgs`.

        Returns:
            The gathered or reduced array, and D of the product, if any.

        Raises:
            As all_gather.
        """
        with self._joining(_BULK):
            kind = gemm_word("collective", collective, _OPERATIONS)
            tokens = _tokens(tokens_per_rank, self._comm.num_ranks)
            rows = describe("array", array, SUMMABLE if kind == _REDUCE_SCATTER else _ROWS)
            out = self._transferred(kind, array, tokens) if out is None else out
            written = describe("out", out, _ROWS, write=True)
            of_product = d = None
            if product is not None:
                of_product, d = self._arguments(_BULK, of_kind("product", product, GemmArgs))
            name = whole_number("tag", tag, 32)
        self._core.bulk(
            {
                "product": of_product,
                "collective": kind,
                "in": rows,
                "out": written,
                "tokens_per_rank": tokens,
                "tag": name,
            }
        )
        self._under_way.clear()
        return out, d

    def start_all_gather(
        self,
        array: np.ndarray,
        *,
        tokens_per_rank: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        tag: int = 0,
    ) -> np.ndarray:
        """Begins to gather an array beside other work; `wait`, or the next operation, ends it.

        Args:
            array: [m,H]; not to be written to until then.
            tokens_per_rank: m of each rank; None = equal shares.
            out: [M,H] array to write; None = a new one.
            tag: as of `GemmArgs`.

        Returns:
            `out`, which is complete after `wait`.

        Raises:
            As all_gather.
            Busy: a gather is under way.
        """
        with self._joining(_OPERATIONS["start_all_gather"]):
            tokens = _tokens(tokens_per_rank, self._comm.num_ranks)
            rows = describe("array", array, _ROWS)
            out = self._transferred(_ALL_GATHER, array, tokens) if out is None else out
            written = describe("out", out, _ROWS, write=True)
            name = whole_number("tag", tag, 32)
        self._core.start_all_gather(
            {"in": rows, "out": written, "tokens_per_rank": tokens, "tag": name}
        )
        self._under_way += (array, out)
        return out

    def wait(self) -> None:
        """Returns when what start_all_gather began is complete; at once if nothing was begun.

        Raises:
            Mismatch, CrossdockError: as all_gather.
        """
        try:
            self._core.wait()
        finally:
            self._under_way.clear()

    def gathered(self) -> np.ndarray:
        """A copy of the rows that the last operation, an all_gather, has gathered.

        Raises:
            InvalidArgument: the last operation was none, or the config has no keep_gathered.
        """
        view = self._core.gathered()
        names = {code: name for name, code in DLPACK.items()}
        dtype = numpy_dtype(names[view["dtype"]])
        shape, pitch = (view["rows"], view["columns"]), view["pitch_bytes"]
        if 0 in shape:
            return np.empty(shape, dtype)
        memory = (ctypes.c_ubyte * (shape[0] * pitch)).from_address(view["data"])
        rows = np.frombuffer(memory, np.uint8).reshape(shape[0], pitch)
        return rows[:, : shape[1] * dtype.itemsize].copy().view(dtype)

    def explain(self, operation: GemmOperation, args: GemmArgs) -> GemmPlan:
        """Says what a call with these arguments would do. Local; reads shapes and types alone.

        Args:
            operation: "all_gather", "reduce_scatter" or "all_reduce".
            args: of the call.

        Raises:
            TypeError, ValueError, InvalidArgument, Unsupported: as the call would here.
        """
        with self._naming("explain"):
            number = gemm_word("operation", operation, _OPERATIONS)
            options, _ = self._arguments(number, of_kind("args", args, GemmArgs), shape_only=True)
        return GemmPlan.of(self._core.explain(number, options))

    def close(self) -> None:
        """Frees the context's memory. Local; before or after the communicator's close().

        Raises:
            InvalidArgument: an operation is running in another thread.
        """
        super().close()
        self._under_way.clear()

    def _product(
        self, word: str, a: np.ndarray, b: np.ndarray, options: dict[str, Any]
    ) -> np.ndarray:
        operation = _OPERATIONS[word]
        with self._joining(operation):
            arguments, d = self._arguments(operation, GemmArgs(a=a, b=b, **options))
        getattr(self._core, word)(arguments)
        self._under_way.clear()
        return d

    def _arguments(
        self, operation: int, args: GemmArgs, shape_only: bool = False
    ) -> tuple[dict[str, Any], np.ndarray]:
        """The keyword arguments of crossdock._core's product, and D."""
        options = args.options(self._comm.num_ranks)
        for name, matrix in (("a", args.a), ("b", args.b)):
            if matrix.ndim != 2:
                raise ValueError(f"{name}: expected 2 dimensions, got shape {matrix.shape}")
        d = args.out
        if d is None:
            shape = args.shape_of_d(operation, self._comm.rank, self._comm.num_ranks)
            dtype = args.dtype_of_d()
            # An array without elements of its own stands for one that nobody writes.
            d = np.empty((0, 0), dtype) if shape_only else self._empty(shape, dtype)
            spec: Spec = (d.__array_interface__["data"][0], shape, DLPACK[dtype.name])
        else:
            spec = describe("out", d, OPERANDS, write=True)
        return options | {"d": spec}, d

    def _transferred(
        self, collective: int, array: np.ndarray, tokens: tuple[int, ...] | None
    ) -> np.ndarray:
        """A new output of a transfer."""
        if array.ndim != 2:
            raise ValueError(f"array: expected 2 dimensions, got shape {array.shape}")
        ranks, rank = self._comm.num_ranks, self._comm.rank
        if collective == _REDUCE_SCATTER:
            rows = len(array) // ranks if tokens is None else tokens[rank]
        else:
            rows = len(array) * ranks if tokens is None else sum(tokens)
        return self._empty((max(0, rows), array.shape[1]), array.dtype)
