"""prepare, dispatch and combine with their derivatives."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire, wire_of_rows

from . import _calls
from ._config import AnyConfig, EpConfig
from ._group import AnyGroup, EpGroup
from ._limits import refuse_forward_mode, refuse_vmap
from ._mesh import EpMesh, current_mesh
from ._order import kept
from ._plan import Dispatched, EpPlan
from ._quantised import ELEMENT, QuantisedRows
from ._where import batch_parts, check_layout, inside, laid, local_shape, on_ranks

__all__ = [
    "Site",
    "check_batch",
    "check_payload",
    "check_weights",
    "ep_combine",
    "ep_dispatch",
    "ep_prepare",
    "first_order",
    "order_of",
    "plan_of",
    "wire_of",
]

Array: TypeAlias = jax.Array
_X = TypeVar("_X", bound=jax.Array | QuantisedRows)


class Site(NamedTuple):
    """The static part of an operation: its group, and one rank's batch ``[*shape, K]``."""

    group: EpGroup
    shape: tuple[int, ...]
    topk: int


# ---- For users ----------------------------------------------------------------------------------


def ep_prepare(
    config: EpConfig,
    topk_idx: Array,
    *,
    alignment: int | None = None,
    after: EpPlan | Array | None = None,
    mesh: EpMesh | None = None,
) -> EpPlan:
    """Exchanges counts and makes the plan of a batch. Collective.

    Inside ``shard_map`` over the mesh of `init`, arrays are one rank's; outside, on global arrays,
    their first dimension is split over the axes of data and experts.

    Args:
        config: equal on all ranks.
        topk_idx: ``[..., K]`` int32 or int64, the expert of each choice; -1 = none.
        alignment: of this plan's rows per expert, a power of two up to the config's; None = the
            config's.
        after: a plan, or its `order`, whose operations so far come before those of this one, and
            whose backward operations come after, although no data says so. Needed where two layers
            of one program do not depend on one another: without it XLA may run their operations in
            another order on every process.
        mesh: from `init`; None = the last one.

    Returns:
        The plan: for any number of `ep_dispatch` and `ep_combine`.

    Raises:
        TypeError, ValueError: a bad argument, while tracing.
        jax.errors.JaxRuntimeError: when it runs, on all ranks. On the CPU: INVALID_ARGUMENT for
            expert ids out of range or repeated in a row, OUT_OF_RANGE for more rows than some
            capacity, FAILED_PRECONDITION where ranks disagree. On GPUs `EpMesh.check` raises these.
    """
    group = (current_mesh() if mesh is None else mesh).group(config)
    return plan_of(group, topk_idx, alignment, after)


def plan_of(
    group: EpGroup,
    topk_idx: Array,
    alignment: int | None,
    after: EpPlan | Array | None,
    parts: int = 0,
) -> EpPlan:
    """`ep_prepare` of a group.

    Args:
        parts: of the plan; 0 = 1.
    """
    config = group.config
    topk_idx = jnp.asarray(topk_idx)
    if topk_idx.dtype not in (np.int32, np.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {topk_idx.dtype}")
    refuse_vmap("ep_prepare", topk_idx)
    check_layout(group.place, "topk_idx", topk_idx)
    if topk_idx.ndim < 2 or not 1 <= topk_idx.shape[-1] <= config.max_topk:
        raise ValueError(
            f"topk_idx: expected [..., K] with K from 1 to {config.max_topk}, got {topk_idx.shape}"
        )
    shape = local_shape(group.place, "topk_idx", topk_idx.shape[:-1])
    if math.prod(shape) > config.max_tokens_per_rank:
        raise ValueError(
            f"topk_idx: expected at most {config.max_tokens_per_rank} tokens of a rank, got {shape}"
        )
    alignment = config.alignment if alignment is None else operator.index(alignment)
    if not 1 <= alignment <= config.alignment or alignment.bit_count() != 1:
        raise ValueError(
            f"alignment: expected a power of two up to the config's {config.alignment}, or None; "
            f"got {alignment}"
        )
    site = Site(group, shape, topk_idx.shape[-1])
    if after is None:
        order = first_order(group)
    else:
        order = order_of(group, after.order if isinstance(after, EpPlan) else after)
    arrays = _prepare(site, alignment, parts, *_calls.uniform(topk_idx, order))
    data, counts, padded_counts, offsets, total, rank_rows, order = arrays
    return EpPlan(data, counts, padded_counts, offsets, total, rank_rows, order, *site)


@overload
def ep_dispatch(
    plan: EpPlan, tokens: _X, topk_weights: Array | None = None, *, quantise: Literal[False] = False
) -> Dispatched[_X]: ...
@overload
def ep_dispatch(
    plan: EpPlan, tokens: Array, topk_weights: Array | None = None, *, quantise: Literal[True] | str
) -> Dispatched[QuantisedRows]: ...
@overload
def ep_dispatch(
    plan: EpPlan, tokens: Array, topk_weights: Array | None = None, *, quantise: bool | str
) -> Dispatched[Array | QuantisedRows]: ...
def ep_dispatch(
    plan: EpPlan,
    tokens: Array | QuantisedRows,
    topk_weights: Array | None = None,
    *,
    quantise: bool | str = False,
) -> Dispatched[Array | QuantisedRows]:
    """Copies every token's row to the ranks that hold its experts. Collective, differentiable.

    Args:
        plan: from `ep_prepare`.
        tokens: ``[..., H]`` bfloat16, float16 or float32, with the leading dimensions of topk_idx.
            Or rows without a gradient: 8-bit ones (float8_e4m3fn, float8_e5m2, int8, uint8), and
            `QuantisedRows`, whose scales travel beside them.
        topk_weights: ``[..., K]`` float32. Other types are refused: cast them.
        quantise: send bfloat16 rows as float8_e4m3fn with scales, H a multiple of what shares one.
            "fp8_block128" (or True): a float32 per 128 columns; "fp8_block128_pow2": these are
            powers of two; "fp8_block128_e8m0": as float8_e8m0fnu; "mxfp8": likewise, per 32
            columns. The result's tokens are `QuantisedRows` then, whose `dequantise` gives rows
            back; their gradient reaches tokens as it is, in bfloat16 (straight-through).

    Returns:
        tokens ``[R, H]``, weights, topk_idx, and the plan for what comes after.

    Raises:
        TypeError, ValueError: a bad argument, while tracing.
        jax.errors.JaxRuntimeError: as `ep_prepare`.
    """
    site, way = _site(plan), quantise_way(quantise)
    scales = jnp.asarray(tokens.scales) if isinstance(tokens, QuantisedRows) else None
    tokens = jnp.asarray(tokens.elements if isinstance(tokens, QuantisedRows) else tokens)
    check_payload("tokens", tokens, site.group.config, _NARROW)
    refuse_vmap("ep_dispatch", tokens, topk_weights)
    check_batch(site, "tokens", tokens, None)
    if way is not None and (tokens.dtype != jnp.bfloat16 or tokens.shape[-1] % way.block):
        raise ValueError(
            f"tokens: expected bfloat16 with a multiple of {way.block} columns, to be quantised; "
            f"got {tokens.dtype} of shape {tokens.shape}"
        )
    if scales is not None:
        if tokens.dtype not in _NARROW:
            raise TypeError(f"tokens.elements: expected 8-bit elements, got {tokens.dtype}")
        if scales.dtype not in _SCALES:
            raise TypeError(
                f"tokens.scales: expected float32, float8_e8m0fnu or uint8, got {scales.dtype}"
            )
        check_batch(site, "tokens.scales", scales, None)
    if topk_weights is not None:
        topk_weights = jnp.asarray(topk_weights)
        check_weights("topk_weights", topk_weights)
        check_batch(site, "topk_weights", topk_weights, site.topk)
    arrays = _calls.uniform(plan.data, tokens, scales, topk_weights, plan.order)
    with refuse_forward_mode("ep_dispatch"):
        received, scales, link, weights, topk_idx, order = _dispatch(site, way, *arrays)
    rows = received if scales is None else QuantisedRows(received, scales, link)
    return Dispatched(rows, weights, topk_idx, plan.after(order))


def ep_combine(
    plan: EpPlan, expert_out: Array, weights: Array | None = None, *, wire: Wire = "same"
) -> tuple[Array, EpPlan]:
    """Brings the experts' results back and sums them per token. Collective, differentiable.

    Sums are in float32 in a fixed order: equal inputs give equal bits.

    Args:
        plan: from `ep_dispatch`.
        expert_out: ``[R, H]`` bfloat16, float16 or float32, a result for each received row.
        weights: ``[R]`` float32, usually ``Dispatched.weights``: the sum is weighted. expert_major
            only: in rank_major a row stands for several experts, whose results are summed already.
        wire: the form in which each rank's sum of a token's rows crosses, one of the config's
            ``wire_formats``: ``"same"``: rounded to the dtype of expert_out; ``"float32"``: not
            rounded; ``"fp8"``, which is ``"fp8_block128"``, ``"fp8_block128_pow2"`` or
            ``"fp8_block128_e8m0"``: as float8_e4m3fn with a scale per 128 columns, H a multiple of
            them. ``crossdock/quantise.h`` (xd_ep_wire) defines every bit. The gradient is
            straight-through: that of "same", and its rows are not quantised.

    Returns:
        ``[..., H]`` with the leading dimensions of topk_idx, zero for a token without rows; and the
        plan for what comes after.

    Raises:
        TypeError, ValueError: a bad argument, while tracing.
        jax.errors.JaxRuntimeError: as `ep_prepare`.
    """
    site = _site(plan)
    config, place = site.group.config, site.group.place
    expert_out = jnp.asarray(expert_out)
    check_payload("expert_out", expert_out, config)
    number = wire_of(config, wire, expert_out)
    refuse_vmap("ep_combine", expert_out, weights)
    check_layout(place, "expert_out", expert_out)
    rows = local_shape(place, "expert_out", expert_out.shape[:1])
    if expert_out.ndim != 2 or rows != (site.group.rows,):
        raise ValueError(
            f"expert_out: expected {site.group.rows} rows of a rank, [R, H]; got {expert_out.shape}"
        )
    if weights is not None:
        weights = jnp.asarray(weights)
        check_weights("weights", weights)
        check_layout(place, "weights", weights)
        if config.rank_major:
            raise ValueError("weights: expected None in rank_major, whose rows are summed already")
        if weights.shape != expert_out.shape[:1]:
            raise ValueError(
                f"weights: expected one for each of {expert_out.shape[0]} rows, got {weights.shape}"
            )
    arrays = _calls.uniform(plan.data, expert_out, weights, plan.order)
    with refuse_forward_mode("ep_combine"):
        out, order = _combine(site, number, *arrays)
    return out, plan.after(order)


# ---- Derivatives --------------------------------------------------------------------------------
# Their order: _order.py.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _prepare(
    site: Site, alignment: int, parts: int, topk_idx: Array, order: Array
) -> tuple[Array, ...]:
    return on_ranks(_calls.prepare, site.group, alignment, parts)(topk_idx, order)


def _prepare_fwd(
    site: Site, alignment: int, parts: int, topk_idx: Array, order: Array
) -> tuple[Any, None]:
    return _prepare(site, alignment, parts, topk_idx, order), None


def _prepare_bwd(
    site: Site, alignment: int, parts: int, saved: None, grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    return None, grads[-1]


_prepare.defvjp(_prepare_fwd, _prepare_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatch(
    site: Site,
    way: QuantiseWay | None,
    plan: Array,
    tokens: Array,
    scales: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Any, ...]:
    run = on_ranks(_calls.dispatch, site.group, way)
    return run(plan, tokens, scales, topk_weights, order)


def _dispatch_fwd(site, way, *arrays):
    results = _dispatch(site, way, *arrays)
    return results, (arrays[0], kept(results[-1], arrays[-1]))


def _dispatch_bwd(site, way, saved, grads):
    plan, order = saved
    grad_tokens, _, grad_link, grad_weights, _, grad_order = grads
    if way is not None:
        grad_tokens = grad_link
    elif grad_tokens.dtype not in _WIDE:
        grad_tokens = None
    if grad_tokens is None and grad_weights is None:
        return None, None, None, None, grad_order
    backward = on_ranks(_calls.dispatch_bwd, site.group, site.shape, site.topk)
    grad_x, grad_topk_weights, order = backward(plan, grad_tokens, grad_weights, grad_order + order)
    return None, grad_x, None, grad_topk_weights, order


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(
    site: Site, wire: int, plan: Array, expert_out: Array, weights: Array | None, order: Array
) -> tuple[Array, Array]:
    run = on_ranks(_calls.combine, site.group, site.shape, wire)
    return run(plan, expert_out, weights, order)


def _combine_fwd(site, wire, plan, expert_out, weights, order):
    out, done = _combine(site, wire, plan, expert_out, weights, order)
    rows = None if weights is None else expert_out
    return (out, done), (plan, rows, weights, kept(done, order))


def _combine_bwd(site, wire, saved, grads):
    plan, expert_out, weights, order = saved
    grad_out, grad_order = grads
    backward = on_ranks(_calls.combine_bwd, site.group)
    grad_expert_out, grad_weights, order = backward(
        plan, grad_out, expert_out, weights, grad_order + order
    )
    return None, grad_expert_out, grad_weights, order


_combine.defvjp(_combine_fwd, _combine_bwd)


# ---- Arguments ----------------------------------------------------------------------------------


def _site(plan: EpPlan) -> Site:
    if not isinstance(plan, EpPlan):
        raise TypeError(f"plan: expected an EpPlan from ep_prepare, got {type(plan).__name__}")
    return Site(plan.group, plan.shape, plan.topk)


def order_of(group: AnyGroup, after: Array) -> Array:
    """The argument `after`, if it is an order."""
    order = jnp.asarray(after)
    local = local_shape(group.place, "after", order.shape)
    if order.dtype != np.float32 or local != (1,):
        raise ValueError(
            "after: expected a plan or an order, which is float32 of shape (1,) on a rank; got "
            f"{order.dtype} of shape {order.shape}"
        )
    return order


def first_order(group: AnyGroup) -> Array:
    """The order that nothing comes before: one element for each rank."""
    parts = 1 if inside(group.place) else batch_parts(group.place)
    order = jnp.zeros((parts,), np.float32)
    return laid(group.place, order, PartitionSpec(group.place.batch_axes))


# Rows that have gradients, and others.
_WIDE = tuple(np.dtype(dtype) for dtype in (jnp.bfloat16, np.float16, np.float32))
_NARROW = tuple(np.dtype(dtype) for dtype in (ELEMENT, jnp.float8_e5m2, np.int8, np.uint8))
_SCALES = tuple(np.dtype(dtype) for dtype in (np.float32, jnp.float8_e8m0fnu, np.uint8))


def check_payload(
    argument: str, array: Array, config: AnyConfig, others: tuple[np.dtype, ...] = ()
) -> None:
    """Refuses rows that a group of this config does not take.

    Args:
        others: dtypes that are allowed beside those that have gradients.
    """
    if array.dtype not in _WIDE + others:
        more = ", or 8-bit elements" if others else ""
        raise TypeError(
            f"{argument}: expected bfloat16, float16 or float32{more}, got {array.dtype}"
        )
    row_bytes = array.shape[-1] * array.dtype.itemsize if array.ndim else 0
    if row_bytes < 1 or row_bytes % 16:
        raise ValueError(
            f"{argument}: expected rows of a positive multiple of 16 bytes, got shape "
            f"{array.shape} of {array.dtype}, {row_bytes} bytes a row"
        )
    if row_bytes > config.hidden * config.dtype.itemsize:
        raise ValueError(
            f"{argument}: expected rows of at most {config.hidden} elements of {config.dtype}, got "
            f"shape {array.shape} of {array.dtype}"
        )


def wire_of(config: AnyConfig, wire: Wire, expert_out: Array) -> int:
    """The library's number for a wire, if a group of this config has it and these rows fit it."""
    return wire_of_rows(wire, config.wire_formats, expert_out.shape, "config")


def check_weights(argument: str, array: Array) -> None:
    """Refuses weights of another dtype than float32."""
    if array.dtype != np.float32:
        raise TypeError(
            f"{argument}: expected float32, got {array.dtype}: cast with .astype(jnp.float32)"
        )


def check_batch(site: Site, argument: str, array: Array, columns: int | None) -> None:
    """Refuses anything but the plan's batch in the leading dimensions, and other columns."""
    place = site.group.place
    check_layout(place, argument, array)
    shape = local_shape(place, argument, array.shape[:-1]) if array.ndim else ()
    if shape != site.shape or (columns is not None and array.shape[-1] != columns):
        last = "H" if columns is None else columns
        raise ValueError(
            f"{argument}: expected a rank's part with shape {(*site.shape, last)}, got "
            f"{(*shape, *array.shape[-1:])}"
        )
