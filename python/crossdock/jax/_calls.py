"""The custom calls on one rank's arrays: shapes, names and order; no derivatives.

Every function runs inside ``shard_map`` and takes one rank's parts, with any number of leading
dimensions, and the order, which it returns last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from crossdock._core import constants
from crossdock._dtypes import numpy_dtype

from ._limits import first_order_only
from ._quantised import ELEMENT
from ._unequal import own, own_offsets, unequal

if TYPE_CHECKING:
    from crossdock._quantise import QuantiseWay

    from ._group import AnyGroup, EpGroup, LowLatencyGroup

__all__ = [
    "LayerInputs",
    "LayerSaved",
    "Layer",
    "combine",
    "combine_bwd",
    "dispatch",
    "dispatch_bwd",
    "ll_combine",
    "ll_dispatch",
    "ll_mask_get",
    "ll_mask_set",
    "ll_reset",
    "moe_backward",
    "moe_forward",
    "prepare",
    "uniform",
    "varying",
]

Array: TypeAlias = jax.Array
_Given = TypeVar("_Given", bound=jax.Array | None)
_Results = dict[str, tuple[tuple[int, ...], Any]]  # name -> (shape, dtype)
_NONE: Mapping[str, str] = {}


def prepare(
    group: EpGroup, alignment: int, parts: int, topk_idx: Array, order: Array
) -> tuple[Array, ...]:
    """-> plan, counts, padded_counts, offsets, total, rank_rows, order."""
    ranks = group.place.num_ranks
    experts = group.config.local_experts(ranks)
    outputs: _Results = {
        "plan": ((group.plan_bytes,), np.uint8),
        "counts": ((experts,), np.int32),
        "padded_counts": ((experts,), np.int32),
        "offsets": ((experts + 1,), np.int32),
        "total": ((1,), np.int32),
        "rank_rows": ((ranks, ranks), np.int32),
    }
    inputs = {"topk_idx": _rows(topk_idx)}
    data, counts, padded_counts, offsets, *others = _call(
        "prepare", group, inputs, outputs, order, alignment=alignment, parts=parts
    )
    counts, padded_counts = (own(group, array) for array in (counts, padded_counts))
    return data, counts, padded_counts, own_offsets(group, offsets), *others


def dispatch(
    group: EpGroup,
    way: QuantiseWay | None,
    plan: Array,
    tokens: Array,
    scales: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Array | None, ...]:
    """-> recv_tokens, recv_scales, link (see `QuantisedRows`), recv_weights, recv_topk_idx, order.

    All but the first and last may be None.
    """
    rows, columns = group.rows, tokens.shape[-1]
    topk = group.config.max_topk if topk_weights is None else topk_weights.shape[-1]
    inputs = {"plan": plan, "tokens": _rows(tokens)}
    outputs: _Results = {"recv_tokens": ((rows, columns), tokens.dtype if way is None else ELEMENT)}
    if way is not None:
        outputs["recv_scales"] = ((rows, columns // way.block), numpy_dtype(way.scale))
    elif scales is not None:
        inputs["scales"] = _rows(scales)
        outputs["recv_scales"] = ((rows, scales.shape[-1]), scales.dtype)
    if topk_weights is not None:
        inputs["topk_weights"] = _rows(topk_weights)
        shape = (rows, topk) if group.config.rank_major else (rows,)
        outputs["recv_weights"] = (shape, np.float32)
    if group.config.rank_major:
        outputs["recv_topk_idx"] = ((rows, topk), np.int32)
    received, scales, *others, order = _call(
        "dispatch", group, inputs, outputs, order, _DISPATCH_RESULTS, way=way
    )
    link = None if way is None else uniform(jnp.zeros((rows, columns), tokens.dtype), order)[0]
    return received, scales, link, *others, order


_DISPATCH_RESULTS = ("recv_tokens", "recv_scales", "recv_weights", "recv_topk_idx")


def combine(
    group: EpGroup,
    shape: tuple[int, ...],
    wire: int,
    plan: Array,
    expert_out: Array,
    weights: Array | None,
    order: Array,
) -> tuple[Array, ...]:
    """-> out ``[*shape, H]``, order."""
    hidden = expert_out.shape[-1]
    inputs = {"plan": plan, "expert_out": expert_out}
    if weights is not None:
        inputs["weights"] = weights
    outputs: _Results = {"out": ((math.prod(shape), hidden), expert_out.dtype)}
    out, order = _call("combine", group, inputs, outputs, order, wire=wire)
    return out.reshape(*shape, hidden), order


def dispatch_bwd(
    group: EpGroup,
    shape: tuple[int, ...],
    topk: int,
    plan: Array,
    grad_tokens: Array | None,
    grad_weights: Array | None,
    order: Array,
) -> tuple[Array | None, ...]:
    """-> grad of tokens ``[*shape, H]`` and of topk_weights ``[*shape, K]``, or None each; order.

    One of the two gradients must be given.
    """
    tokens = math.prod(shape)
    inputs = {"plan": plan}
    outputs: _Results = {}
    if grad_tokens is not None:
        inputs["grad_recv_tokens"] = grad_tokens
        outputs["grad_tokens"] = ((tokens, grad_tokens.shape[-1]), grad_tokens.dtype)
    if grad_weights is not None:
        inputs["grad_recv_weights"] = grad_weights
        outputs["grad_topk_weights"] = ((tokens, topk), np.float32)
    names = ("grad_tokens", "grad_topk_weights")
    *grads, order = _call("dispatch_bwd", group, inputs, outputs, order, names)
    return (*(None if g is None else g.reshape(*shape, g.shape[-1]) for g in grads), order)


def combine_bwd(
    group: EpGroup,
    plan: Array,
    grad_out: Array,
    expert_out: Array | None,
    weights: Array | None,
    order: Array,
) -> tuple[Array | None, ...]:
    """-> grad of expert_out ``[R, H]``, grad of weights ``[R]`` or None, order."""
    inputs = {"plan": plan, "grad_out": _rows(grad_out)}
    outputs: _Results = {"grad_expert_out": ((group.rows, grad_out.shape[-1]), grad_out.dtype)}
    if weights is not None and expert_out is not None:
        inputs |= {"expert_out": expert_out, "weights": weights}
        outputs["grad_weights"] = ((group.rows,), np.float32)
    names = ("grad_expert_out", "grad_weights")
    return _call("combine_bwd", group, inputs, outputs, order, names)


class Layer(NamedTuple):
    """The numbers of a layer's passes, by the names of ``crossdock/moe.h``."""

    activation: int
    parts: int
    num_sms: int


class LayerInputs(NamedTuple):
    """The arrays of a layer's forward pass, by the names of ``crossdock/moe.h``, and the order."""

    plan: Array
    offsets: Array
    tokens: Array
    topk_weights: Array | None
    w_in: Array
    w_out: Array
    order: Array


class LayerSaved(NamedTuple):
    """The arrays that the backward pass reads of the forward pass.

    Without expert_out topk_weights has no gradient, without recv_tokens w_in, and without activated
    w_out.
    """

    plan: Array
    offsets: Array
    w_in: Array
    w_out: Array
    recv_tokens: Array | None
    recv_weights: Array | None
    inner: Array
    activated: Array | None
    expert_out: Array | None


def moe_forward(
    group: EpGroup, layer: Layer, shape: tuple[int, ...], given: LayerInputs
) -> tuple[Any, ...]:
    """-> recv_tokens, recv_weights, inner, activated, expert_out, out ``[*shape, H]``, order.

    recv_weights is None without topk_weights.
    """
    hidden, ffn, dtype = given.tokens.shape[-1], given.w_out.shape[-2], given.tokens.dtype
    inputs = _present(given._replace(tokens=_rows(given.tokens)))
    order = inputs.pop("order")
    outputs: _Results = {"recv_tokens": ((group.rows, hidden), dtype)}
    if given.topk_weights is not None:
        inputs["topk_weights"] = _rows(given.topk_weights)
        outputs["recv_weights"] = ((group.rows,), np.float32)
    columns = {"inner": 2 * ffn, "activated": ffn, "expert_out": hidden}
    outputs |= {name: ((group.rows, number), dtype) for name, number in columns.items()}
    outputs["out"] = ((math.prod(shape), hidden), dtype)
    names = ("recv_tokens", "recv_weights", *columns, "out")
    *found, out, order = _call(
        "moe_forward", group, inputs, outputs, order, names, **layer._asdict()
    )
    return *found, out.reshape(*shape, hidden), order


def moe_backward(
    group: EpGroup,
    layer: Layer,
    shape: tuple[int, ...],
    topk: int,
    saved: LayerSaved,
    grad_out: Array,
    order: Array,
) -> tuple[Any, ...]:
    """-> gradients of tokens, topk_weights, w_in and w_out, order."""
    rows, hidden, dtype = group.rows, grad_out.shape[-1], grad_out.dtype
    ffn = saved.w_out.shape[-2]
    inputs = {"grad_out": _rows(grad_out), **_present(saved)}
    columns = {"grad_expert_out": hidden, "grad_activated": ffn, "grad_inner": 2 * ffn}
    columns["grad_recv_tokens"] = hidden
    outputs: _Results = {name: ((rows, number), dtype) for name, number in columns.items()}
    outputs["grad_tokens"] = ((math.prod(shape), hidden), dtype)
    if saved.expert_out is not None:
        outputs["grad_recv_weights"] = ((rows,), np.float32)
        outputs["grad_topk_weights"] = ((math.prod(shape), topk), np.float32)
    if saved.recv_tokens is not None:
        outputs["grad_w_in"] = (saved.w_in.shape, dtype)
    if saved.activated is not None:
        outputs["grad_w_out"] = (saved.w_out.shape, dtype)
    names = ("grad_tokens", "grad_topk_weights", "grad_w_in", "grad_w_out")
    numbers = layer._asdict()
    grad_tokens, grad_weights, *grads, order = _call(
        "moe_backward", group, inputs, outputs, order, names, {"inner": "grad_inner"}, **numbers
    )
    if grad_weights is not None:
        grad_weights = grad_weights.reshape(*shape, topk)
    grads = [None if grad is None else own(group, grad) for grad in grads]
    return grad_tokens.reshape(*shape, hidden), grad_weights, *grads, order


def ll_dispatch(
    group: LowLatencyGroup,
    way: QuantiseWay | None,
    phase: int,
    columns: int,
    dtype: Any,
    batch: tuple[int, int, bool],
    tokens: Array | None,
    topk_idx: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Array | None, ...]:
    """-> plan, recv_tokens, recv_scales, counts, row_offsets, recv_weights, recv_topk_idx, order.

    After a first half order alone. The three in front of it are None where there are slots.

    Args:
        columns, dtype: of the tokens that are sent, which a second half is not given.
        batch: T, K, and whether there are weights, likewise.
    """
    given = {"tokens": tokens, "topk_idx": topk_idx, "topk_weights": topk_weights}
    inputs = {name: _rows(array) for name, array in given.items() if array is not None}
    most = 0 if group.has_slots else batch[0]
    numbers: dict[str, Any] = {"way": way, "phase": phase, "max_tokens": most}
    if phase == _SEND:
        return _call_ll("dispatch", group, inputs, {}, order, **numbers)
    places, local = group.places(most), group.config.local_experts(group.place.num_ranks)
    outputs: _Results = {
        "plan": ((group.plan_bytes,), np.uint8),
        "recv_tokens": ((*places, columns), dtype if way is None else ELEMENT),
    }
    if way is not None:
        outputs["recv_scales"] = ((*places, columns // way.block), numpy_dtype(way.scale))
    outputs["counts"] = ((local,), np.int32)
    if not group.has_slots:
        outputs |= _beside(group, places, batch)
    *found, order = _call_ll("dispatch", group, inputs, outputs, order, _LL_RESULTS, **numbers)
    found[3] = own(group, found[3])
    if found[4] is not None:
        found[4] = found[4][:, 0]  # the lower half of each
        if group.config.receive == "by_expert":
            found[4] = own_offsets(group, found[4])
    return *found, order


_LL_RESULTS = (
    "plan",
    "recv_tokens",
    "recv_scales",
    "counts",
    "row_offsets",
    "recv_weights",
    "recv_topk_idx",
)


def _beside(
    group: LowLatencyGroup, places: tuple[int, ...], batch: tuple[int, int, bool]
) -> _Results:
    """The outputs that only a dispatch without slots has."""
    _, topk, weighted = batch
    by_rank, ranks = group.config.receive == "by_rank", group.place.num_ranks
    zones = ranks if by_rank else group.config.local_experts(ranks)
    # Each of 64 bits, which JAX does not have unless it is told to.
    found: _Results = {"row_offsets": ((zones + 1, 2), np.int32)}
    if weighted:
        found["recv_weights"] = ((*places, topk) if by_rank else places, np.float32)
    if by_rank:
        found["recv_topk_idx"] = ((*places, topk), np.int32)
    return found


def ll_combine(
    group: LowLatencyGroup,
    shape: tuple[int, ...],
    phase: int,
    columns: int,
    dtype: Any,
    wire: int,
    plan: Array,
    expert_out: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Array, ...]:
    """-> out ``[*shape, H]``, order; after a first half order alone."""
    inputs = {"plan": plan}
    if expert_out is not None:
        inputs["expert_out"] = expert_out
    if topk_weights is not None:
        inputs["topk_weights"] = _rows(topk_weights)
    if phase == _SEND:
        return _call_ll("combine", group, inputs, {}, order, phase=phase, wire=wire)
    outputs: _Results = {"out": ((math.prod(shape), columns), dtype)}
    out, order = _call_ll("combine", group, inputs, outputs, order, phase=phase, wire=wire)
    return out.reshape(*shape, columns), order


def ll_mask_get(group: LowLatencyGroup, order: Array) -> tuple[Array, Array]:
    """-> mask, order."""
    outputs: _Results = {"mask": ((group.place.num_ranks,), np.int32)}
    mask, order = _call_ll("mask_get", group, {}, outputs, order)
    return mask, order


def ll_mask_set(group: LowLatencyGroup, rank: int, masked: bool, order: Array) -> tuple[Array]:
    """-> order. The rank itself does nothing."""
    return _call_ll("mask_set", group, {}, {}, order, mask=(rank, masked))


def ll_reset(group: LowLatencyGroup, order: Array) -> tuple[Array]:
    """-> order."""
    return _call_ll("reset", group, {}, {}, order)


_SEND = constants.PHASES["send"]


def uniform(*arrays: _Given) -> tuple[_Given, ...]:
    """The arrays, all as varying over the mesh axes over which any of them varies."""
    axes = frozenset().union(*(varying(array) for array in arrays if array is not None))

    def cast(array: _Given) -> _Given:
        missing = () if array is None else tuple(axes - varying(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(cast(array) for array in arrays)


def varying(array: Array) -> frozenset[str]:
    """The mesh axes over which an array is known to vary inside shard_map."""
    kind = jax.typeof(array).manual_axis_type
    return frozenset() if kind is None else frozenset(kind.varying)


def _present(arrays: LayerInputs | LayerSaved) -> dict[str, Array]:
    """The arrays that are there, by name."""
    return {name: array for name, array in arrays._asdict().items() if array is not None}


def _rows(array: Array) -> Array:
    """``[T, columns]`` of an array with any leading dimensions."""
    return array.reshape(-1, array.shape[-1])


def _call(
    operation: str,
    group: EpGroup,
    inputs: Mapping[str, Array],
    outputs: _Results,
    order: Array,
    names: tuple[str, ...] = (),
    reused: Mapping[str, str] = _NONE,
    way: QuantiseWay | None = None,
    **numbers: int,
) -> tuple[Any, ...]:
    """Runs one operation of ``crossdock/ep.h`` or ``crossdock/moe.h``.

    Args:
        inputs, outputs, names, reused: as of `_run`.
        way: in which rows are quantised.
        numbers: of `_NUMBERS`, those that are not 0.
    """
    arrays = uniform(*inputs.values(), order)
    if operation.endswith(("_bwd", "_backward")):
        arrays = first_order_only(f"ep_{operation}", arrays)
    all_numbers = _NUMBERS | {"quantise": 0 if way is None else way.code} | numbers
    target, given = f"crossdock_ep_{operation}", (inputs, arrays)
    return _run(target, group, given, outputs, names, all_numbers, reused)


_NUMBERS = dict.fromkeys(
    ("quantise", "alignment", "wire", "parts", "num_sms", "activation"), 0
)  # of each call, by the names of the C API's arguments


def _call_ll(
    operation: str,
    group: LowLatencyGroup,
    inputs: Mapping[str, Array],
    outputs: _Results,
    order: Array,
    names: tuple[str, ...] = (),
    way: QuantiseWay | None = None,
    max_tokens: int = 0,
    phase: int = 0,
    mask: tuple[int, bool] = (-1, False),
    wire: int = 0,
) -> tuple[Any, ...]:
    """Runs one operation of ``crossdock/low_latency.h``.

    Args:
        inputs, outputs, names: as of `_run`.
        way: in which rows are quantised.
        max_tokens: of a rank in a dispatch without slots.
        phase: one of ``constants.PHASES``.
        mask: a rank, and whether it is to be masked.
        wire: of combine, the library's number.
    """
    arrays = uniform(*inputs.values(), order)
    numbers = {
        "quantise": 0 if way is None else way.code,
        "wire": wire,
        "max_tokens": max_tokens,
        "phase": phase,
        "rank": mask[0],
        "masked": int(mask[1]),
    }
    return _run(f"crossdock_ll_{operation}", group, (inputs, arrays), outputs, names, numbers)


def _run(
    target: str,
    group: AnyGroup,
    given: tuple[Mapping[str, Array], tuple[Array, ...]],
    outputs: _Results,
    names: tuple[str, ...],
    numbers: Mapping[str, int],
    reused: Mapping[str, str] = _NONE,
) -> tuple[Any, ...]:
    """Runs one operation.

    Args:
        target: its custom call.
        given: inputs by their names in the C header; and these arrays, varying alike, with the
            order behind them.
        outputs: by their names in the C header, as (shape, dtype).
        names: of the results, those that are not in `outputs` as None; () = all outputs.
        numbers: what the call is given beside arrays.
        reused: by an input's name the output that may lie in its memory.

    Returns:
        The results, and the order. The order is only passed through: it is one buffer before and
        after, which nothing writes.
    """
    inputs, arrays = given
    order = arrays[-1]
    kind = _kind(order)
    results = [jax.ShapeDtypeStruct(shape, dtype, **kind) for shape, dtype in outputs.values()]
    results.append(jax.ShapeDtypeStruct(order.shape, order.dtype, **kind))
    at, to = (list(one) for one in (inputs, outputs))
    aliases = {at.index(name): to.index(reused[name]) for name in reused}
    aliases[len(inputs)] = len(outputs)
    missing, shortened = unequal(group, [*inputs, *outputs])
    call = jax.ffi.ffi_call(
        target,
        results,
        input_output_aliases=aliases,
        vmap_method=None,
    )
    *found, order = call(
        *arrays,
        group=np.int64(group.number),
        config=group.text,
        arguments=" ".join([*inputs, "order"]),
        results=" ".join([*outputs, "order"]),
        by_expert=" ".join(shortened),
        missing=np.array(missing, np.int64),
        **{name: np.int64(number) for name, number in numbers.items()},
    )
    by_name = dict(zip(outputs, found))
    return (*(by_name.get(name) for name in names or outputs), order)


def _kind(array: Array) -> dict[str, Any]:
    """The declaration of a result that varies over the mesh as `array` does."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {"manual_axis_type": jax.typeof(array).manual_axis_type, "sharding": sharding}
