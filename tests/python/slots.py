"""The results that dispatch into slots must give, for tests of all packages: see reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference import Routing


class SlotRouting(Routing):
    """The routing of one batch into slots: the zone of an expert is the rows in its slots."""

    def __init__(
        self,
        topk_idx: list[np.ndarray],
        num_experts: int,
        max_tokens: int,
        expert_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(topk_idx, num_experts, expert_ranks=expert_ranks)
        self.num_slots = self.num_ranks * max_tokens

    def source_ranges(self, rank: int) -> np.ndarray:
        """[L,W] int64: first slot << 32 | rows of each source."""
        rows = np.zeros((len(self.experts(rank)), self.num_ranks), np.int64)
        for expert, row in zip(self.row_experts(rank), self.rows(rank)):
            rows[expert, row.source] += 1
        return (np.cumsum(rows, axis=1) - rows) << 32 | rows

    def source_tokens(self, rank: int) -> np.ndarray:
        """Of each row, one expert's after the other's, the token at its source."""
        return np.array([row.token for row in self.rows(rank)], np.int32)

    def in_rows(self, rank: int, slots: np.ndarray) -> np.ndarray:
        """The rows of [L,S,...], one expert's after the other's."""
        used = [slots[e, :count] for e, count in enumerate(self.counts(rank))]
        return np.concatenate([*used, slots[:0].reshape(0, *slots.shape[2:])])

    def behind_rows(self, rank: int, slots: np.ndarray) -> np.ndarray:
        """The contents of the slots behind the rows."""
        left = [slots[e, count:] for e, count in enumerate(self.counts(rank))]
        return np.concatenate([*left, slots[:0].reshape(0, *slots.shape[2:])])

    def results(self, rank: int, tokens: list[np.ndarray]) -> np.ndarray:
        """The results of the model's experts: local expert e multiplies rows by e + 1."""
        factors = self.row_experts(rank)[:, None] + 1
        return (self.dispatch(rank, tokens) * factors).astype(tokens[rank].dtype)

    def sums(
        self,
        rank: int,
        tokens: list[np.ndarray],
        topk_weights: list[np.ndarray] | None,
        wire: str = "same",
    ) -> np.ndarray:
        """[T,H] what combine makes of these results."""
        ranks = range(self.num_ranks)
        weights = None
        if topk_weights is not None:
            weights = [self.dispatch_weights(one, topk_weights) for one in ranks]
        return self.combine(rank, [self.results(one, tokens) for one in ranks], weights, wire)


def factors(local_experts: int) -> np.ndarray:
    """[L,1,1]: by what the model's experts multiply."""
    return np.arange(1, local_experts + 1).reshape(-1, 1, 1)


def choices(seed: int, tokens: tuple[int, ...], experts: int, topk: int) -> list[np.ndarray]:
    """Per rank [T,K] int64 different experts, about one in six missing."""
    random = np.random.default_rng(seed)
    chosen = []
    for count in tokens:
        ids = [random.permutation(experts)[:topk] for _ in range(count)]
        one = np.array(ids, np.int64).reshape(count, topk)
        one[random.random(one.shape) < 1 / 6] = -1
        chosen.append(one)
    return chosen
