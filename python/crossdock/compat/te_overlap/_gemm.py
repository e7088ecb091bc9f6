"""TransformerEngine's product with a transfer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossdock._core import constants
from crossdock.torch._calls import current_stream, spec
from crossdock.torch.tp import TpContext

from ._fp8 import BYTES, Float8Tensor, Matrix, matrix_of
from ._options import CommOverlapType
from ._overlap import CommOverlapCore

__all__ = ["general_gemm"]

_OPERATIONS = constants.GEMM_OPERATIONS
_Result = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


def general_gemm(
    A: Tensor | Float8Tensor,  # noqa: N803
    B: Tensor | Float8Tensor,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    quantization_params: None = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: CommOverlapCore | None = None,
    ub_type: CommOverlapType | None = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> _Result:
    """``op(B) @ op(A)``, by rows, with the transfer of a buffer. Collective, without derivatives.

    Args:
        A: "T": ``[N, K]``, as weights are stored; "N": ``[K, N]``.
        B: "N": rows of tokens ``[.., K]``; "T": ``[K, ..]``. For AG without `bulk_overlap` this
            rank's rows, or ``ub.get_buffer()``: then those that were copied into its local chunk,
            and the buffer gets the rows of all ranks.
            Both may be in fp8, each with one scale: TransformerEngine's Float8Tensor, or the one of
            this package. The buffer's part of one is its data.
        out_dtype: of a new `out`; None = that of B, of fp8 bfloat16.
        quantization_params: None.
        gelu: without `grad` GELU is applied, and what it was applied to returned; with `grad` the
            result is multiplied by GELU's derivative at `gelu_in`, which is None otherwise.
        alpha, beta: factors; `beta` (1 if None) with `accumulate` alone.
        accumulate: the result is added to `out`.
        layout: of A and B: "TN", "NN", and for `bulk_overlap` "NT".
        out: the result; None = a new tensor. For RS that is `extra_output`, if it is given, and
            nothing is written to another `out`.
        bias: ``[N]``, added; with `grad`, its gradient is returned.
        use_split_accumulator: whether sums of fp8 leave the tensor cores' narrower accumulators.
        ub, ub_type: the buffer, and whether rows are gathered (AG) or summed and scattered (RS).
        extra_output: AG: gets the gathered rows. RS: gets the result; with `bulk_overlap` this
            rank's rows of the sum of ``ub.get_buffer()``.
        bulk_overlap: the product is of A and B as they are, beside the transfer of the buffer.

    Returns:
        The result; the gradient of the bias; what GELU was applied to; extra_output.

    Raises:
        TypeError, ValueError: a bad argument; the peers get Mismatch.
        CrossdockError: as the operators of `crossdock.torch.tp`.
    """
    if ub is None or ub_type is None:
        raise ValueError("ub, ub_type: expected a buffer and its transfer; see torch for others")
    if quantization_params is not None:
        raise ValueError("quantization_params: expected None: results are not quantised here")
    product = _Product(A, B, layout, ub, CommOverlapType(ub_type), bulk_overlap)
    try:
        product.check(gelu, gelu_in, bias, grad, out, accumulate)
        product.read_operands(use_split_accumulator)
        product.set_result(out, out_dtype, extra_output)
        product.set_addend(out, accumulate, beta)
        product.args["alpha"] = float(alpha)
        gelu_out = product.set_gelu(gelu, gelu_in, grad)
        bias_grad = product.set_bias(bias, gelu, grad)
    except (TypeError, ValueError) as error:
        product.context.refuse(product.operation, type(error), str(error))
    product.run(extra_output)
    if bias_grad is not None and bias is not None:
        bias_grad = bias_grad.to(bias.dtype)
    return product.d, bias_grad, gelu_out, extra_output


class _Product:
    """A call in the terms of the library: its a is B here, its b is A."""

    context: TpContext
    d: Tensor

    def __init__(
        self,
        A: Tensor | Float8Tensor,  # noqa: N803
        B: Tensor | Float8Tensor,  # noqa: N803
        layout: str,
        ub: CommOverlapCore,
        ub_type: CommOverlapType,
        bulk: bool,
    ) -> None:
        self.layout, self.ub, self.bulk = layout, ub, bulk
        self.gathers = ub_type == CommOverlapType.AG
        word = "all_gather" if self.gathers else "reduce_scatter"
        self.operation = _OPERATIONS["bulk" if bulk else word]
        try:
            self.a, self.b = matrix_of("B", B), matrix_of("A", A)
        except (TypeError, ValueError) as error:
            ub.context(0).refuse(self.operation, type(error), str(error))
        self.columns = self.b.rows.shape[0 if layout[:1] == "T" else -1]
        self.context = ub.context(0 if bulk else self.columns)
        self.takes_buffer = not bulk and self.gathers and ub.owns(self.a.rows)
        if self.takes_buffer:
            own = ub.get_buffer(local_chunk=True)
            self.a = self.a._replace(rows=own.view(self.a.rows.dtype), transposed=None)
        self.stream = current_stream(self.a.rows.device)
        self.kept: list[Tensor] = []
        self.args: dict[str, Any] = {}

    def check(
        self,
        gelu: bool,
        gelu_in: Tensor | None,
        bias: Tensor | None,
        grad: bool,
        out: Tensor | None,
        accumulate: bool,
    ) -> None:
        layouts = ("TN", "NN", "NT") if self.bulk else ("TN", "NN")
        if self.layout not in layouts:
            raise ValueError(f"layout: expected one of {', '.join(layouts)}; got {self.layout!r}")
        if gelu and grad and gelu_in is None:
            raise ValueError("gelu_in: expected a tensor with gelu and grad, got None")
        if gelu_in is not None and not (gelu and grad):
            raise ValueError("gelu_in: expected None without gelu and grad, got a tensor")
        if bias is not None and grad and not gelu and self.layout != "NT":
            raise ValueError("bias: expected None with grad, but with gelu or layout 'NT'")
        if accumulate and out is None:
            raise ValueError("out: expected a tensor to accumulate into, got None")
        if (self.a.scale is None) != (self.b.scale is None):
            raise TypeError("A, B: expected both in fp8, or none")
        if bias is not None and grad and not gelu and self.a.scale is not None:
            raise ValueError("bias: expected None with grad and a B of fp8, as rows are rounded")

    def read_operands(self, use_split_accumulator: bool) -> None:
        """Reads the operands; of fp8 as GPUs multiply them, where they are stored so, too."""
        self.transpose_a, self.transpose_b = self.layout[1] == "T", self.layout[0] == "T"
        if self.a.scale is None or self.b.scale is None:
            a, b = self.a.rows, self.b.rows
        else:
            a, self.transpose_a = _stored(self.a, self.transpose_a, wanted=False)
            b, self.transpose_b = _stored(self.b, self.transpose_b, wanted=True)
            self.args["a_scale"], self.args["b_scale"] = spec(self.a.scale), spec(self.b.scale)
            self.args["fast_accumulate"] = int(not use_split_accumulator)
        self.rows = self.matrix("B", a)
        self.args |= {"a": spec(self.rows), "b": spec(self.matrix("A", b))}
        self.args |= {"transpose_a": int(self.transpose_a), "transpose_b": int(self.transpose_b)}

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        if not rows.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
        self.kept.append(rows)
        return rows

    def set_result(
        self, out: Tensor | None, out_dtype: torch.dtype | None, extra_output: Tensor | None
    ) -> None:
        a = self.rows
        rows = a.shape[1 if self.transpose_a else 0]
        if not self.bulk:
            ranks = self.context.num_ranks
            rows = rows * ranks if self.gathers else rows // ranks
            if not self.gathers and extra_output is not None:
                out = extra_output
        if out is None:
            usual = torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype
            out = a.new_empty((rows, self.columns), dtype=out_dtype or usual)
        self.d = out
        self.args["d"] = spec(self.matrix("out", out))
        if self.gathers and not self.bulk and (extra_output is not None or self.takes_buffer):
            gathered = self.ub.get_buffer() if extra_output is None else extra_output
            if gathered.dtype == BYTES:
                gathered = gathered.view(a.dtype)
            self.args["gathered"] = spec(self.matrix("extra_output", gathered))

    def set_addend(self, out: Tensor | None, accumulate: bool, beta: float | None) -> None:
        if not accumulate:
            if beta:
                raise ValueError(f"beta: expected None without accumulate, got {beta}")
            return
        if self.d is not out:
            raise ValueError("extra_output: expected None or out itself with accumulate")
        self.args |= {"c": self.args["d"], "beta": 1.0 if beta is None else float(beta)}

    def set_gelu(self, gelu: bool, gelu_in: Tensor | None, grad: bool) -> Tensor | None:
        if not gelu:
            return None
        before = torch.empty_like(self.d) if gelu_in is None else gelu_in
        self.args["epilogue"] = constants.GEMM_EPILOGUES["dgelu" if grad else "gelu"]
        self.args["pre_activation"] = spec(self.matrix("gelu_in", before))
        return None if grad else before

    def set_bias(self, bias: Tensor | None, gelu: bool, grad: bool) -> Tensor | None:
        if bias is None:
            return None
        if not grad:
            self.args["bias"] = spec(bias)
            return None
        if not gelu:  # of a gradient of weights: B has the rows' gradients
            return self.rows.sum(0, dtype=torch.float32)
        sums = torch.empty(self.columns, dtype=torch.float32, device=self.d.device)
        self.args["bias_grad"] = spec(sums)
        return sums

    def run(self, extra_output: Tensor | None) -> None:
        core = self.context.core
        if not self.bulk:
            call = core.all_gather if self.gathers else core.reduce_scatter
            return call(self.args | {"stream": self.stream})
        whole, own = self.ub.get_buffer(), self.ub.get_buffer(local_chunk=True)
        moved = (own, whole) if self.gathers else (whole, own)
        if extra_output is not None:
            moved = (moved[0], self.matrix("extra_output", extra_output))
        collective = _OPERATIONS["all_gather" if self.gathers else "reduce_scatter"]
        core.bulk(
            {
                "product": self.args,
                "collective": collective,
                "in": spec(moved[0]),
                "out": spec(moved[1]),
                "stream": self.stream,
            }
        )


def _stored(matrix: Matrix, transposed: bool, wanted: bool) -> tuple[Tensor, bool]:
    """A matrix stored as `wanted` says where it is stored both ways, and how it is stored."""
    if transposed == wanted or matrix.transposed is None:
        return matrix.rows, transposed
    return matrix.transposed, wanted
