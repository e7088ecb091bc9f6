"""Sizes of one kind of expert-parallel traffic."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossdock import _core
from crossdock._config import DuplicateIds, Layout, OnError, Overflow, Staging

__all__ = ["EpConfig"]

_LAYOUTS = {"expert_major": 0, "rank_major": 1}
_OVERFLOWS = {"error": 0, "drop": 1}
_DUPLICATES = {"error": 0, "collapse": 1}
_ON_ERROR = {"status": 0, "fatal": 1}
_STAGINGS = {"auto": 0, "none": 1}

# DLPack's type code << 8 | bits.
_DTYPES = {
    np.dtype(jnp.bfloat16): 4 << 8 | 16,
    np.dtype(jnp.float16): 2 << 8 | 16,
    np.dtype(jnp.float32): 2 << 8 | 32,
}


@dataclasses.dataclass(frozen=True)
class EpConfig:
    """Sizes of one kind of expert-parallel traffic; hashable, so it may be a static argument.

    With W ranks and E experts, rank d holds the experts ``d * E / W`` to ``(d + 1) * E / W - 1``.

    Attributes:
        num_experts: E, a multiple of the number of ranks.
        hidden: largest row, in elements of `dtype`; a row is a multiple of 16 bytes.
        topk: largest number of experts per token, 1 to 32.
        max_tokens: largest number of tokens of a rank.
        layout: ``"expert_major"``: receive arrays have one row per (token, expert), grouped by
            expert; ``"rank_major"``: one per (token, rank), grouped by source.
        dtype: widest payload: bfloat16, float16 or float32.
        capacity: R, the rows of every receive array of a rank; None = enough for any routing. What
            is over a multiple of `alignment` stays empty.
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
    """

    num_experts: int
    hidden: int
    topk: int
    max_tokens: int
    layout: Layout = "expert_major"
    dtype: Any = jnp.bfloat16
    capacity: int | None = None
    overflow: Overflow = "error"
    alignment: int = 1
    num_sms: int = 0
    staging: Staging = "auto"
    duplicate_ids: DuplicateIds = "error"
    on_error: OnError = "status"

    def __post_init__(self) -> None:
        _choice("layout", self.layout, _LAYOUTS)
        _choice("overflow", self.overflow, _OVERFLOWS)
        _choice("staging", self.staging, _STAGINGS)
        _choice("duplicate_ids", self.duplicate_ids, _DUPLICATES)
        _choice("on_error", self.on_error, _ON_ERROR)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {self.dtype}")
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(
                "capacity: expected at least 1 row, or None, which is enough for any routing; got "
                f"{self.capacity}"
            )

    @property
    def rank_major(self) -> bool:
        """Whether a row stands for all choices that its rank holds."""
        return self.layout == "rank_major"

    def rows(self, num_ranks: int) -> int:
        """R, the rows of every receive array of a rank."""
        if self.capacity is not None:
            return self.capacity
        return _core.recv_bound(**self.sizes(num_ranks))

    def plan_bytes(self, num_ranks: int) -> int:
        """Bytes of a plan."""
        return _core.plan_size(**self.sizes(num_ranks))

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """The fields of ``xd_ep_config``.

        Raises:
            InvalidArgument: when they are used, if they do not fit one another.
        """
        return {**self._fields, "num_ranks": num_ranks}

    @functools.cached_property
    def _fields(self) -> dict[str, int]:
        return {
            "num_experts": self.num_experts,
            "max_topk": self.topk,
            "max_tokens_per_rank": self.max_tokens,
            "hidden": self.hidden,
            "dtype": _DTYPES[self.dtype],
            "layout": _LAYOUTS[self.layout],
            "alignment": self.alignment,
            "recv_capacity": 0 if self.capacity is None else self.capacity,
            "overflow": _OVERFLOWS[self.overflow],
            "max_scale_bytes": 4 * -(-self.hidden // 128),  # a float32 per 128 columns
            "zero_tail": 1,  # whole receive arrays go through arithmetic: shapes are static
            "num_sms": self.num_sms,
            "staging": _STAGINGS[self.staging],
            "duplicate_ids": _DUPLICATES[self.duplicate_ids],
            "on_error": _ON_ERROR[self.on_error],
        }


def _choice(name: str, given: Any, known: dict[str, int]) -> None:
    if given not in known:
        raise ValueError(f"{name}: expected one of {list(known)}, got {given!r}")
