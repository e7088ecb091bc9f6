"""Sizes of one kind of expert-parallel traffic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from crossdock import _core
from crossdock._config import (
    WORDS,
    DuplicateIds,
    Layout,
    OnError,
    Overflow,
    PeerLoss,
    Receive,
    Staging,
    number_of,
)
from crossdock._dtypes import pack
from crossdock._experts import ranks_of_experts
from crossdock._quantise import widest_scale_bytes
from crossdock._wire import Wire, wire_formats

__all__ = ["AnyConfig", "EpConfig", "LowLatencyConfig"]

_DTYPES = tuple(np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Fields that the configs of both kinds of groups have in common."""

    num_experts: int
    max_topk: int
    max_tokens_per_rank: int
    hidden: int
    dtype: Any = jnp.bfloat16
    duplicate_ids: DuplicateIds = "error"
    on_error: OnError = "status"
    num_sms: int = 0
    expert_ranks: Sequence[int] | None = None
    wire_formats: Sequence[Wire] = ()
    num_logical_experts: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in WORDS:
                number_of(field.name, getattr(self, field.name))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {self.dtype}")
        ranks = ranks_of_experts(self.expert_ranks, self.num_experts)
        object.__setattr__(self, "expert_ranks", ranks)
        if ranks is not None and self.num_logical_experts:
            raise ValueError(
                "num_logical_experts: expected 0 beside expert_ranks, as slots lie in order and "
                f"may stay empty; got {self.num_logical_experts}"
            )
        wire_formats(self.wire_formats)
        object.__setattr__(self, "wire_formats", tuple(self.wire_formats))

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        """The fields of ``xd_ep_config``, or ``xd_ll_config``.

        Raises:
            InvalidArgument: when they are used, if they do not fit one another.
        """
        fields = {**self._fields, "num_ranks": num_ranks}
        if self.expert_ranks is None:
            return fields
        return {**fields, "expert_ranks": self.expert_ranks}

    def held_experts(self, num_ranks: int) -> tuple[int, ...]:
        """The number of experts that each rank holds."""
        if self.expert_ranks is None:
            return (self.num_experts // num_ranks,) * num_ranks
        return tuple(self.expert_ranks.count(rank) for rank in range(num_ranks))

    def local_experts(self, num_ranks: int) -> int:
        """L, the experts in the shapes of a rank's arrays: those of the rank with the most."""
        return max(self.held_experts(num_ranks))

    @property
    def routed_experts(self) -> int:
        """The experts that ids name: `num_logical_experts`, or `num_experts` without these."""
        return self.num_logical_experts or self.num_experts

    @functools.cached_property
    def _fields(self) -> dict[str, int]:
        """The fields that are numbers, and the library's numbers for words."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["expert_ranks"]
        words = {name: number_of(name, word) for name, word in found.items() if name in WORDS}
        words["wire_formats"] = wire_formats(self.wire_formats)
        return {**found, **words, "dtype": pack(self.dtype)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig(_Sizes):
    """Sizes of one kind of expert-parallel traffic; hashable, so it may be a static argument.

    With W ranks and E experts, rank d holds the experts ``d * E / W`` to ``(d + 1) * E / W - 1``,
    unless `expert_ranks` says which rank holds which.

    Attributes:
        num_experts: E; without `expert_ranks` a multiple of the number of ranks.
        max_topk: largest number of experts per token, 1 to 32.
        max_tokens_per_rank: largest number of tokens of a rank.
        hidden: largest row, in elements of `dtype`; a row is a multiple of 16 bytes.
        layout: ``"expert_major"``: receive arrays have one row per (token, expert), grouped by
            expert; ``"rank_major"``: one per (token, rank), grouped by source.
        dtype: widest payload: bfloat16, float16 or float32.
        recv_capacity: R, the rows of every receive array of a rank; 0 = enough for any routing.
            Rows over a multiple of `alignment` stay empty.
        overflow: ``"error"``: a batch that needs more rows than the capacity moves nothing and
            fails; ``"drop"``: its last rows are dropped.
        alignment: of each expert's rows, a power of two; padding rows are zero. A plan may have a
            smaller one.
        duplicate_ids: what an expert's second and later mentions by one token are, beside counting
            as -1: ``"error"``: bad ids; ``"collapse"``: nothing to mention.
        on_error: ``"status"``: after an error of an operation the next one works; ``"fatal"``: the
            ranks' communicators are finished with it.
        num_sms: GPUs: multiprocessors to use; 0 = chosen by the library.
        staging: ``"auto"``: the group has memory of its own, through which rows go where XLA's
            buffers are not symmetric memory; ``"none"``: it has not, and such buffers are refused
            (GPUs, after `EpMesh.register_memory`).
        expert_ranks: the rank of each expert; None = E / W each, in order. A rank's local experts
            are its own in ascending order, and it may hold none. Arrays have the same shapes on all
            ranks: L in them is `local_experts`, and behind a rank's own experts their counts are 0.
        net_buffer_bytes: several machines: about how many bytes of buffers a rank has for rows to
            and from other machines; see ``crossdock.EpConfig``.
        wire_formats: the wires that calls of combine may name beside "same"; on GPUs where all
            ranks are on one host.
        num_logical_experts: N, up to `num_experts`: ids in topk_idx name so many logical experts,
            which `EpMesh.set_placement` places in the E slots of all ranks; 0 = they name experts.
            On the CPU, and without `expert_ranks`.
    """

    layout: Layout = "expert_major"
    recv_capacity: int = 0
    overflow: Overflow = "error"
    alignment: int = 1
    staging: Staging = "auto"
    net_buffer_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recv_capacity < 0:
            raise ValueError(
                "recv_capacity: expected a number of rows, or 0, which is enough for any routing; "
                f"got {self.recv_capacity}"
            )

    @property
    def rank_major(self) -> bool:
        """Whether a row stands for all choices that its rank holds."""
        return self.layout == "rank_major"

    def rows(self, num_ranks: int) -> int:
        """R, the rows of every receive array of a rank."""
        return self.recv_capacity or _core.recv_bound(**self.sizes(num_ranks))

    def plan_bytes(self, num_ranks: int) -> int:
        """Bytes of a plan."""
        return _core.plan_size(**self.sizes(num_ranks))

    def moe_bytes(self, num_ranks: int, ffn: int) -> int:
        """Bytes of the arrays that a rank keeps of an `ep_moe` for its backward pass.

        Where tokens have `hidden` columns of `dtype`, weights are given, and everything has a
        gradient. The backward pass writes as many on its way, of which `ffn` times two columns lie
        where others were.

        Args:
            num_ranks: W.
            ffn: F, the columns inside an expert.

        Raises:
            InvalidArgument: sizes that do not fit, such as another layout than expert_major.
        """
        return int(_core.moe_sizes(ffn, **self.sizes(num_ranks))["kept_bytes"])

    @functools.cached_property
    def _fields(self) -> dict[str, int]:
        return {
            **super()._fields,
            "max_scale_bytes": widest_scale_bytes(self.hidden),
            # Whole receive arrays go through arithmetic: shapes are static.
            "zero_tail": 1,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowLatencyConfig(_Sizes):
    """Sizes of one kind of traffic of few tokens, for `ll_dispatch`; hashable.

    Attributes:
        num_experts, max_topk, expert_ranks, wire_formats, num_logical_experts: as of `EpConfig`.
        max_tokens_per_rank: largest number of tokens of a rank, up to 1024.
        hidden: largest row, in elements of `dtype`; a row is a multiple of 16 bytes.
        dtype: widest payload: bfloat16, float16 or float32.
        duplicate_ids, on_error, num_sms: as of `EpConfig`.
        in_flight: operations of a kind that may be between their halves, 2 to 4; 0 = 2.
        on_peer_loss: what the loss of a rank does: ``"fatal"``: it finishes the communicator;
            ``"mask"``: the group goes on without the rank.
        wait_timeout_ms: longest wait for a peer; 0 = that of `init`.
        receive: where received rows lie: ``"slots"``: in slots of their expert; or without gaps,
            ``"by_expert"`` as layout "expert_major" of `EpConfig` has them, ``"by_rank"`` as
            "rank_major".
        alignment: "by_expert": of zones, in rows, a power of two; padding rows are zero.
    """

    in_flight: int = 0
    on_peer_loss: PeerLoss = "fatal"
    wait_timeout_ms: int = 0
    receive: Receive = "slots"
    alignment: int = 1

    def num_slots(self, num_ranks: int) -> int:
        """S, the slots of each expert, which no routing can overflow."""
        return num_ranks * self.max_tokens_per_rank

    def recv_bound(self, num_ranks: int, tokens: int) -> int:
        """N, the rows of receive arrays without slots, where each rank has so many tokens."""
        return _core.ll_recv_bound(tokens, **self.sizes(num_ranks))

    def plan_bytes(self, num_ranks: int) -> int:
        """Bytes of a plan."""
        return _core.ll_plan_size(**self.sizes(num_ranks))


AnyConfig: TypeAlias = EpConfig | LowLatencyConfig
