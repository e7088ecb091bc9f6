"""What the tests of the NumPy API share: a small config, exact comparison, mistakes of one rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import crossdock
from slots import choices
from support import Rank


def config_of(**options: Any) -> crossdock.EpConfig:
    """A config of 4 experts, 2 of them per token, unless `options` say otherwise."""
    sizes = {"num_experts": 4, "max_topk": 2, "max_tokens_per_rank": 4, "hidden": 8}
    return crossdock.EpConfig(**sizes | {"dtype": "float32"} | options)


def low_latency_config_of(**options: Any) -> crossdock.LowLatencyConfig:
    """The same of a LowLatencyGroup."""
    sizes = {"num_experts": 4, "max_topk": 2, "max_tokens_per_rank": 4, "hidden": 8}
    return crossdock.LowLatencyConfig(**sizes | {"dtype": "float32"} | options)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch on all ranks: their numbers of tokens differ, and may be 0."""

    tokens: tuple[int, ...]
    experts: int
    topk: int
    hidden: int
    dtype: str = "float32"
    index: str = "int64"
    layout: str = "expert_major"
    alignment: int = 1
    expert_ranks: tuple[int, ...] | None = None
    symmetric: bool = True  # receive into symmetric memory, else staged

    def config(self, **options: Any) -> crossdock.EpConfig:
        """The config of a group of these sizes."""
        return crossdock.EpConfig(
            num_experts=self.experts,
            max_topk=self.topk,
            max_tokens_per_rank=max(1, *self.tokens),
            hidden=self.hidden,
            dtype=self.dtype,
            layout=self.layout,
            alignment=self.alignment,
            expert_ranks=self.expert_ranks,
            **options,
        )

    def low_latency_config(self, **options: Any) -> crossdock.LowLatencyConfig:
        """The config of a LowLatencyGroup of these sizes."""
        return crossdock.LowLatencyConfig(
            num_experts=self.experts,
            max_topk=self.topk,
            max_tokens_per_rank=max(1, *self.tokens),
            hidden=self.hidden,
            dtype=self.dtype,
            expert_ranks=self.expert_ranks,
            **options,
        )

    def ids(self, seed: int) -> list[np.ndarray]:
        """Per rank [T,K] different experts, some of them -1."""
        ids = choices(seed, self.tokens, self.experts, self.topk)
        return [one.astype(self.index) for one in ids]

    def whole(self, seed: int, columns: int, dtype: Any = None) -> list[np.ndarray]:
        """Per rank [T,columns] small whole numbers, of which sums are exact in every type."""
        random = np.random.default_rng(seed)
        wanted = np.dtype(dtype or dtype_of(self.dtype))
        return [random.integers(-4, 5, (count, columns)).astype(wanted) for count in self.tokens]


def dtype_of(name: str) -> np.dtype:
    """The dtype of that name, also where NumPy itself has none."""
    return np.dtype(getattr(ml_dtypes, name, name))


def equal(got: np.ndarray, want: np.ndarray, name: str = "", dtype: Any = None) -> None:
    """Every element is what is wanted, of the same dtype unless another one is named."""
    __tracebackhide__ = True
    wanted = np.dtype(dtype or want.dtype)
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, want {want.shape}"
    assert got.dtype == wanted, f"{name}: got {got.dtype}, want {wanted}"
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)


def poison(comm: crossdock.Comm) -> None:
    """Fills all symmetric memory with NaN, for arrays that are allocated later."""
    size = comm.memory().largest_free_bytes
    if size:
        comm.empty(size // 4, np.float32).fill(np.nan)


def raises(
    kind: type[crossdock.CrossdockError], call: Callable[[], object]
) -> crossdock.CrossdockError:
    """The exception of exactly `kind` that the call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def rows_of(table: Mapping[type[Exception], Sequence[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """The rows of a table of mistakes, each behind the kind of exception under which it stands."""
    return [(kind, *row) for kind, rows in table.items() for row in rows]


def peers_are_told(
    me: Rank,
    kind: type[Exception],
    text: str,
    wrong: Callable[[], object],
    right: Callable[[], object],
    guilty: int = 1,
) -> crossdock.CrossdockError | None:
    """One rank makes a mistake, and the other ones, which make none, hear of it at once.

    The guilty rank's call raises `kind` with a text that matches; the error of the peers, a
    Mismatch that names the guilty rank and ends nothing, is returned to them.
    """
    start = time.monotonic()
    if me.rank == guilty:
        with pytest.raises(kind, match=text):
            wrong()
        return None
    error = raises(crossdock.Mismatch, right)
    assert time.monotonic() - start < 5, "the peer was told late"
    assert f"rank {guilty}" in error.text and not error.fatal
    return error
