"""Tensor parallelism for PyTorch: products of spread matrices, overlapped with their transfer.

    import crossdock.torch as xd
    from crossdock.torch import tp

    xd.init()
    context = tp.TpContext(max_tokens=4096, max_k=8192, max_n=8192)
    inner = tp.all_gather_matmul(x, w_in.t(), context, activation="gelu")  # tokens of all ranks
    out = tp.matmul_reduce_scatter(inner, w_out.t(), context)              # this rank's tokens

Operations are collective, in one order on all ranks, and use the current CUDA stream.
"""

from ._async_tp import disable_async_tp, enable_async_tp
from ._context import TpContext
from ._functions import (
    all_gather_matmul,
    all_gather_scaled_matmul,
    bulk_all_gather,
    bulk_reduce_scatter,
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from ._linear import column_parallel_linear, row_parallel_linear
from ._modules import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelMLP,
    TensorParallelAttentionProjections,
)
from ._torch_names import (
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceParallelMLP",
    "TensorParallelAttentionProjections",
    "TpContext",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "column_parallel_linear",
    "disable_async_tp",
    "enable_async_tp",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "row_parallel_linear",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
