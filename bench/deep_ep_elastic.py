"""One rank's ElasticBuffer and batch, and the operations of it that deep_ep_speed.py times."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from crossdock.deep_ep import ElasticBuffer
from deep_ep_batch import draw_tokens, draws

COPIES = 3  # of the tokens, used in turn; together larger than twice the L2 cache, if they are many


class ElasticBench:
    """Rows by expert (``do_expand``), as many as there are.

    Attributes:
        operations: what is timed: name, and method.
        rows: what the last dispatch has received.
    """

    operations = {"dispatch": "along", "combine": "combine"}
    few, expands = False, True

    def __init__(self, options: argparse.Namespace, rank: int, num_sms: int) -> None:
        self.options, self.rank, self.num_sms = options, rank, num_sms
        self.buffer = ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=options.tokens,
            hidden=options.hidden,
            num_topk=options.topk,
            explicitly_destroy=True,
        )
        device = self.buffer._session().device
        self.x, self.topk_idx, self.weights = draw_tokens(options, draws(rank, device), COPIES)
        *_, self.meeting, _ = self.dispatch(self.x[0][:1], expands=False)  # by many tokens' way
        if self.few:
            self.buffer.few_tokens = options.tokens
        self.new(0)

    def dispatch(self, x: torch.Tensor, expands: bool) -> Any:
        return self.buffer.dispatch(
            x,
            topk_idx=self.topk_idx[: len(x)],
            topk_weights=self.weights[: len(x)],
            num_experts=self.options.experts,
            num_sms=self.num_sms,
            do_cpu_sync=not self.buffer.few_tokens,
            do_expand=expands,
        )

    def meet(self) -> None:
        self.buffer.dispatch(self.x[0][:1], handle=self.meeting)

    def new(self, iteration: int) -> None:
        self.rows, _, _, self.handle, _ = self.dispatch(self.x[iteration % COPIES], self.expands)

    def along(self, iteration: int) -> None:
        self.rows, *_ = self.buffer.dispatch(
            self.x[iteration % COPIES], handle=self.handle, do_expand=self.expands
        )

    def combine(self, iteration: int) -> None:
        self.combined, *_ = self.buffer.combine(self.rows, self.handle)

    def check(self, copy: int) -> None:
        """Combining what was dispatched gives each token once per row that it had."""
        self.along(copy)
        self.combine(copy)
        of_rank = self.options.experts // self.options.ranks
        ranks = [(self.topk_idx // of_rank == one).any(1) for one in range(self.options.ranks)]
        rows = self.options.topk if self.expands else torch.stack(ranks).sum(0).unsqueeze(1)
        if not torch.equal(self.combined, self.x[copy] * rows):
            raise SystemExit(f"rank {self.rank}: wrong result")


class FewByRank(ElasticBench):
    """Few tokens, a row per (token, rank); room for as many as there can be: no host waits."""

    operations = {"dispatch, new": "new", "combine": "combine"}
    few, expands = True, False


class FewByExpert(FewByRank):
    """The same, a row per (token, expert)."""

    expands = True
