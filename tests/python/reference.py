"""The results that dispatch and combine must give, in plain NumPy.

This is the definition, which shares no code with the library.

Row r of a receive tensor is a Row, or None for padding. Sums follow the one order that the library
promises: per rank by ascending k in float32, rounded to the payload type; then the ranks' partial
sums by ascending rank in float32, rounded once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Row(NamedTuple):
    """Where a received row comes from."""

    source: int
    token: int
    choices: tuple[int, ...]  # the k's that it stands for, ascending; one of them in expert_major


class Routing:
    """The routing of one batch.

    Args:
        topk_idx: per rank an array [T, K] of global experts; -1 = none.
        num_experts: without `expert_ranks` a multiple of the number of ranks.
        layout: "expert_major" or "rank_major".
        alignment: of zones, in rows.
        expert_ranks: the rank of each expert; None = equally many on every rank, in order.
    """

    def __init__(
        self,
        topk_idx: list[np.ndarray],
        num_experts: int,
        layout: str = "expert_major",
        alignment: int = 1,
        expert_ranks: Sequence[int] | None = None,
    ) -> None:
        self.topk_idx = [np.asarray(ids) for ids in topk_idx]
        self.num_ranks = len(topk_idx)
        if expert_ranks is None:
            expert_ranks = [e * self.num_ranks // num_experts for e in range(num_experts)]
        self.owners = np.array(expert_ranks)
        self.layout = layout
        self.alignment = alignment
        self._zones = [self._zones_of(rank) for rank in range(self.num_ranks)]

    def experts(self, rank: int) -> list[int]:
        """The experts of a rank, ascending: a local expert is an index into them."""
        return np.flatnonzero(self.owners == rank).tolist()

    def goes(self, rank: int) -> np.ndarray:
        """[T, W] bool: whether a token of `rank` goes to a rank."""
        ids = self.topk_idx[rank]
        owners = np.where(ids >= 0, self.owners[ids], -1)
        return (owners[:, :, None] == np.arange(self.num_ranks)).any(1)

    def _zones_of(self, rank: int) -> list[list[Row]]:
        """The rows of each zone: one zone per local expert, or one for all in rank_major."""
        experts = self.experts(rank)
        groups = [[e] for e in experts] if self.layout == "expert_major" else [experts]
        return [
            [
                Row(source, token, choices)
                for source, ids in enumerate(self.topk_idx)
                for token in range(len(ids))
                if (choices := tuple(k for k, e in enumerate(ids[token]) if e in group))
            ]
            for group in groups
        ]

    def _padded(self, rows: int) -> int:
        step = self.alignment if self.layout == "expert_major" else 1
        return -(-rows // step) * step

    def rows(self, rank: int) -> list[Row | None]:
        """The rows that `rank` receives, padding included."""
        return [
            row
            for zone in self._zones[rank]
            for row in zone + [None] * (self._padded(len(zone)) - len(zone))
        ]

    def counts(self, rank: int) -> list[int]:
        """Per local expert its (token, choice) pairs."""
        return [sum(int((ids == e).sum()) for ids in self.topk_idx) for e in self.experts(rank)]

    def padded_counts(self, rank: int) -> list[int]:
        """Per local expert the rows of its zone, in expert_major."""
        return [self._padded(len(zone)) for zone in self._zones[rank]]

    def offsets(self, rank: int) -> list[int]:
        """First row of each zone, and the end of the last, in expert_major."""
        return [0, *np.cumsum(self.padded_counts(rank)).tolist()]

    def row_experts(self, rank: int) -> np.ndarray:
        """The local expert of each row, padding included, in expert_major."""
        return np.repeat(np.arange(len(self.experts(rank))), self.padded_counts(rank))

    def total(self, rank: int) -> int:
        """Rows that `rank` receives, padding included."""
        return len(self.rows(rank))

    def rank_rows(self) -> np.ndarray:
        """[W, W] int64: rows that each source puts into each destination."""
        matrix = np.zeros((self.num_ranks, self.num_ranks), np.int64)
        for rank in range(self.num_ranks):
            for row in filter(None, self.rows(rank)):
                matrix[row.source, rank] += 1
        return matrix

    def recv_topk_idx(self, rank: int) -> np.ndarray:
        """[rows, K] int64 local expert or -1, in rank_major."""
        received = np.full((self.total(rank), self.topk_idx[0].shape[1]), -1, np.int64)
        for r, row in enumerate(self.rows(rank)):
            for k in row.choices if row else ():
                expert = self.topk_idx[row.source][row.token, k]
                received[r, k] = self.experts(rank).index(expert)
        return received

    def dispatch(self, rank: int, tokens: list[np.ndarray]) -> np.ndarray:
        """[rows, H] that `rank` receives of the ranks' tokens [T, H]; padding is zero."""
        received = np.zeros((self.total(rank), *tokens[rank].shape[1:]), tokens[rank].dtype)
        for r, row in enumerate(self.rows(rank)):
            if row:
                received[r] = tokens[row.source][row.token]
        return received

    def dispatch_weights(self, rank: int, topk_weights: list[np.ndarray]) -> np.ndarray:
        """Weights beside the received rows: [rows] in expert_major, [rows, K] in rank_major."""
        one = self.layout == "expert_major"
        shape = (self.total(rank),) if one else (self.total(rank), self.topk_idx[0].shape[1])
        received = np.zeros(shape, np.float32)
        for r, row in enumerate(self.rows(rank)):
            for k in row.choices if row else ():
                received[r if one else (r, k)] = topk_weights[row.source][row.token, k]
        return received

    def combine(
        self,
        rank: int,
        expert_out: list[np.ndarray],
        weights: list[np.ndarray] | None = None,
        wire: str = "same",
    ) -> np.ndarray:
        """[T, H] sums over each of `rank`'s tokens' rows of all ranks' expert_out [R, H].

        `wire` is one of crossdock.EpGroup.combine: the form in which the ranks' sums cross.
        """
        dtype = expert_out[0].dtype
        sums: dict[int, np.ndarray] = {}  # by token
        for destination in range(self.num_ranks):
            partial: dict[int, np.ndarray] = {}
            rows = [
                (row.choices, row.token, r)
                for r, row in enumerate(self.rows(destination))
                if row and row.source == rank
            ]
            for _, token, r in sorted(rows):
                value = expert_out[destination][r].astype(np.float32)
                if weights is not None:
                    value = value * np.float32(weights[destination][r])
                partial[token] = partial[token] + value if token in partial else value
            for token, value in partial.items():
                if wire == "same":
                    value = value.astype(dtype).astype(np.float32)
                else:
                    value = through_wire(value[None], wire)[0]
                sums[token] = sums[token] + value if token in sums else value
        out = np.zeros((len(self.topk_idx[rank]), expert_out[0].shape[1]), dtype)
        for token, value in sums.items():
            out[token] = value.astype(dtype)
        return out

    def dispatch_bwd_weights(self, rank: int, grad_recv_weights: list[np.ndarray]) -> np.ndarray:
        """[T, K] float32: the gradient of each of `rank`'s choices; 0 without a row."""
        grads = np.zeros(self.topk_idx[rank].shape, np.float32)
        for destination in range(self.num_ranks):
            for r, row in enumerate(self.rows(destination)):
                for k in row.choices if row and row.source == rank else ():
                    at = r if self.layout == "expert_major" else (r, k)
                    grads[row.token, k] = grad_recv_weights[destination][at]
        return grads

    def combine_bwd(
        self, rank: int, grad_out: list[np.ndarray], weights: np.ndarray | None = None
    ) -> np.ndarray:
        """[rows, H] gradient of `rank`'s expert_out for the ranks' grad_out [T, H]."""
        grads = self.dispatch(rank, grad_out)
        if weights is None:
            return grads
        scaled = grads.astype(np.float32) * weights[: len(grads), None]
        return scaled.astype(grads.dtype)

    def combine_bwd_weights(
        self, rank: int, grad_out: list[np.ndarray], expert_out: np.ndarray
    ) -> np.ndarray:
        """[rows] float32 dot products of each row of expert_out with its token's grad_out."""
        grads = self.dispatch(rank, grad_out).astype(np.float32)
        products = grads * expert_out[: len(grads)].astype(np.float32)
        return products.sum(axis=1, dtype=np.float32)


def through_wire(sums: np.ndarray, wire: str) -> np.ndarray:
    """A rank's sums [T, H] of tokens as their sources add them: xd_ep_wire in quantise.h."""
    if wire == "float32":
        return sums
    columns, least, dtype = QUANTISE_WAYS[wire]
    blocks = sums.reshape(len(sums), -1, columns)
    finite = np.isfinite(blocks)
    largest = np.where(finite, np.abs(blocks), np.float32(0)).max(2, keepdims=True)
    scales = block_scales(largest, least, powers=wire != "fp8_block128")
    if dtype == "float32":
        scales = np.where(largest == 0, np.float32(1), scales)
    codes = np.clip(np.where(finite, blocks, 0) * (np.float32(1) / scales), -448, 448)
    codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.where(finite, codes * scales, np.float32("nan")).reshape(sums.shape)


def block_scales(largest: np.ndarray, least: int, powers: bool) -> np.ndarray:
    """The scale of each block, by its largest finite magnitude."""
    if not powers:
        return np.maximum(largest / np.float32(448), np.float32(2.0**least))
    mantissa, exponent = np.frexp(largest.astype(np.float64) / 448)
    exponent = np.maximum(exponent - (mantissa == 0.5), least)
    return np.ldexp(np.float32(1), np.where(largest == 0, least, exponent))


# By name: columns that share a scale, the least exponent of one, and its dtype.
QUANTISE_WAYS = {
    "fp8_block128": (128, -126, "float32"),
    "fp8_block128_pow2": (128, -126, "float32"),
    "fp8_block128_e8m0": (128, -127, "float8_e8m0fnu"),
    "mxfp8": (32, -127, "float8_e8m0fnu"),
}


def quantised(rows: np.ndarray, name: str = "fp8_block128") -> tuple[np.ndarray, np.ndarray]:
    """e4m3 elements and scales of finite bfloat16 rows: xd_ep_quantise in quantise.h."""
    block, least, dtype = QUANTISE_WAYS[name]
    blocks = rows.astype(np.float32).reshape(len(rows), rows.shape[1] // block, block)
    largest = np.abs(blocks).max(2, keepdims=True)
    scales = block_scales(largest, least, powers=name != "fp8_block128")
    if dtype == "float32":
        scales = np.where(largest == 0, np.float32(1), scales)
    elements = np.clip(blocks * (np.float32(1) / scales), -448, 448)
    narrow = getattr(ml_dtypes, dtype) if dtype != "float32" else np.float32
    return (
        elements.astype(ml_dtypes.float8_e4m3fn).reshape(rows.shape),
        scales[:, :, 0].astype(narrow),
    )
