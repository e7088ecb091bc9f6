"""The batch of a benchmark: sizes, and a routing that every rank can compute for all ranks."""

from __future__ import annotations

import dataclasses

import numpy as np

from crossdock._config import Layout
from crossdock._core import constants

ROUTINGS = ("uniform", "zipf", "hot")
LAYOUTS = tuple(constants.LAYOUTS)
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One expert-parallel benchmark; fields have the names of the command's options."""

    ranks: int
    tokens: int  # of every rank
    hidden: int
    topk: int
    experts: int
    layout: Layout
    dtype: str
    routing: str
    seed: int
    device: str  # "cpu" or "cuda"
    through: str  # "numpy" or "torch"
    iters: int
    warmup: int
    timeout: float  # seconds

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def row_bytes(self) -> int:
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def name(self) -> str:
        """Of the communicator; keeps those of several batches apart, one after another."""
        return f"bench-{self.tokens}"

    def title(self) -> str:
        """All of it in one line."""
        return (
            f"crossdock bench ep: {self.ranks} ranks on {self.device} through {self.through}, "
            f"T={self.tokens} {self.sizes()} {self.dtype}, {self.layout}, {self.course()}"
        )

    def low_latency_title(self) -> str:
        """All but the number of tokens in one line."""
        return (
            f"crossdock bench ll: {self.ranks} ranks on {self.device} through {self.through}, "
            f"{self.sizes()} {self.dtype}, {self.course()}"
        )

    def sizes(self) -> str:
        return f"H={self.hidden} K={self.topk} E={self.experts}"

    def course(self) -> str:
        return f"routing {self.routing}, seed {self.seed}, {self.iters} iterations"


def choices(workload: Workload, rank: int) -> np.ndarray:
    """The experts that the tokens of `rank` have chosen, int64 [T,K], without repetition.

    uniform: every expert equally likely; zipf: expert e with weight 1 / (e + 1); hot: every token
    chooses expert 0, and its others uniformly.
    """
    random = np.random.default_rng([workload.seed, rank])
    # The K largest of log weight + Gumbel noise are a weighted draw without replacement.
    keys = random.gumbel(size=(workload.tokens, workload.experts))
    if workload.routing == "zipf":
        keys -= np.log(np.arange(1, workload.experts + 1))
    elif workload.routing == "hot":
        keys[:, 0] = np.inf
    chosen = np.argpartition(-keys, workload.topk - 1, axis=1)[:, : workload.topk]
    return np.ascontiguousarray(chosen, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Volume:
    """Rows that a workload moves, by rank."""

    received: list[int]  # rows of each rank's receive tensor
    wire_rows: list[int]  # rows that leave each rank, once per destination rank
    all_rows: list[int]  # rows that travel and rows that stay


def volume(workload: Workload) -> Volume:
    """Counts rows from the routing itself, as the library must."""
    pairs = np.zeros((workload.ranks, workload.ranks), np.int64)  # (token, rank) [source, dest]
    received = np.zeros(workload.ranks, np.int64)
    for source in range(workload.ranks):
        holders = choices(workload, source) // workload.local_experts
        for rank in range(workload.ranks):
            held = holders == rank
            pairs[source, rank] = held.any(axis=1).sum()
            received[rank] += held.sum()
    if workload.layout == "rank_major":
        received = pairs.sum(axis=0)
    everything = pairs.sum(axis=1)
    return Volume(received.tolist(), (everything - pairs.diagonal()).tolist(), everything.tolist())


def sum_of_copies(workload: Workload, rank: int) -> np.ndarray:
    """How many rows each token of `rank` has, int64 [T].

    Combine multiplies the token by this number where the experts change nothing.
    """
    chosen = choices(workload, rank)
    if workload.layout == "expert_major":
        return np.full(workload.tokens, workload.topk, np.int64)
    holders = np.sort(chosen // workload.local_experts, axis=1)
    return 1 + (np.diff(holders, axis=1) != 0).sum(axis=1)
