"""The routing of one batch, as arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ._quantised import QuantisedRows

if TYPE_CHECKING:
    from ._group import EpGroup

__all__ = ["Dispatched", "EpPlan"]

_Rows = TypeVar("_Rows", bound=jax.Array | QuantisedRows, covariant=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpPlan:
    """The plan that `ep_prepare` makes: the place of every row of a batch. A pytree.

    Its arrays are ordinary ones: they may be carried by ``scan``, saved as residuals,
    rematerialised, donated and copied. Inside ``shard_map`` they have one rank's shapes; outside,
    the ranks' parts follow one another along the first dimension.

    Attributes:
        data: the routing, opaque, uint8.
        counts: ``[L]`` int32: rows per local expert without padding (rank_major: pairs). Where the
            ranks hold unequal numbers of experts, L is that of the rank with the most.
        padded_counts: ``[L]`` int32: rows per local expert with padding.
        offsets: ``[L + 1]`` int32: first row of each expert's zone, and the end of the last.
        total: ``[1]`` int32: rows that the rank needs, padding included, before any are dropped.
        rank_rows: ``[W, W]`` int32: rows from each source to each destination.
        order: ``[1]`` float32 that stands for the operations so far; its value is 0. Operations
            take the one before and give a new one, so that XLA can neither reorder them nor run two
            at once.
        group: the group that the plan is for.
        shape: leading dimensions of the batch as it was given, without K.
        topk: K.
    """

    data: jax.Array
    counts: jax.Array
    padded_counts: jax.Array
    offsets: jax.Array
    total: jax.Array
    rank_rows: jax.Array
    order: jax.Array
    group: EpGroup = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    topk: int = dataclasses.field(metadata={"static": True})

    def row_experts(self) -> jax.Array:
        """``[R]`` int32: the local expert of each row of a receive array; -1 past the last row.

        Rows of padding have the expert of their zone.

        Raises:
            ValueError: the layout is rank_major, where `Dispatched.topk_idx` has the experts.
        """
        config = self.group.config
        if config.layout == "rank_major":
            raise ValueError(
                "row_experts: expected a plan of an expert_major group, got one of "
                "rank_major; Dispatched.topk_idx has its experts"
            )
        local_experts = config.local_experts(self.group.place.num_ranks)
        ends = self.offsets.reshape(-1, local_experts + 1)[:, 1:]
        rows = jnp.arange(self.group.rows, dtype=jnp.int32)
        found = jax.vmap(lambda of_rank: jnp.searchsorted(of_rank, rows, side="right"))(ends)
        return jnp.where(found < local_experts, found, -1).astype(jnp.int32).reshape(-1)

    def after(self, order: jax.Array) -> EpPlan:
        """The same plan, whose next operation comes after those that `order` stands for."""
        return dataclasses.replace(self, order=order)


class Dispatched(NamedTuple, Generic[_Rows]):
    """The rows that a rank receives: R rows, of which those past the last one are zero.

    Attributes:
        tokens: ``[R, H]``, dtype of those sent; `QuantisedRows` where these are.
        weights: float32 ``[R]`` (expert_major) or ``[R, K]`` (rank_major); None unless given.
        topk_idx: ``[R, K]`` int32 local expert of each choice, else -1; None in expert_major.
        plan: for the operations that come after this one.
    """

    tokens: _Rows
    weights: jax.Array | None
    topk_idx: jax.Array | None
    plan: EpPlan
