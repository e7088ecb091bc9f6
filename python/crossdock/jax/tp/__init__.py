"""Tensor and sequence parallelism for JAX: products whose transfers hide behind them.

tp = crossdock.jax.tp.init(mesh, "tp")           # joins the mesh's ranks

h, _ = all_gather_matmul(x, w_in, activation="gelu")     # tokens split -> features split
y, _ = matmul_reduce_scatter(h, w_out)                   # features split -> tokens split
"""

from crossdock import GemmConfig

from ._contexts import TpContext
from ._mesh import TpMesh, init
from ._products import (
    GatheredProduct,
    Product,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from ._scaled_products import (
    all_gather_scaled_matmul,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)

__all__ = [
    "GatheredProduct",
    "GemmConfig",
    "Product",
    "TpContext",
    "TpMesh",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
