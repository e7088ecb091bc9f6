"""TransformerEngine's JAX interface to products whose transfers hide behind them.

    from crossdock.compat import te_jax as te

    te.collective_gemm_bootstrap(num_total_devices=4, num_devices_per_process=4, process_id=0,
                                 tensor_parallel_size=4)
    y = te.gemm(x, w, collective_op=te.CollectiveOp.ALL_GATHER)

The names, their arguments and their defaults are TransformerEngine's (2.20). They stand on
`crossdock.jax.tp`, which code that is new should use. ``docs/transformer_engine.md`` says of each
option whether it is honoured, ignored or refused.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossdock.jax import tp

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "collective_gemm_bootstrap",
    "dense",
    "gemm",
    "noop_collective_op_set",
]

_Contracting = tuple[Sequence[int], Sequence[int]]


class CollectiveOp(enum.Enum):
    """The transfer before or after a product."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2

    @property
    def is_none(self) -> bool:
        """Whether there is none."""
        return self is CollectiveOp.NONE

    @property
    def is_all_gather(self) -> bool:
        """Whether the tokens of all ranks are gathered before it."""
        return self is CollectiveOp.ALL_GATHER

    @property
    def is_reduce_scatter(self) -> bool:
        """Whether it is summed over ranks, which get their tokens."""
        return self is CollectiveOp.REDUCE_SCATTER


@dataclasses.dataclass(frozen=True)
class CollectiveOpSet:
    """The transfers of a layer's product and of its gradient."""

    forward: CollectiveOp
    backward: CollectiveOp

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> CollectiveOpSet:
        """The pair with this transfer forward: all-gather and reduce-scatter, or none."""
        return CollectiveOpSet(forward_collective_op, _BACKWARD[forward_collective_op])


_BACKWARD = {
    CollectiveOp.NONE: CollectiveOp.NONE,
    CollectiveOp.ALL_GATHER: CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.REDUCE_SCATTER: CollectiveOp.ALL_GATHER,
}
noop_collective_op_set = CollectiveOpSet.create(CollectiveOp.NONE)


_joined: tp.TpMesh | None = None  # by bootstrap


def collective_gemm_bootstrap(
    num_total_devices: int,
    num_devices_per_process: int,
    process_id: int,
    tensor_parallel_size: int,
    num_max_streams: int = 3,
    compute_stream_priority: int = 0,
    communication_stream_priority: int = 0,
    num_sm_for_communication: int = 2,
    use_ce: bool = True,
    aggregate_all_gather: bool = False,
    use_cublasmp: bool = False,
    *,
    mesh: Mesh | None = None,
    tpsp_axis: str = "tpsp",
    data_axes: str | Sequence[str] = "dp",
) -> tp.TpMesh:
    """Joins the ranks. Collective, blocking; the last call counts.

    Args:
        num_total_devices, num_devices_per_process, process_id: of this job; checked.
        tensor_parallel_size: ranks that share a layer.
        num_max_streams, compute_stream_priority, communication_stream_priority,
            num_sm_for_communication, aggregate_all_gather: not used.
        use_ce: True.
        use_cublasmp: False.
        mesh: Crossdock's own: the mesh that programs use; None = all devices in order, dp x tpsp.
        tpsp_axis, data_axes: Crossdock's own: its axes.

    Returns:
        The joined mesh, which `crossdock.jax.tp` may use, too.

    Raises:
        ValueError: a number that is not this job's, or an option that is not there.
    """
    global _joined
    facts = {
        "num_total_devices": (num_total_devices, jax.device_count()),
        "num_devices_per_process": (num_devices_per_process, jax.local_device_count()),
        "process_id": (process_id, jax.process_index()),
    }
    for name, (given, found) in facts.items():
        if given != found:
            raise ValueError(f"{name}: expected {found}, as JAX says, got {given}")
    if not use_ce:
        raise ValueError("use_ce: expected True, as rows are moved by copy engines, got False")
    if use_cublasmp:
        raise ValueError("use_cublasmp: expected False, as its calls wait on the host; got True")
    if tensor_parallel_size < 1 or num_total_devices % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size: expected a divisor of {num_total_devices} devices, got "
            f"{tensor_parallel_size}"
        )
    if mesh is None:
        devices = np.array(jax.devices()).reshape(-1, tensor_parallel_size)
        mesh, tpsp_axis, data_axes = Mesh(devices, ("dp", "tpsp")), "tpsp", "dp"
    elif mesh.shape.get(tpsp_axis) != tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size: expected the length of {tpsp_axis!r} in {dict(mesh.shape)}, "
            f"got {tensor_parallel_size}"
        )
    _joined = tp.init(mesh, tpsp_axis, data_axes=data_axes)
    return _joined


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    contracting_dims: _Contracting = ((-1,), (0,)),
    lhs_quantizer: None = None,
    rhs_quantizer: None = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
    *,
    bias: jax.Array | None = None,
) -> jax.Array:
    """A product with its transfer. Differentiable.

    Args:
        lhs: tokens, ``[batch, sequence, K]`` or ``[tokens, K]``. With a transfer, global arrays lie
            on the mesh as `crossdock.jax.tp` takes them, gathered or scattered along the sequence.
        rhs: ``[K, N]``, or as `contracting_dims` says ``[N, K]``.
        contracting_dims: of lhs and rhs. With a transfer, lhs has its last one.
        lhs_quantizer, rhs_quantizer: None.
        transpose_batch_sequence: whether lhs is ``[sequence, batch, K]``.
        collective_op: the transfer.
        bias: ``[N]``, added once.

    Raises:
        RuntimeError: `collective_gemm_bootstrap` has not been called.
        TypeError, ValueError: an argument that is not there, or as `crossdock.jax.tp` says.
    """
    for name, quantizer in (("lhs_quantizer", lhs_quantizer), ("rhs_quantizer", rhs_quantizer)):
        if quantizer is not None:
            raise ValueError(f"{name}: expected None, as there is no fp8, got {quantizer!r}")
    if not isinstance(collective_op, CollectiveOp):
        raise TypeError(f"collective_op: expected a CollectiveOp, got {collective_op!r}")
    of_lhs = tuple(operator.index(dim) % lhs.ndim for dim in contracting_dims[0])
    of_rhs = tuple(operator.index(dim) % rhs.ndim for dim in contracting_dims[1])
    if collective_op.is_none:
        product = jax.lax.dot_general(lhs, rhs, ((of_lhs, of_rhs), ((), ())))
        return product if bias is None else product + bias
    if of_lhs != (lhs.ndim - 1,) or rhs.ndim != 2 or of_rhs not in ((0,), (1,)):
        raise ValueError(
            "contracting_dims: expected the last dimension of lhs and one of the two of rhs, got "
            f"{contracting_dims} for shapes {lhs.shape} and {rhs.shape}"
        )
    if _joined is None:
        raise RuntimeError("gemm: expected a call of collective_gemm_bootstrap before it")
    sequence = 0 if transpose_batch_sequence or lhs.ndim == 2 else 1
    options: dict[str, Any] = {"bias": bias, "transpose_b": of_rhs == (1,), "mesh": _joined}
    if collective_op.is_reduce_scatter:
        return tp.matmul_reduce_scatter(lhs, rhs, scatter_dim=sequence, **options).out
    return tp.all_gather_matmul(lhs, rhs, gather_dim=sequence, **options).out


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    contracting_dims: _Contracting = ((-1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: None = None,
    kernel_axes: None = None,
    output_axes: None = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: None = None,
) -> jax.Array:
    """A linear layer, whose gradient has the other transfer of `collective_op_set`.

    Args:
        x, kernel, bias, contracting_dims, transpose_batch_sequence: as of `gemm`.
        input_axes, kernel_axes, output_axes: None: arrays lie as `crossdock.jax.tp` says.
        collective_op_set: the transfers, a pair that `CollectiveOpSet.create` makes.
        quantizer_set: None.

    Raises:
        RuntimeError, TypeError, ValueError: as `gemm`.
    """
    refused = {
        "input_axes": input_axes,
        "kernel_axes": kernel_axes,
        "output_axes": output_axes,
        "quantizer_set": quantizer_set,
    }
    for name, given in refused.items():
        if given is not None:
            raise ValueError(f"{name}: expected None, got {given!r}")
    if not isinstance(collective_op_set, CollectiveOpSet):
        raise TypeError(f"collective_op_set: expected a CollectiveOpSet, got {collective_op_set!r}")
    forward, backward = collective_op_set.forward, collective_op_set.backward
    if backward is not _BACKWARD[forward]:
        raise ValueError(
            f"collective_op_set: expected {_BACKWARD[forward]} backward of {forward}, got "
            f"{backward}"
        )
    return gemm(
        x,
        kernel,
        contracting_dims,
        transpose_batch_sequence=transpose_batch_sequence,
        collective_op=forward,
        bias=bias,
    )
