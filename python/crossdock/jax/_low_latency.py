"""dispatch and combine of few tokens, for inference: they have no derivatives."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from crossdock._core import constants
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire

from . import _calls
from ._config import LowLatencyConfig
from ._group import LowLatencyGroup
from ._mesh import EpMesh, current_mesh
from ._ops import check_payload, check_weights, first_order, order_of, wire_of
from ._where import check_layout, local_shape, on_ranks

__all__ = [
    "SentCombine",
    "SentDispatch",
    "SlotPlan",
    "Slots",
    "ll_combine",
    "ll_combine_receive",
    "ll_combine_send",
    "ll_dispatch",
    "ll_dispatch_receive",
    "ll_dispatch_send",
]

Array: TypeAlias = jax.Array
_BOTH, _SEND, _RECEIVE = (constants.PHASES[half] for half in ("both", "send", "receive"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """The routing of a batch that `ll_dispatch` has received. A pytree of ordinary arrays.

    Attributes:
        data: the routing, opaque, uint8.
        order: ``[1]`` float32 that stands for the operations so far; its value is 0.
        group: the group that the plan is for.
        shape: leading dimensions of the batch as it was given.
        topk: K.
    """

    data: Array
    order: Array
    group: LowLatencyGroup = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    topk: int = dataclasses.field(metadata={"static": True})


class Slots(NamedTuple):
    """Rows from `ll_dispatch`. L local experts with S = W * max_tokens_per_rank slots each.

    The rows of expert e lie in its slots 0 to ``counts[e] - 1``, by source rank, then token. Slots
    behind them have no meaning, and may be no numbers.

    With ``receive="by_expert"`` or ``"by_rank"`` in the config there are no slots: rows lie in
    ``[N, H]``, zone by zone, or by source rank, and weights that dispatch was given beside them. N
    is enough for any routing of T tokens of each rank. Rows behind the last have no meaning.

    Attributes:
        tokens: ``[L, S, H]`` in the dtype of those sent, or float8_e4m3fn when quantised.
        scales: ``[L, S, H / 128]`` float32 or float8_e8m0fnu; None unless quantised.
        counts: ``[L]`` int32: rows of each expert.
        plan: for `ll_combine`, and for what comes after.
        row_offsets: without slots: int32, where zones ``[L + 1]``, or source ranks ``[W + 1]``,
            begin, and where the last ends.
        weights: without slots, where dispatch was given some: float32, of each row ``[N]``, or by
            rank of its choices here ``[N, K]``, 0 elsewhere.
        topk_idx: by rank, ``[N, K]`` int32: local experts; -1 elsewhere and past the last row.
    """

    tokens: Array
    scales: Array | None
    counts: Array
    plan: SlotPlan
    row_offsets: Array | None = None
    weights: Array | None = None
    topk_idx: Array | None = None


class _Kind(NamedTuple):
    """The static part of a dispatch or combine: its group and batch, and what its rows are."""

    group: LowLatencyGroup
    shape: tuple[int, ...]
    topk: int
    columns: int
    dtype: Any
    way: QuantiseWay | None = None
    weighted: bool = False
    wire: int = 0

    @property
    def batch(self) -> tuple[int, int, bool]:
        """T, K, and whether dispatch is given weights."""
        return math.prod(self.shape), self.topk, self.weighted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SentDispatch:
    """The first half of a dispatch, for `ll_dispatch_receive`. A pytree."""

    order: Array
    kind: _Kind = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SentCombine:
    """The first half of a combine, for `ll_combine_receive`. A pytree."""

    plan: SlotPlan
    kind: _Kind = dataclasses.field(metadata={"static": True})

    @property
    def order(self) -> Array:
        """The order behind it."""
        return self.plan.order


_After: TypeAlias = SlotPlan | SentDispatch | SentCombine | Array | None


def ll_dispatch(
    config: LowLatencyConfig,
    tokens: Array,
    topk_idx: Array,
    topk_weights: Array | None = None,
    *,
    quantise: bool | str = False,
    after: _After = None,
    mesh: EpMesh | None = None,
) -> Slots:
    """Copies each token's row to a slot of every expert that it has chosen. Collective.

    Or to its place without gaps, where the config's ``receive`` says so.

    For inference: it has no derivative. Inside ``shard_map`` over the mesh of `init`, arrays are
    one rank's; outside, on global arrays, their first dimension is split over the axes of data and
    experts.

    Args:
        config: equal on all ranks.
        tokens: ``[..., H]`` bfloat16, float16 or float32.
        topk_idx: ``[..., K]`` int32 or int64, the expert of each choice; -1 = none.
        topk_weights: ``[..., K]`` float32, for an `ll_combine` that is given none; without slots
            they arrive beside the rows instead.
        quantise: receive bfloat16 rows as float8_e4m3fn with scales, H a multiple of 128:
            "fp8_block128" (or True), "fp8_block128_pow2" or "fp8_block128_e8m0".
        after: what comes before although no data says so: a plan, a first half, or an order.
        mesh: from `init`; None = the last one.

    Raises:
        TypeError, ValueError: a bad argument, or a derivative that is wanted, while tracing.
        jax.errors.JaxRuntimeError: when it runs: see `ep_prepare`.
    """
    kind, arrays = _read_dispatch(config, tokens, topk_idx, topk_weights, quantise, after, mesh)
    return _slots(kind, _dispatch(kind, _BOTH, *arrays))


def ll_dispatch_send(
    config: LowLatencyConfig,
    tokens: Array,
    topk_idx: Array,
    topk_weights: Array | None = None,
    *,
    quantise: bool | str = False,
    after: _After = None,
    mesh: EpMesh | None = None,
) -> SentDispatch:
    """The first half of `ll_dispatch`, which sends; `ll_dispatch_receive` is the second.

    Between them XLA may run what needs none of the results. At most ``config.in_flight`` dispatches
    may be between their halves. Second halves come in the order of the first ones: where several
    are open, say so by ``after``.
    """
    kind, arrays = _read_dispatch(config, tokens, topk_idx, topk_weights, quantise, after, mesh)
    (order,) = _dispatch(kind, _SEND, *arrays)
    return SentDispatch(order, kind)


def ll_dispatch_receive(sent: SentDispatch, *, after: _After = None) -> Slots:
    """The second half of `ll_dispatch`: takes what has come.

    Args:
        sent: from `ll_dispatch_send`.
        after: as of `ll_dispatch`: what has been sent in the meantime, or received before.
    """
    kind = sent.kind
    order = _behind(kind.group, sent.order, after)
    return _slots(kind, _dispatch(kind, _RECEIVE, None, None, None, order))


def ll_combine(
    plan: SlotPlan,
    expert_out: Array,
    topk_weights: Array | None = None,
    *,
    wire: Wire = "same",
    after: _After = None,
) -> tuple[Array, SlotPlan]:
    """Brings the experts' results back and sums them per token. Collective, without derivative.

    Sums are in float32 in a fixed order: equal inputs give equal bits.

    Args:
        plan: from `ll_dispatch`.
        expert_out: ``[L, S, H]`` bfloat16, float16 or float32. Slots behind the rows are not read.
            Without slots ``[N, H]``, of which padding is not read.
        topk_weights: ``[..., K]`` float32, in place of those that dispatch had; without either a
            row counts once. Not where rows came by rank.
        wire: the form in which sums cross, as of `ep_combine`, with the same bits.
        after: as of `ll_dispatch`.

    Returns:
        ``[..., H]`` with the leading dimensions of topk_idx, zero for a token without rows; and the
        plan for what comes after.
    """
    kind, arrays = _read_combine(plan, expert_out, topk_weights, wire, after)
    out, order = _combine(kind, _BOTH, *arrays)
    return out, dataclasses.replace(plan, order=order)


def ll_combine_send(
    plan: SlotPlan,
    expert_out: Array,
    topk_weights: Array | None = None,
    *,
    wire: Wire = "same",
    after: _After = None,
) -> SentCombine:
    """The first half of `ll_combine`, which sends; `ll_combine_receive` is the second."""
    kind, arrays = _read_combine(plan, expert_out, topk_weights, wire, after)
    (order,) = _combine(kind, _SEND, *arrays)
    return SentCombine(dataclasses.replace(plan, order=order), kind)


def ll_combine_receive(sent: SentCombine, *, after: _After = None) -> tuple[Array, SlotPlan]:
    """The second half of `ll_combine`: sums what has come. `after` as of `ll_dispatch_receive`."""
    plan, kind = sent.plan, sent.kind
    order = _behind(kind.group, plan.order, after)
    out, order = _combine(kind, _RECEIVE, plan.data, None, None, order)
    return out, dataclasses.replace(plan, order=order)


# ---- The calls, without derivatives --------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _dispatch(
    kind: _Kind,
    phase: int,
    tokens: Array | None,
    topk_idx: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Any, ...]:
    static = (kind.way, phase, kind.columns, kind.dtype, kind.batch)
    run = on_ranks(_calls.ll_dispatch, kind.group, *static)
    return run(*_calls.uniform(tokens, topk_idx, topk_weights, order))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _combine(
    kind: _Kind,
    phase: int,
    plan: Array,
    expert_out: Array | None,
    topk_weights: Array | None,
    order: Array,
) -> tuple[Any, ...]:
    static = (kind.shape, phase, kind.columns, kind.dtype, kind.wire)
    run = on_ranks(_calls.ll_combine, kind.group, *static)
    return run(*_calls.uniform(plan, expert_out, topk_weights, order))


def _no_derivative(kind: _Kind, phase: int, primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "ll_dispatch and ll_combine are for inference and have no derivatives; ep_prepare, "
        "ep_dispatch and ep_combine have them"
    )


_dispatch.defjvp(_no_derivative)
_combine.defjvp(_no_derivative)


def _slots(kind: _Kind, results: tuple[Any, ...]) -> Slots:
    data, tokens, scales, counts, *beside, order = results
    plan = SlotPlan(data, order, kind.group, kind.shape, kind.topk)
    return Slots(tokens, scales, counts, plan, *beside)


# ---- Arguments -----------------------------------------------------------------------------------


def _read_dispatch(
    config: LowLatencyConfig,
    tokens: Array,
    topk_idx: Array,
    topk_weights: Array | None,
    quantise: bool | str,
    after: _After,
    mesh: EpMesh | None,
) -> tuple[_Kind, tuple[Array | None, ...]]:
    """The static part of a dispatch, and its arrays with the order."""
    group = (current_mesh() if mesh is None else mesh).low_latency_group(config)
    tokens, topk_idx = jnp.asarray(tokens), jnp.asarray(topk_idx)
    if topk_idx.dtype not in (np.int32, np.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {topk_idx.dtype}")
    if topk_idx.ndim < 2 or not 1 <= topk_idx.shape[-1] <= config.max_topk:
        raise ValueError(
            f"topk_idx: expected [..., K] with K from 1 to {config.max_topk}, got {topk_idx.shape}"
        )
    check_layout(group.place, "topk_idx", topk_idx)
    shape = local_shape(group.place, "topk_idx", topk_idx.shape[:-1])
    if math.prod(shape) > config.max_tokens_per_rank:
        raise ValueError(
            f"topk_idx: expected at most {config.max_tokens_per_rank} tokens of a rank, got {shape}"
        )
    check_payload("tokens", tokens, config)
    _check_batch(group, "tokens", tokens, shape, tokens.shape[-1])
    way = quantise_way(quantise)
    if way is not None and (tokens.dtype != jnp.bfloat16 or tokens.shape[-1] % way.block):
        raise ValueError(
            f"tokens: expected bfloat16 with a multiple of {way.block} columns, to be quantised; "
            f"got {tokens.dtype} of shape {tokens.shape}"
        )
    topk_weights = _read_weights(group, topk_weights, shape, topk_idx.shape[-1])
    order = first_order(group)
    weighted = topk_weights is not None
    kind = _Kind(group, shape, topk_idx.shape[-1], tokens.shape[-1], tokens.dtype, way, weighted)
    return kind, (tokens, topk_idx, topk_weights, _behind(group, order, after))


def _read_combine(
    plan: SlotPlan, expert_out: Array, topk_weights: Array | None, wire: Wire, after: _After
) -> tuple[_Kind, tuple[Array | None, ...]]:
    """The static part of a combine, and its arrays with the order."""
    if not isinstance(plan, SlotPlan):
        raise TypeError(f"plan: expected a SlotPlan of ll_dispatch, got {type(plan).__name__}")
    group, config = plan.group, plan.group.config
    expert_out = jnp.asarray(expert_out)
    check_payload("expert_out", expert_out, config)
    check_layout(group.place, "expert_out", expert_out)
    local = local_shape(group.place, "expert_out", expert_out.shape[:-1])
    places = group.places(math.prod(plan.shape))
    if local != places:
        raise ValueError(
            f"expert_out: expected a rank's part with shape {(*places, 'H')}, got "
            f"{(*local, expert_out.shape[-1])}"
        )
    if topk_weights is not None and config.receive == "by_rank":
        raise ValueError(
            "topk_weights: expected None, as rows came by rank: the caller sums a token's experts"
        )
    topk_weights = _read_weights(group, topk_weights, plan.shape, plan.topk)
    rows = (expert_out.shape[-1], expert_out.dtype)
    kind = _Kind(group, plan.shape, plan.topk, *rows, wire=wire_of(config, wire, expert_out))
    return kind, (plan.data, expert_out, topk_weights, _behind(group, plan.order, after))


def _read_weights(
    group: LowLatencyGroup, topk_weights: Array | None, shape: tuple[int, ...], topk: int
) -> Array | None:
    if topk_weights is None:
        return None
    topk_weights = jnp.asarray(topk_weights)
    check_weights("topk_weights", topk_weights)
    _check_batch(group, "topk_weights", topk_weights, shape, topk)
    return topk_weights


def _check_batch(
    group: LowLatencyGroup, argument: str, array: Array, shape: tuple[int, ...], columns: int
) -> None:
    check_layout(group.place, argument, array)
    local = local_shape(group.place, argument, array.shape[:-1])
    if (*local, array.shape[-1]) != (*shape, columns):
        raise ValueError(
            f"{argument}: expected a rank's part with shape {(*shape, columns)}, got "
            f"{(*local, array.shape[-1])}"
        )


def _behind(group: LowLatencyGroup, order: Array, after: _After) -> Array:
    """The order that comes behind both."""
    if after is None:
        return order
    return order + order_of(group, after if isinstance(after, jax.Array) else after.order)
